"""The guide's family, added in one file to a copy of the package: every family's tests; served, trained, exported."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tiny_llm import save_tiny_llm_text, with_a_merge
from training_runs import write_text

from transect.spec.families.family import TINY

ROOT = Path(__file__).parents[3]
PROMPT = "The cat sat on"
TOML = """
model = "tiny"
run_dir = "run"
steps = 4
device = "cpu"
data = {train = ["text.txt"], seq_len = 64, micro_batch = 256}
optimizer = {learning_rate = 1e-2}
"""


@pytest.fixture(scope="module")
def package(changed_packages):
    """A copy of the package with the change that the guide shows, and a tiny model as transformers saves it."""
    made = changed_packages("docs/extend/model.md")
    torch.manual_seed(0)
    config = transformers.SeedOssConfig(**TINY | {"vocab_size": 300, "head_dim": 16, "hidden_size": 64})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    model.save_pretrained(made / "tiny")
    save_tiny_llm_text(made / "tiny")
    with_a_merge(made / "tiny")
    return made


@pytest.mark.prove
def test_the_tests_of_all_families_run_for_it(package):
    files = ("spec/families/test_records.py", "models/test_parity.py", "checkpoints/test_gguf_families.py")
    words = ("-p", "no:cacheprovider", "-k", "seed_oss", "-m", "not gpu", *(f"tests/{file}" for file in files))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], env=package.environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^\.+", done.stdout, re.MULTILINE)[0]) >= 6


def test_it_answers_trains_and_is_exported(package):
    before = package.answer("tiny", PROMPT, 12)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(package / "tiny/tokenizer.json"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(package / "tiny")
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        whole = theirs.generate(ids, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(whole[0, ids.shape[1] :]) in before
    write_text(package / "text.txt")
    (package / "run.toml").write_text(TOML)
    package.transect("train", "run.toml")
    after = package.answer("run/last", PROMPT, 12)
    assert after != before
    package.transect("export", "--gguf", "run/last", "-o", "exported.gguf", "--type", "f32")
    assert package.answer("exported.gguf", PROMPT, 12) == after
