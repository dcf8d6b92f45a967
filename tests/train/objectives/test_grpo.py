"""GRPO: the loss of every type against its formula, several steps a rollout, cut draws, references and rewards."""

import json
import math

import numpy as np
import pytest
import torch
from grpo_runs import documents, grpo_run

from transect.models.context import VarlenContext
from transect.train.data.loader import Position
from transect.train.loop import checkpoint
from transect.train.loop.trainer import Trainer
from transect.train.objectives.answers import advantages
from transect.train.objectives.base import StepFailed
from transect.train.objectives.drawn import Cut, drawn_from
from transect.train.objectives.logprobs import KeptTokens, token_logprobs
from transect.train.objectives.rewards import Judge


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def all_logits(model, tokens):
    """Logits of one document in float64, ``[T, V]``."""
    context = VarlenContext(torch.tensor([0, len(tokens)], dtype=torch.int32), model.ops)
    with torch.no_grad():
        return model.logits(model(tokens, torch.arange(len(tokens)), context)).double()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["dapo", "grpo", "dr_grpo", "bnpo"])
def test_the_loss_is_the_formula_of_its_type(tmp_path, kind: str, masked: bool) -> None:
    """The formula as TRL writes it, over rows of answers, in float64 and from whole logits."""
    settings = {
        "loss": kind, "mask_truncated": masked, "unbiased_kl": not masked, "iterations": 3, "beta": 0.3, "clip": 0.05,
        "clip_high": 0.1, "temperature": 0.7, "max_tokens": 60,
    }  # fmt: skip
    trainer = Trainer(grpo_run(tmp_path, grpo=settings, data={"seq_len": 96, "micro_batch": 128}))
    objective, model = trainer.objective, trainer.model
    trainer.step()
    batches = objective.batches(1)
    total_labels = sum(batch.num_labels for batch in batches)
    ours = sum(float(objective.loss(batch).detach()) * batch.num_labels / total_labels for batch in batches)
    assert len(batches) > 1
    rollout, settings = objective._rollout, trainer.config.grpo
    truncated = rollout.truncated_A.numpy()
    assert 0 < truncated.sum() < len(rollout)
    rows, lengths = [], []
    for tokens, labels, old, advantage, reference in documents(batches):
        at = labels >= 0
        logp = (all_logits(model, tokens)[at] / 0.7).log_softmax(-1).gather(1, labels[at][:, None])[:, 0]
        ratio = (logp - old[at].double()).exp()
        a = advantage[at].double()
        further = reference[at].double() - logp
        kl = (further.exp() - further - 1) * (1 if masked else ratio)
        row = -torch.minimum(ratio * a, ratio.clamp(1 - 0.05, 1 + 0.1) * a) + 0.3 * kl
        rows.append(row)
        lengths.append(len(row))
    answers = len(rollout)  # masked ones count as answers with a loss of 0
    assert len(rows) == answers - (truncated.sum() if masked else 0)
    every = float(torch.cat(rows).sum())
    expected = {
        "dapo": every / sum(lengths),
        "grpo": sum(float(row.mean()) for row in rows) / answers,
        "dr_grpo": every / (answers * settings.max_tokens),
    }
    if kind == "bnpo":
        means, at = [], 0
        for batch in batches:
            own = rows[at : at + len(batch.cu_seqlens) - 1]
            at += len(own)
            means.append(float(torch.cat(own).mean()))
        expected["bnpo"] = sum(means) / len(means)
    assert ours == pytest.approx(expected[kind], rel=2e-4, abs=1e-6)
    metrics = {name: total / count for name, (total, count) in objective.metrics().items()}
    assert metrics["kl"] > 0 and metrics["ratio"] > 1.001  # the weights have moved since the rollout


def test_advantages_are_those_of_torch_with_n_minus_one() -> None:
    rewards = np.random.default_rng(0).normal(size=(3, 5))
    x = torch.from_numpy(rewards)
    by_group = (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-4)
    np.testing.assert_allclose(advantages(rewards, "group"), by_group.numpy(), rtol=1e-12)
    by_batch = (x - x.mean(1, keepdim=True)) / (x.std() + 1e-4)
    np.testing.assert_allclose(advantages(rewards, "batch"), by_batch.numpy(), rtol=1e-12)
    np.testing.assert_allclose(advantages(rewards, "none"), (x - x.mean(1, keepdim=True)).numpy(), rtol=1e-12)
    rewards[0, 2] = np.nan
    found = advantages(rewards, "group")
    left = np.delete(rewards[0], 2)
    assert found[0, 2] == 0 and np.isfinite(found).all()
    np.testing.assert_allclose(np.delete(found[0], 2), (left - left.mean()) / (left.std(ddof=1) + 1e-4), rtol=1e-12)


