"""The guide's family, added in one file to a copy of the package: every family's tests; served, trained, exported."""

import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

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
def package(tmp_path_factory):
    """A copy of the package with the change that the guide shows, and a tiny model as transformers saves it."""
    folder = tmp_path_factory.mktemp("package")
    copytree(ROOT / "src", folder / "src", ignore=ignore_patterns("__pycache__"))
    (change,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/extend/model.md").read_text(), re.DOTALL)
    assert change.count("diff --git") == 1 and "new file" in change
    subprocess.run(["git", "apply", "-"], input=change, text=True, cwd=folder, check=True)
    torch.manual_seed(0)
    config = transformers.SeedOssConfig(**TINY | {"vocab_size": 300, "head_dim": 16, "hidden_size": 64})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    model.save_pretrained(folder / "tiny")
    save_tiny_llm_text(folder / "tiny")
    with_a_merge(folder / "tiny")
    return folder


def run(package, *arguments, module="transect", cwd=None):
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(package / "src")}, cwd=cwd or package, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def answer(package, model):
    """Greedy text after the prompt."""
    return run(package, "generate", model, PROMPT, "--max-tokens", 12, "--temperature", 0, "--dtype", "float32")


@pytest.mark.prove
def test_the_tests_of_all_families_run_for_it(package):
    files = ("spec/families/test_records.py", "models/test_parity.py", "checkpoints/test_gguf_families.py")
    out = run(
        package, "-p", "no:cacheprovider", "-k", "seed_oss", "-m", "not gpu", *(f"tests/{file}" for file in files),
        module="pytest", cwd=ROOT,
    )  # fmt: skip
    assert len(re.findall(r"^\.+", out, re.MULTILINE)[0]) >= 6


def test_it_answers_trains_and_is_exported(package):
    before = answer(package, "tiny")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(package / "tiny/tokenizer.json"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(package / "tiny")
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        whole = theirs.generate(ids, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(whole[0, ids.shape[1] :]) in before
    write_text(package / "text.txt")
    (package / "run.toml").write_text(TOML)
    run(package, "train", "run.toml")
    after = answer(package, "run/last")
    assert after != before
    run(package, "export", "--gguf", "run/last", "-o", "exported.gguf", "--type", "f32")
    assert answer(package, "exported.gguf") == after
