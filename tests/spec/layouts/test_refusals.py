"""What cannot be spread is refused with the nearest layout that can: everyone who asks hears the same."""

import itertools
from dataclasses import replace

import pytest
from training_runs import tiny_run

from transect.costs.memory.training_plan import TrainingPlan
from transect.costs.memory.training_ranks import training_ranks
from transect.spec.layouts.refusals import RunSettings, nearest, reasons, refusal
from transect.spec.layouts.spread import Spread
from transect.spec.moe import MoEConfig
from transect.spec.shapes import PRESETS
from transect.train.loop.crew import check

LLAMA = PRESETS["llama-3.2-1b"]
SMALL = replace(LLAMA, n_heads=4, n_kv_heads=2, ffn_dim=96, n_layers=6)
MIXTURE = replace(PRESETS["qwen3-30b-a3b"], moe=MoEConfig(6, 2, 16))


TWO, FOUR = {"accumulate": 2}, {"accumulate": 4}
ADAMW = 'set optimizer.name to "adamw", or parallel.zero to 2'
ONE_BIT = 'set optimizer.name to "onebit_adam", or parallel.zero to 0'
CAPPED = replace(LLAMA, attention_softcap=50.0)
ELSEWHERE = {"pipeline": 2, "data": 2, "zero": 3, "host_state": True, "host_weights": True}  # zero 2 keeps weights here
INTERLEAVED = {"pipeline": 4, "schedule": "interleaved", "chunks": 2}


@pytest.mark.parametrize(
    ("spread", "run", "model", "message"),
    [
        ({"tensor": 4}, TWO, SMALL, "2 key heads cannot be cut for 4 ranks: set parallel.tensor to 2 and"),
        ({"tensor": 2}, {}, replace(SMALL, ffn_dim=97), "to 1, parallel.data to 2 and accumulate to 2"),
        ({"pipeline": 2, "data": 2, "zero": 3}, TWO, SMALL, "of a pipeline: set parallel.zero to 2"),
        (ELSEWHERE, TWO, SMALL, "of a pipeline: set parallel.pipeline to 1, parallel.data to 4"),
        ({"data": 2, "zero": 3, "tiles": 2}, TWO, MIXTURE, "set parallel.tiles to 1"),
        (INTERLEAVED, FOUR, SMALL, "cannot be cut into 8 runs: set"),
        ({"pipeline": 7}, {"accumulate": 7}, SMALL, "set parallel.pipeline to 1 and parallel.data to 7"),
        ({"data": 3}, FOUR, None, "set accumulate to 6"),
        ({"tensor": 2}, TWO | {"adapted": True}, None, "set parallel.tensor to 1 and parallel.data to 2"),
        ({"data": 2, "zero": 3}, TWO | {"adapted": True}, None, "not for adapters: set parallel.zero to 2"),
        ({"data": 2, "zero": 3}, TWO | {"optimizer": "muon"}, None, ADAMW),
        ({"data": 2, "zero": 2}, TWO | {"optimizer": "onebit_adam"}, None, "set parallel.zero to 1"),
        ({"data": 2, "zero": 1}, TWO | {"optimizer": "zero_one_adam"}, None, ONE_BIT),
        ({"context": 2}, TWO | {"objective": "dpo"}, None, "set parallel.context to 1 and parallel.data to 2"),
        ({"data": 2}, TWO | {"objective": "grpo"}, None, "set parallel.data to 1"),
        ({"data": 2, "zero": 3}, TWO | {"keeps_layers": False}, None, "set layer_keep to 1, or parallel.zero to 2"),
        ({"data": 4, "expert": True}, FOUR, MIXTURE, "6 experts cannot be shared by 4 ranks: set parallel.expert"),
        ({"data": 2, "expert": True, "zero": 1}, TWO, MIXTURE, "set parallel.zero to 0"),
        ({"pipeline": 2}, TWO, MIXTURE, "set parallel.pipeline to 1 and parallel.data to 2"),
        ({"context": 2}, TWO, CAPPED, "set parallel.context to 1 and"),
    ],
)
def test_the_nearest_layout_is_named(spread, run, model, message):
    found = refusal(RunSettings(**run), Spread(**spread), model)
    assert message in found, found


@pytest.mark.parametrize("model", [SMALL, MIXTURE])
def test_what_is_named_does_work(model):
    """Every layout of four ranks, for several runs: it is refused by nobody, or what is named instead is not."""
    refused = 0
    for data, pipeline, tensor in itertools.product((1, 2, 4), repeat=3):
        if 4 % (data * pipeline * tensor):
            continue
        for zero in range(4) if data > 1 else (0,):
            asked = Spread(
                data=data, pipeline=pipeline, tensor=tensor, context=4 // (data * pipeline * tensor), zero=zero
            )
            for run in (
                RunSettings(),
                RunSettings(adapted=True),
                RunSettings(optimizer="muon", accumulate=4),
                RunSettings(samples=True),
            ):
                if next(reasons(run, asked, model), None) is None:
                    continue
                refused += 1
                other, accumulate = nearest(run, asked, model)
                assert other != asked or accumulate != run.accumulate
                assert next(reasons(replace(run, accumulate=accumulate), other, model), None) is None
                assert other.ranks == 4 or model is MIXTURE
    assert refused > 20


def test_everyone_says_the_same(tmp_path):
    """The trainer before it has a model, and the account of memory."""
    config = tiny_run(tmp_path, accumulate=2, optimizer={"name": "muon"}, parallel={"data": 2, "zero": 3})
    with pytest.raises(ValueError) as trainer:
        check(config)
    plan = TrainingPlan(accumulate=2, optimizer="muon")
    with pytest.raises(ValueError) as account:
        training_ranks(LLAMA, plan, Spread(data=2, zero=3))
    assert str(trainer.value) == str(account.value)
