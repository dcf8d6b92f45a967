"""DPO and GRPO: the losses against their formulas, learning on small tasks, bits after a resume, and bad data."""

import itertools
import json
import math

import pytest
import torch
from training_runs import tiny_run

from transect.train.data.loader import Position
from transect.train.loop import checkpoint
from transect.train.loop.trainer import Trainer


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def write_pairs(path, count=24):
    with path.open("w") as file:
        for i in range(count):
            line = {"prompt": f"{i}?", "chosen": f"yes {i % 5}", "rejected": "no" * (i % 3 + 1)}
            file.write(json.dumps(line) + "\n")
    return str(path)


def dpo_run(tmp_path, **changes):
    data = {"train": [write_pairs(tmp_path / "pairs.jsonl")], "seq_len": 64, "micro_batch": 256}
    return tiny_run(tmp_path, objective="dpo", data=data, optimizer={"learning_rate": 3e-3}, **changes)


@pytest.mark.parametrize("task", ["finetune", "lora"])
def test_dpo_begins_at_log_two_and_learns_the_preference(tmp_path, task: str) -> None:
    trainer = Trainer(dpo_run(tmp_path, task=task, steps=30, lora={"rank": 8}))
    first = trainer.step()
    assert first.loss == pytest.approx(math.log(2), abs=1e-4)  # the model is its own reference
    for _ in range(25):
        last = trainer.step()
    assert last.loss < 0.5 and last.extra["accuracy"] == 1.0 and last.extra["margin"] > 1


def test_dpo_loss_is_its_formula(tmp_path) -> None:
    trainer = Trainer(dpo_run(tmp_path))
    for _ in range(4):
        trainer.step()
    objective = trainer.objective
    before = Position(objective.position.epoch, objective.position.index)
    (batch,) = objective.batches(0)
    objective.position = before
    bounds = batch.cu_seqlens.tolist()
    sums = []
    model = trainer.model.requires_grad_(False)
    for first, last in itertools.pairwise(bounds):
        from transect.models.context import VarlenContext

        context = VarlenContext(torch.tensor([0, last - first], dtype=torch.int32), trainer.model.ops)
        hidden = model(batch.tokens_T[first:last], torch.arange(last - first), context)
        logp = model.logits(hidden).log_softmax(-1)
        labels = batch.labels_T[first:last]
        sums.append(sum(float(logp[i, label]) for i, label in enumerate(labels.tolist()) if label >= 0))
    expected = 0.0
    for pair in range(len(sums) // 2):
        gain = (sums[2 * pair] - float(batch.reference[2 * pair])) - (
            sums[2 * pair + 1] - float(batch.reference[2 * pair + 1])
        )
        expected += math.log1p(math.exp(-0.1 * gain)) / (len(sums) // 2)
    assert float(objective.loss(batch)) == pytest.approx(expected, rel=1e-4)


def write_sums(path, *, wrong_every=0, highest=4):
    with path.open("w") as file:
        for i in range(highest):
            for j in range(highest):
                for repeat in range(4):
                    answer = str(i + j)
                    said = answer if not wrong_every or repeat % wrong_every else str((i + 3 * j + repeat) % 10)
                    prompt = f"{i}+{j}"
                    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": said}]
                    file.write(json.dumps({"prompt": prompt, "answer": answer, "messages": messages}) + "\n")
    return str(path)


def grpo_run(tmp_path, model=None, **changes):
    data = {"train": [write_sums(tmp_path / "sums.jsonl")], "seq_len": 64, "micro_batch": 1024}
    extra = {} if model is None else {"model": model}
    return tiny_run(
        tmp_path, objective="grpo", data=data, optimizer={"learning_rate": 1e-3, "weight_decay": 0.0},
        grpo={"prompts": 8, "group": 8, "max_tokens": 3}, run_dir=str(tmp_path / "grpo"), **extra, **changes,
    )  # fmt: skip


def test_grpo_raises_the_reward_on_sums(tmp_path) -> None:
    # First a model that has seen sums of which half were wrong, so that it is right now and then.
    noisy = [write_sums(tmp_path / "noisy.jsonl", wrong_every=2)]
    config = tiny_run(
        tmp_path, steps=60, data={"train": noisy, "seq_len": 64, "micro_batch": 512}, optimizer={"learning_rate": 3e-3}
    )
    base = Trainer(config).run()
    trainer = Trainer(grpo_run(tmp_path, str(base), steps=40))
    records = [trainer.step() for _ in range(40)]
    early = sum(record.extra["reward"] for record in records[:5]) / 5
    late = sum(record.extra["reward"] for record in records[-5:]) / 5
    assert 0.1 < early < 0.75
    assert late > early + 0.2
    assert all(abs(record.extra["ratio"] - 1) < 1e-3 for record in records)  # trainer and engine agree


def test_grpo_resumes_to_the_last_bit(tmp_path) -> None:
    config = grpo_run(tmp_path, steps=4, task="lora", lora={"rank": 4})
    through = Trainer(config)
    expected = [through.step() for _ in range(4)]
    first = Trainer(config)
    for _ in range(2):
        first.step()
    with checkpoint.Writer(tmp_path / "grpo", keep=1) as writer:
        writer.save(first.snapshot())
    second = Trainer(config, checkpoint.newest(tmp_path / "grpo"))
    for record in expected[2:]:
        again = second.step()
        assert (again.loss, again.gradient_norm, again.extra) == (record.loss, record.gradient_norm, record.extra)


@pytest.mark.parametrize(
    ("objective", "line", "message"),
    [
        ("dpo", {"prompt": "x", "chosen": "y"}, "line 1: no layout is known with the keys prompt, chosen:"),
        ("dpo", {"prompt": "x", "chosen": "y", "rejected": ""}, '"rejected" must be text'),
        ("grpo", {"answer": "3"}, 'line 1: the row needs a "prompt"; its keys are answer'),
        ("grpo", {"prompt": 3}, 'line 1: "prompt" must be a list of messages'),
        ("grpo", {"prompt": "", "answer": "3"}, 'line 1: "prompt" must be text'),
        ("grpo", {"prompt": [{"role": "user"}]}, 'line 1: messages.0. needs a "content"'),
        ("grpo", {"prompt": "x", "tools": [3]}, "line 1: tools.0. must be an object such as"),
        ("grpo", {"prompt": "x" * 99, "answer": "3"}, "the prompt has 118 tokens; .* leaves room for 60 beside"),
        ("grpo", {"prompt": "x"}, '"exact" compares with a row\'s "answer", and no row of data.train has one'),
    ],
)
def test_bad_data_is_named(tmp_path, objective: str, line: dict, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps(line) + "\n")
    data = {"train": [str(tmp_path / "bad.jsonl")]}
    config = tiny_run(tmp_path, objective=objective, data=data, grpo={"max_tokens": 4})
    with pytest.raises(ValueError, match=message):
        Trainer(config)


def test_an_unknown_reward_is_named(tmp_path) -> None:
    config = grpo_run(tmp_path)
    with pytest.raises(ValueError, match="nowhere:at_all"):
        from dataclasses import replace

        Trainer(replace(config, grpo=replace(config.grpo, reward="nowhere:at_all")))
