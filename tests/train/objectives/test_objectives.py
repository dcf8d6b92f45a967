"""DPO's variants, ORPO, KTO and distillation: losses against their formulas in float64, resume, and bad settings."""

import itertools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_llm import save_tiny_llm
from training_runs import tiny_run, write_chats

from transect.models.context import VarlenContext
from transect.train.loop import checkpoint
from transect.train.loop.trainer import Trainer
from transect.train.objectives.divergence import Divergence, distillation_loss


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def write_rows(tmp_path, objective):
    path = tmp_path / f"{objective}.jsonl"
    with path.open("w") as file:
        for i in range(24):
            row = {"prompt": f"{i}?", "chosen": f"yes {i % 5}", "rejected": "no" * (i % 3 + 1)}
            if objective == "kto":
                good = i % 3 != 0
                row = {"prompt": row["prompt"], "completion": row["chosen" if good else "rejected"], "label": good}
            file.write(json.dumps(row) + "\n")
    return str(path)


def run(tmp_path, objective, **changes):
    data = {"train": [write_rows(tmp_path, objective)], "seq_len": 128, "micro_batch": 256} | changes.pop("data", {})
    return Trainer(
        tiny_run(tmp_path, objective=objective, data=data, optimizer={"learning_rate": 3e-3}, steps=20, **changes)
    )


def document_logprobs(model, batch):
    """For each document: log-probabilities of all next tokens in float64, and which of them are the answer's."""
    found = []
    for first, last in itertools.pairwise(batch.cu_seqlens.tolist()):
        tokens = batch.tokens_T[first:last]
        context = VarlenContext(torch.tensor([0, last - first], dtype=torch.int32), model.ops)
        with torch.no_grad():
            logits = model.logits(model(tokens, torch.arange(last - first), context)).double()
        values = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        found.append((values, batch.labels_T[first : last - 1] >= 0))
    return found


def after_some_steps(trainer, count=4):
    for _ in range(count):
        trainer.step()
    return trainer.objective.batches(count)[0]


@pytest.mark.parametrize(
    ("loss", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("robust", 0.2), ("hinge", 0.0), ("ipo", 0.0)]
)
def test_the_loss_of_each_kind_of_dpo_is_its_formula(tmp_path, loss: str, smoothing: float) -> None:
    trainer = run(tmp_path, "dpo", dpo={"loss": loss, "label_smoothing": smoothing, "beta": 0.3})
    batch = after_some_steps(trainer)
    expected = []
    found = document_logprobs(trainer.model, batch)
    for pair in range(len(found) // 2):
        (c, c_answer), (r, r_answer) = found[2 * pair : 2 * pair + 2]
        chosen = c[c_answer].sum() - batch.reference[2 * pair].double()
        rejected = r[r_answer].sum() - batch.reference[2 * pair + 1].double()
        delta = 0.3 * (chosen - rejected)
        kinds = {
            "sigmoid": -F.logsigmoid(delta) * (1 - smoothing) - F.logsigmoid(-delta) * smoothing,
            "robust": (-F.logsigmoid(delta) * (1 - smoothing) + F.logsigmoid(-delta) * smoothing) / (1 - 2 * smoothing),
            "hinge": torch.relu(1 - delta),
            "ipo": (chosen / c_answer.sum() - rejected / r_answer.sum() - 1 / (2 * 0.3)) ** 2,
        }
        expected.append(float(kinds[loss]))
    assert float(trainer.objective.loss(batch).detach()) == pytest.approx(np.mean(expected), rel=1e-4)
    assert trainer.objective.metrics()["margin"][0] > 0


@pytest.mark.parametrize("whole", [True, False])
def test_orpo_is_its_formula_and_needs_no_reference(tmp_path, whole: bool) -> None:
    trainer = run(tmp_path, "orpo", orpo={"beta": 0.4, "train_prompt": whole})
    batch = after_some_steps(trainer)
    assert not batch.reference.any()
    found = document_logprobs(trainer.model, batch)
    nll = torch.cat([values if whole else values[answer] for values, answer in found[::2]])
    ratios = []
    for (c, c_answer), (r, r_answer) in zip(found[::2], found[1::2], strict=True):
        a, b = c[c_answer].mean(), r[r_answer].mean()
        ratios.append(F.logsigmoid((a - b) - (torch.log1p(-a.exp()) - torch.log1p(-b.exp()))))
    expected = float(-nll.mean() - 0.4 * torch.stack(ratios).mean())
    assert float(trainer.objective.loss(batch).detach()) == pytest.approx(expected, rel=1e-4)


def test_kto_is_its_formula(tmp_path) -> None:
    trainer = run(tmp_path, "kto", kto={"beta": 0.3, "desirable_weight": 0.8, "undesirable_weight": 1.3})
    batch = after_some_steps(trainer, 8)
    assert 0 < int(batch.good.sum()) < len(batch.good)
    found = document_logprobs(trainer.model, batch)
    gains = torch.stack([values[answer].sum() for values, answer in found]) - batch.reference.double()
    kl = gains[1::2].mean().clamp(min=0)
    assert float(kl) > 0
    losses = []
    for gain, good in zip(gains[::2], batch.good.tolist(), strict=True):
        if good:
            losses.append(0.8 * (1 - torch.sigmoid(0.3 * (gain - kl))))
        else:
            losses.append(1.3 * (1 - torch.sigmoid(0.3 * (kl - gain))))
    assert float(trainer.objective.loss(batch).detach()) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)
    metrics = {name: total / count for name, (total, count) in trainer.objective.metrics().items()}
    assert metrics["gain_good"] > metrics["gain_bad"]


