"""``transect export``: adapters and merged models that transformers and PEFT read."""

import pytest
import torch
from commands import run_here
from peft_models import PROMPT, logits_of, make_adapter, peft_logits
from training_runs import tiny_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from transect.models.context import VarlenContext
from transect.train.loop import checkpoint
from transect.train.loop.trainer import Trainer


@torch.no_grad()
def logits_here(trainer):
    model = trainer.model
    bounds = torch.tensor([0, len(PROMPT)], dtype=torch.int32)
    positions = torch.arange(len(PROMPT))
    return model.logits(model(torch.tensor(PROMPT), positions, VarlenContext(bounds, model.ops)))


def trained(folder, **settings):
    torch.set_num_threads(1)
    trainer = Trainer(tiny_run(folder, optimizer={"learning_rate": 2e-2}, **settings))
    for _ in range(2):
        trainer.step()
    with checkpoint.Writer(trainer.config.run_dir, keep=1) as writer:
        writer.save(trainer.snapshot())
    return trainer


QLORA = {"task": "qlora", "lora": {"group": 32, "targets": ["q_proj", "o_proj"], "rank": 4}}


@pytest.mark.parametrize(
    "settings",
    [
        {"task": "lora", "lora": {"dora": True, "rank": 4}},
        {"task": "lora", "lora": {"targets": ["lm_head", "embed_tokens"], "modules_to_save": ["norm"]}},
        {"task": "finetune"},
    ],
)
def test_merged_it_is_a_plain_model(settings, tmp_path) -> None:
    trainer = trained(tmp_path, **settings)
    done = run_here("export", "--merge", str(tmp_path / "run"), "-o", str(tmp_path / "plain"))
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(logits_of(model), logits_here(trainer), atol=1e-4, rtol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").chat_template
    again = run_here("export", "--merge", str(tmp_path / "run"), "-o", str(tmp_path / "plain"))
    assert again.returncode == 2 and "is there already" in again.stderr


def test_merged_over_4_bits_it_is_what_was_trained(tmp_path) -> None:
    from tiny_llm import save_tiny_llm

    (tmp_path / "model").mkdir()
    save_tiny_llm(tmp_path / "model", intermediate_size=128)
    trainer = trained(tmp_path, **QLORA)
    done = run_here("export", "--merge", str(tmp_path / "run" / "last"), "-o", str(tmp_path / "plain"))
    assert done.returncode == 0 and "in 4 bits" in done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(logits_of(model), logits_here(trainer), atol=1e-4, rtol=1e-4)


def test_an_adapter_is_written_as_peft_reads_it(tmp_path) -> None:
    trainer = trained(tmp_path, task="lora", lora={"rank": 4})
    done = run_here("export", str(tmp_path / "run"), "-o", str(tmp_path / "a"))
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert (
        names >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
        and "train_state.json" not in names
    )
    torch.testing.assert_close(
        peft_logits(tmp_path / "model", tmp_path / "a"), logits_here(trainer), atol=1e-4, rtol=1e-4
    )


def test_an_adapter_of_peft_is_merged_into_a_model(tmp_path) -> None:
    tiny_run(tmp_path)
    expected = make_adapter(tmp_path / "model", tmp_path / "a", target_modules=["q_proj"])
    arguments = ("--adapter", str(tmp_path / "a"), "--merge", "-o", str(tmp_path / "plain"))
    assert run_here("export", str(tmp_path / "model"), *arguments).returncode == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(logits_of(model), expected, atol=1e-4, rtol=1e-4)


def test_merged_it_has_the_dtype_of_its_base(tmp_path) -> None:
    tiny_run(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "model")
    trained(tmp_path, task="lora", lora={"rank": 4})
    for more, name in (((), "plain"), (("--dtype", "float32"), "wide")):
        done = run_here("export", "--merge", str(tmp_path / "run"), "-o", str(tmp_path / name), *more)
        assert done.returncode == 0, done.stderr
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("model", "plain", "wide")]
    assert sizes[1] < 1.1 * sizes[0] < 1.2 * sizes[2] / 2
    assert next(AutoModelForCausalLM.from_pretrained(tmp_path / "plain").parameters()).dtype == torch.bfloat16
