"""GRPO on a LoRA draws with an engine over the base: the weights enter as an adapter, and nothing else notices."""

from dataclasses import asdict

import pytest
import torch
from grpo_runs import documents, grpo_run

from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.train.loop.trainer import Trainer
from transect.train.objectives.rollout import draw_answers


def lora_run(tmp_path, **changes):
    lora = {"rank": 4, "alpha": 16.0, "targets": ["q", "v", "down"]}
    return grpo_run(tmp_path, task="lora", lora=lora, threads=1, **changes)


@pytest.mark.parametrize("precision", ["float32", "mixed"])
def test_log_probabilities_are_those_of_the_trainer_after_each_update(tmp_path, precision):
    trainer = Trainer(lora_run(tmp_path, precision=precision, grpo={"group": 2}))
    objective, seen = trainer.objective, set()
    assert objective.engine is not None
    for _ in range(3):
        trainer.step()
        batches = objective.batches(trainer.steps_done)
        seen.add(objective.engine.adapter)
        old = torch.cat([each[2][each[1] >= 0] for each in documents(batches)])
        new = objective._logprobs(objective._rollout)
        error = (old.sort().values - new.sort().values).abs().max()
        assert error < (2e-4 if precision == "float32" else 0.15)
    assert len(seen) == 3 and len(objective.engine.built.adapters) == 1


def test_answers_are_those_of_the_weights_in_training(tmp_path):
    """The same seeds draw the same tokens, by the engine and by the weights that the optimizer changes."""
    rollouts = []
    for engine in ("adapter", "shared"):
        trainer = Trainer(lora_run(tmp_path, grpo={"engine": engine}))
        assert (trainer.objective.engine is not None) == (engine == "adapter")
        for _ in range(3):
            trainer.step()
        rollouts.append(trainer.objective._rollout.tokens_N.tolist())
    assert rollouts[0] == rollouts[1]


def test_an_update_disturbs_no_stream_and_no_prefix(tmp_path):
    trainer = Trainer(lora_run(tmp_path))
    engine, prompt = trainer.objective.engine, tuple(range(97, 97 + 40))
    core, params = engine.built.core, SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    own = {"eos_token_ids": (), "seed": 1}
    (alone,) = draw_answers(core, [prompt], params, **own)
    (early,) = draw_answers(core, [prompt], params, **own, adapter=engine.update())
    assert early.token_ids == alone.token_ids  # B is 0 in the beginning
    seeded = SamplingParams(**{**asdict(params), "seed": 1_000_003})  # as of the first prompt
    core.add(Request("base", prompt, seeded))
    core.add(Request("earlier", prompt, seeded, adapter=engine.adapter))
    found = {"base": [], "earlier": []}

    def deliver(output):
        found[output.request_id] += output.new_token_ids

    engine.deliver = deliver
    for turn in range(20):
        if turn == 5:
            before = engine.adapter
            trainer.step()  # draws in between, and changes the factors
            trainer.objective.evaluate()
            engine.update()
            assert engine.adapter != before
        for output in core.step() if core.has_work else ():
            deliver(output)
    assert found["base"] == found["earlier"] == list(alone.token_ids)
    (again,) = draw_answers(core, [prompt], params, **own)
    assert again == alone
    hits = core.scheduler.stats().prefix_hit_tokens
    draw_answers(core, [prompt], params, **own)
    assert core.scheduler.stats().prefix_hit_tokens - hits == 32
    hits = core.scheduler.stats().prefix_hit_tokens
    (late,) = draw_answers(core, [prompt], params, **own, adapter=engine.adapter)
    assert core.scheduler.stats().prefix_hit_tokens == hits and late.logprobs != early.logprobs


def test_runs_that_cannot_draw_so_are_refused_or_share_their_weights(tmp_path):
    for message, changes in {
        "lora.dora scales whole": {"lora": {"dora": True}},
        "modules trained in full": {"lora": {"modules_to_save": ["norm"]}},
        "adapters of an engine are plain LoRA": {"task": "finetune"},
    }.items():
        changes = {"task": "lora", **changes}
        assert Trainer(grpo_run(tmp_path, **changes)).objective.engine is None
        with pytest.raises(ValueError, match=message):
            Trainer(grpo_run(tmp_path, **changes, grpo={"engine": "adapter"}))