def test_the_answer_beside_a_prompt_of_kto_is_never_its_own(tmp_path) -> None:
    objective = run(tmp_path, "kto").objective
    stream = objective._train.stream
    rows = [[int(t) for t in stream.tokens[slice(*stream.bounds(i))]] for i in range(stream.num_documents)]
    answers = [[int(t) for t, said in zip(row, stream.trained[slice(*stream.bounds(i))], strict=True) if said]
               for i, row in enumerate(rows)]  # fmt: skip
    own, beside = answers[::2], answers[1::2]
    assert sorted(map(tuple, own)) == sorted(map(tuple, beside))
    for index, (a, b) in enumerate(zip(rows[::2], rows[1::2], strict=True)):
        prompt = len(a) - len(own[index]) - 1  # what follows the end of an answer is a line break
        assert a[:prompt] == b[:prompt]


def test_pairs_are_taken_apart_for_kto_and_verdicts_are_not_for_others(tmp_path) -> None:
    pairs = write_rows(tmp_path, "dpo")
    trainer = run(tmp_path, "kto", data={"train": [pairs]})
    assert trainer.objective._train.good.tolist() == [True, False] * 24
    for objective, message in (("next_token", 'set objective = "kto"'), ("dpo", "a pair needs")):
        with pytest.raises(ValueError, match=message):
            run(tmp_path, objective, data={"train": [write_rows(tmp_path, "kto")]})
    chats = write_chats(tmp_path / "chats.jsonl")
    with pytest.raises(ValueError, match='needs "prompt", "completion" and a "label"'):
        run(tmp_path, "kto", data={"train": [chats]})


@pytest.mark.parametrize("task", ["finetune", "lora"])
@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto", "distill"])
def test_a_resumed_run_is_the_same_to_the_last_bit(tmp_path, objective: str, task: str) -> None:
    changes = {"task": task, "lora": {"rank": 4}, "run_dir": str(tmp_path / objective)}
    if objective == "distill":
        changes |= {"data": {"train": [write_chats(tmp_path / "chats.jsonl")]}, "distill": teacher(tmp_path)}
    through = run(tmp_path, objective, **changes)
    expected = [through.step() for _ in range(5)]
    first = run(tmp_path, objective, **changes)
    for _ in range(3):
        first.step()
    with checkpoint.Writer(tmp_path / objective, keep=1) as writer:
        writer.save(first.snapshot())
    second = run(tmp_path, objective, **changes)
    second = Trainer(second.config, checkpoint.newest(tmp_path / objective))
    for record in expected[3:]:
        again = second.step()
        assert (again.loss, again.gradient_norm, again.extra) == (record.loss, record.gradient_norm, record.extra)