def test_logprobs_of_a_cut_distribution_have_the_gradient_of_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(7, 5, generator=generator).double(), torch.randn(11, 5, generator=generator).double())
    hidden.requires_grad_(True), weight.requires_grad_(True)
    labels = torch.tensor([3, -100, 0, 10, -100, 4, 7])
    could = torch.rand(7, 11, generator=generator) < 0.5
    could[labels < 0] = False
    could[labels >= 0, labels[labels >= 0]] = True
    kept = KeptTokens(could.nonzero()[:, 1], torch.nn.functional.pad(could.sum(1).cumsum(0), (1, 0)))
    upstream = torch.randn(7, generator=generator).double()
    ours = token_logprobs(hidden, weight, labels, temperature=0.6, kept=kept)
    found = torch.autograd.grad(ours, (hidden, weight), upstream)
    masked = (hidden @ weight.mT / 0.6).masked_fill(~could, float("-inf"))
    used = labels >= 0
    plain = masked[used].log_softmax(-1).gather(1, labels[used][:, None])[:, 0]
    expected = torch.autograd.grad(plain, (hidden, weight), upstream[used])
    torch.testing.assert_close(ours[used], plain)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_old_logprobs_are_those_of_the_distribution_that_drew(tmp_path) -> None:
    """Many first tokens of one prompt: how often each came is what its log-probability says."""
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "which?"}) + "\n")
    settings = {"prompts": 12, "group": 128, "max_tokens": 1, "temperature": 1.6, "top_k": 12, "top_p": 0.9}
    config = grpo_run(tmp_path, grpo=settings, data={"train": [str(tmp_path / "one.jsonl")], "micro_batch": 4096})
    objective = Trainer(config).objective
    objective.batches(0)
    rollout = objective._rollout
    drawn, count = torch.unique(rollout.tokens_N, return_counts=True)
    assert 4 <= len(drawn) <= 12
    first_kept = int(rollout.kept_N[0])
    assert set(drawn.tolist()) <= set(rollout.kept_ids[:first_kept].tolist())
    likely = {int(t): math.exp(float(v)) for t, v in zip(rollout.tokens_N, rollout.old_N, strict=True)}
    expected = np.array([likely[int(token)] for token in drawn]) * len(rollout)
    assert expected.sum() == pytest.approx(len(rollout), rel=0.02)
    chi = float(((count.numpy() - expected) ** 2 / expected).sum())
    assert chi < len(drawn) + 5 * math.sqrt(2 * len(drawn))


def test_what_could_be_drawn_is_what_the_sampler_leaves() -> None:
    z = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]])
    p = z.softmax(-1)[0]
    drawn = torch.tensor([4])
    assert drawn_from(z, drawn, Cut(top_k=2))[0].tolist() == [True, True, False, False, True]
    assert drawn_from(z, drawn, Cut(top_p=float(p[0]) + 0.01))[0].tolist() == [True, True, False, False, True]
    assert drawn_from(z, drawn, Cut(min_p=float(p[2] / p[0]) - 1e-3))[0].tolist() == [True, True, True, False, True]
    # A share of what top-k leaves: 0.7311 of the two likeliest is the first.
    assert drawn_from(z, drawn, Cut(top_k=2, top_p=0.73))[0].tolist() == [True, False, False, False, True]


@pytest.mark.parametrize("task", ["finetune", "lora"])
def test_the_reference_is_the_model_at_its_start_and_no_bit_changes(tmp_path, task: str) -> None:
    config = grpo_run(tmp_path, task=task, lora={"rank": 4}, grpo={"beta": 0.1, "iterations": 2})
    trainer = Trainer(config)
    fresh = Trainer(config)
    first = trainer.step()
    assert first.extra["kl"] == pytest.approx(0, abs=1e-6)
    trainer.step()
    before = {name: p.detach().clone() for name, p in trainer.trainable.parameters.items()}
    trainer.objective.batches(2)  # a new rollout
    for name, p in trainer.trainable.parameters.items():
        assert torch.equal(before[name], p)
    rollout = trainer.objective._rollout
    assert torch.equal(rollout.reference_N, fresh.objective._logprobs(rollout))
    assert not torch.allclose(rollout.reference_N, rollout.old_N, atol=1e-4)


