"""Training where each rank has some layers: the steps of one rank, by every schedule."""

import pytest
import torch
from parallel_jobs import tables_of_a_run
from parallel_runs import STEPS, curve, same_runs
from tiny_llm import save_tiny_llm
from training_runs import tiny_run

from transect.train.loop.crew import check
from transect.train.loop.follow import RunArguments

torch.set_num_threads(1)
HOW = {"steps": STEPS, "accumulate": 4, "eval_every": STEPS // 2, "data": {"seq_len": 32, "micro_batch": 64}}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def alone(request, tmp_path_factory):
    """A run of one rank to compare with."""
    tmp_path = tmp_path_factory.mktemp("alone")
    (tmp_path / "model").mkdir()
    save_tiny_llm(tmp_path / "model", num_hidden_layers=4, tie_word_embeddings=request.param)
    return tmp_path, curve(None, tiny_run(tmp_path, **HOW))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "gpipe"])
def test_steps_are_those_of_one_rank(pair, alone, schedule):
    """Fifty with ``--prove``."""
    tmp_path, one = alone
    parallel = {"pipeline": 2, "schedule": schedule}
    same_runs(one, curve(pair, tiny_run(tmp_path, run_dir=str(tmp_path / schedule), parallel=parallel, **HOW)))


def test_a_run_goes_on_with_other_stages(pair, tmp_path):
    (tmp_path / "model").mkdir()
    save_tiny_llm(tmp_path / "model", num_hidden_layers=4)
    how = {"accumulate": 4, "data": {"seq_len": 32, "micro_batch": 64}, "schedule": {"kind": "constant"}}
    whole, _ = curve(None, tiny_run(tmp_path, steps=6, run_dir=str(tmp_path / "whole"), **how))
    log, found = [], None
    interleaved = {"pipeline": 2, "schedule": "interleaved"}
    for steps, parallel in ((2, interleaved), (3, {"tensor": 2}), (5, {"pipeline": 2}), (6, {})):
        config = tiny_run(tmp_path, steps=steps, run_dir=str(tmp_path / "cut"), parallel=parallel, **how)
        more, found = curve(pair, config, found)
        log += more
    assert [loss for loss, _ in log] == pytest.approx([loss for loss, _ in whole], abs=1e-5)


def test_bfloat16_and_recomputed_layers_are_trained(pair, tmp_path):
    how = {"accumulate": 2, "steps": 4, "precision": "mixed", "checkpointing": "full"}
    one, _ = curve(None, tiny_run(tmp_path, **how))
    two, _ = curve(pair, tiny_run(tmp_path, run_dir=str(tmp_path / "cut"), parallel={"pipeline": 2}, **how))
    assert [loss for loss, _ in two] == pytest.approx([loss for loss, _ in one], abs=3e-2)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_table_that_two_stages_have_stays_one(pair, tmp_path, schedule):
    """In bfloat16 it is rounded by chance: by the same on both."""
    (tmp_path / "model").mkdir()
    save_tiny_llm(tmp_path / "model", num_hidden_layers=4, tie_word_embeddings=True)
    parallel = {"pipeline": 2, "schedule": schedule}
    how = {"steps": 2, "accumulate": 2, "precision": "bfloat16", "data": {"seq_len": 32, "micro_batch": 64}}
    run = RunArguments(tiny_run(tmp_path, parallel=parallel, **how).to_dict())
    pair.call("parallel_jobs:tables_of_a_run", run)
    first, last = tables_of_a_run(pair.world, run)
    assert torch.equal(first, last)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"pipeline": 2, "schedule": "interleaved"}, "accumulate": 3}, "set accumulate to 4"),
        ({"parallel": {"pipeline": 1, "schedule": "gpipe"}}, r"stages of parallel\.pipeline"),
        ({"parallel": {"pipeline": 2, "schedule": "interleaved", "chunks": 1}}, r'chunks = 1 is schedule = "1f1b"'),
        ({"parallel": {"pipeline": 2}, "task": "lora"}, r"set parallel\.pipeline to 1"),
    ],
)
def test_runs_that_cannot_be_staged_are_refused_with_what_can(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        check(tiny_run(tmp_path, **changes))