def teacher(tmp_path, **changes):
    folder = tmp_path / "teacher"
    if not folder.exists():
        folder.mkdir()
        save_tiny_llm(folder, seed=7, hidden_size=96, num_hidden_layers=3)
    return {"teacher": str(folder), **changes}


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_a_divergence_and_its_gradients_are_those_of_autograd(kind: str, monkeypatch) -> None:
    monkeypatch.setattr("transect.train.objectives.divergence.LOSS_ELEMENTS", 4 * 11 * 2)  # two rows at a time
    draw = torch.Generator().manual_seed(1)
    x, w = torch.randn(9, 5, generator=draw).double(), torch.randn(11, 5, generator=draw).double()
    tx, tw = torch.randn(9, 7, generator=draw).double(), torch.randn(13, 7, generator=draw).double()
    x.requires_grad_(True), w.requires_grad_(True)
    labels = torch.tensor([1, -100, 0, 10, 4, -100, 7, 7, 2])
    how = Divergence(kind, mixture=0.3, temperature=1.7, weight=0.6)
    loss, divergence = distillation_loss(x, w, tx, tw, labels, how)
    found = torch.autograd.grad(loss, (x, w), torch.tensor(2.5).double())
    used = labels >= 0
    z = (x @ w.mT)[used]
    p, q = (z / 1.7).softmax(-1), ((tx @ tw[:11].mT)[used] / 1.7).softmax(-1)
    m = 0.3 * q + 0.7 * p
    by_torch = {
        "forward": F.kl_div(p.log(), q, reduction="none").sum(-1),
        "reverse": F.kl_div(q.log(), p, reduction="none").sum(-1),
        "jsd": 0.3 * F.kl_div(m.log(), q, reduction="none").sum(-1)
        + 0.7 * F.kl_div(m.log(), p, reduction="none").sum(-1),
    }[kind].mean()
    expected = 0.6 * by_torch + 0.4 * F.cross_entropy(z, labels[used])
    torch.testing.assert_close(divergence, by_torch.detach())
    torch.testing.assert_close(loss, expected)
    for a, b in zip(found, torch.autograd.grad(expected, (x, w), torch.tensor(2.5).double()), strict=True):
        torch.testing.assert_close(a, b)


def test_a_student_comes_nearer_to_its_teacher(tmp_path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl")
    trainer = run(
        tmp_path, "distill", distill=teacher(tmp_path, weight=0.9),
        data={"train": [chats], "validation": [chats], "seq_len": 128},
    )  # fmt: skip
    before = trainer.evaluate()
    assert before.extra["cross_entropy"] > 3
    for _ in range(12):
        record = trainer.step()
    after = trainer.evaluate()
    assert after.loss < 0.9 * before.loss and record.extra["divergence"] < before.loss
    assert "teacher" in trainer.identity


def test_a_teacher_must_know_the_same_tokens(tmp_path) -> None:
    chats = {"train": [write_chats(tmp_path / "chats.jsonl")]}
    with pytest.raises(ValueError, match=r"name it in distill\.teacher"):
        run(tmp_path, "distill", data=chats)
    settings = teacher(tmp_path)
    file = tmp_path / "teacher" / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_end|>", "<|fin|>"))
    with pytest.raises(ValueError, match="has another tokenizer than the model"):
        run(tmp_path, "distill", distill=settings, data=chats)


@pytest.mark.parametrize(
    ("table", "values", "message"),
    [
        ("dpo", {"loss": "robust"}, "needs dpo.label_smoothing"),
        ("dpo", {"loss": "ipo", "label_smoothing": 0.1}, "has no effect"),
        ("dpo", {"label_smoothing": 0.5}, "less than 0.5"),
        ("kto", {"desirable_weight": -1}, "kto.desirable_weight must be at least 0"),
        ("orpo", {"beta": 0}, "orpo.beta must be greater than 0"),
        ("distill", {"weight": 0}, "distill.weight"),
        ("distill", {"temperature": 0}, "distill.temperature must be greater than 0"),
        ("distill", {"mixture": 1.0}, "distill.mixture must lie between"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, table: str, values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_run(tmp_path, **{table: values})