@pytest.mark.parametrize("cut", [{}, {"top_k": 7, "temperature": 0.8, "beta": 0.1}], ids=["plain", "cut"])
def test_a_run_killed_within_a_rollout_goes_on_to_the_same_bits(tmp_path, cut: dict) -> None:
    settings = {"iterations": 2, "minibatches": 2, **cut}
    config = grpo_run(tmp_path, steps=7, task="lora", lora={"rank": 4}, grpo=settings)
    through = Trainer(config)
    expected = [through.step() for _ in range(7)]
    assert expected[0].extra["reward"] == expected[3].extra["reward"] != expected[4].extra["reward"]
    assert expected[3].extra["ratio"] > 1.0001
    for at in (1, 3, 6):
        first = Trainer(config)
        for _ in range(at):
            first.step()
        with checkpoint.Writer(tmp_path / "grpo", keep=9) as writer:
            writer.save(first.snapshot())
        second = Trainer(config, checkpoint.newest(tmp_path / "grpo"))
        for record in expected[at:]:
            again = second.step()
            assert (again.loss, again.gradient_norm, again.extra) == (record.loss, record.gradient_norm, record.extra)
        for a, b in zip(through.trainable.parameters.values(), second.trainable.parameters.values(), strict=True):
            assert torch.equal(a, b)


def test_answers_that_were_drawn_otherwise_are_drawn_anew(tmp_path, caplog) -> None:
    """Their log-probabilities are of another distribution, or they would be shared out otherwise."""
    config = grpo_run(tmp_path, grpo={"minibatches": 2})
    trainer = Trainer(config)
    trainer.step()
    with checkpoint.Writer(tmp_path / "grpo", keep=1) as writer:
        writer.save(trainer.snapshot())
    found = checkpoint.newest(tmp_path / "grpo")
    assert found.state["position"]["index"] == 3
    goes_on = Trainer(config.changed(["grpo.max_tokens=5", "grpo.iterations=2"]), found)
    assert goes_on.objective._rollout is not None and not caplog.records
    for change in ("grpo.temperature=0.5", "grpo.minibatches=3", "grpo.top_k=5", "grpo.beta=0.1"):
        other = Trainer(config.changed([change]), found)
        assert other.objective._rollout is None and "draws new ones" in caplog.text
        caplog.clear()
    assert other.step().extra["ratio"] < 1.0001 and other.objective.position.index == 6
    rows = tmp_path / "prompts.jsonl"
    rows.write_text(rows.read_text() + '{"prompt": "another"}\n')
    assert Trainer(config, found, allow_changed=["data"]).objective._rollout is None


def test_between_rollouts_a_checkpoint_holds_none(tmp_path) -> None:
    trainer = Trainer(grpo_run(tmp_path, grpo={"iterations": 2}))
    trainer.step()
    assert any(name.startswith("objective/") for name in trainer.snapshot().tensors)
    trainer.step()
    assert not any(name.startswith("objective/") for name in trainer.snapshot().tensors)


def test_when_all_answers_are_cut_off_nothing_is_learned(tmp_path) -> None:
    trainer = Trainer(grpo_run(tmp_path, grpo={"max_tokens": 1, "mask_truncated": True}))
    before = {name: p.detach().clone() for name, p in trainer.trainable.parameters.items()}
    assert trainer.step().labels == 0
    assert all(torch.equal(before[name], p) for name, p in trainer.trainable.parameters.items())


def test_rewards_are_weighted_sums_and_none_counts_for_nothing(tmp_path, monkeypatch) -> None:
    grpo_run(tmp_path)
    monkeypatch.chdir(tmp_path)  # where a user's module lies
    judge = Judge(["judge:length", "judge:vowels", "exact"], [2.0, 0.5, 1.0])
    rewards = np.array([judge("aeb", {"answer": "x"}), judge("", {"answer": ""}), [math.nan] * 3])
    assert judge.total(rewards)[:2].tolist() == [2 * 3 + 0.5 * 2, 0 + 1.0]
    assert math.isnan(judge.total(rewards)[2])
    trainer = Trainer(grpo_run(tmp_path, grpo={"reward": ["judge:length", "judge:vowels"], "reward_weights": [1, 3]}))
    extra = trainer.step().extra
    assert {"reward/length", "reward/vowels"} <= set(extra)


def test_a_step_has_the_micro_batches_that_its_answers_fill(tmp_path) -> None:
    one, other = Trainer(grpo_run(tmp_path)), Trainer(grpo_run(tmp_path, accumulate=3))
    assert one.step().loss == other.step().loss
    assert [line for line in other.told if line not in one.told] == [
        "accumulate has no effect on this run: a step has the micro-batches that its answers fill"
    ]


def test_exact_says_nothing_of_a_row_without_an_answer() -> None:
    """An empty answer is not right there, nor is "None"."""
    judge = Judge(["exact"], [])
    said = [judge(*given)[0] for given in (("", {}), ("None", {"answer": None}), (" 3\n", {"answer": 3}))]
    assert np.isnan(said[:2]).all() and said[2] == 1


def test_prompts_that_cannot_be_used_are_left_out_and_told_of(tmp_path) -> None:
    good, long = {"prompt": "1?", "answer": "1"}, {"prompt": "?" * 99}
    (tmp_path / "odd.jsonl").write_text("\n".join([json.dumps(good), "{", json.dumps(long), '{"prompt": null}']))
    odd = {"train": [str(tmp_path / "odd.jsonl")], "on_bad_row": "skip"}
    objective = Trainer(grpo_run(tmp_path, data=odd)).objective
    said = " ".join(objective.described())
    assert said.startswith("1 prompts") and said.count("left out 1 row: ") == 3
    assert "the prompt has 118 tokens" in said and "line 2" in said
    (tmp_path / "odd.jsonl").write_text(json.dumps(long))
    with pytest.raises(ValueError, match="no row that can be used; left out 1 row: the prompt has 118 tokens"):
        Trainer(grpo_run(tmp_path, data=odd))


ODD = """
import sys

def ends(answer, record):
    sys.exit()

def huge(answer, record):
    return 1e200

def changes(answer, record):
    record["prompt"]["content"] = "another"
    return len(answer)
"""


def test_what_a_reward_does_to_its_row_or_the_process_stays_with_it(tmp_path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    record = {"prompt": {"content": "this"}}
    assert Judge([f"{tmp_path}/odd.py:changes"], [])("four", record) == [4.0]
    assert record == {"prompt": {"content": "this"}}
    for name, message in (("ends", "raised SystemExit"), ("huge", "must return a finite number")):
        with pytest.raises(StepFailed, match=message):
            Judge([f"{tmp_path}/odd.py:{name}"], [])("four", record)


def test_a_reward_that_raises_names_the_record_and_the_run_is_saved(tmp_path) -> None:
    config = grpo_run(tmp_path, steps=4)
    trainer = Trainer(config)
    trainer.step()
    before = Position(trainer.objective.position.epoch, trainer.objective.position.index)
    works = trainer.objective._judge
    trainer.objective._judge = Judge([f"{tmp_path}/judge.py:fails"], [])
    with pytest.raises(
        StepFailed, match=r"step 2: the reward .*judge.py:fails .*'prompt': '.*KeyError.*step-00000001 is"
    ):
        trainer.run()
    assert trainer.objective.position == before
    resumed = Trainer(config, checkpoint.newest(config.run_dir))
    trainer.objective._judge = works
    assert resumed.step().loss == trainer.step().loss


@pytest.mark.parametrize(
    ("grpo", "message"),
    [
        ({"reward": "judge"}, "there is no colon"),
        ({"reward": "nowhere.py:f"}, "there is no file .*nowhere.py"),
        ({"reward_weights": [1.0, 2.0]}, "has 2 numbers for 1 functions"),
        ({"group": 1}, "grpo.group must be at least 2"),
        ({"minibatches": 99}, "more than the 12 answers"),
        ({"clip": 1.5}, "grpo.clip must lie between 0 and 1"),
        ({"top_p": 0}, "grpo.top_p must lie in"),
        ({"beta": -1}, "grpo.beta must be at least 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, grpo: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(grpo_run(tmp_path, grpo=grpo))


def test_validation_is_the_reward_of_greedy_answers(tmp_path) -> None:
    config = grpo_run(tmp_path)
    (tmp_path / "held.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    config = grpo_run(tmp_path, data={"validation": [str(tmp_path / "held.jsonl")], "train": list(config.data.train)})
    trainer = Trainer(config)
    record = trainer.evaluate()
    assert record.labels == 2 and record.loss == -record.extra["reward"]
    assert trainer.evaluate() == record
