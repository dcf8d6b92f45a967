"""Training where ranks share every matrix: the steps of one rank, checkpoints of any layout."""

import pytest
import torch
from parallel_runs import STEPS, curve, same_curves, same_runs, tensors_of
from tiny_llm import save_tiny_llm
from training_runs import tiny_run

from transect.parallel import split_loss
from transect.train.loop.crew import check

torch.set_num_threads(1)
HOW = {"steps": STEPS, "accumulate": 2, "eval_every": STEPS // 2, "data": {"seq_len": 32, "micro_batch": 65}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one rank to compare with."""
    tmp_path = tmp_path_factory.mktemp("alone")
    return tmp_path, curve(None, tiny_run(tmp_path, **HOW))


@pytest.mark.parametrize("sequence", [False, True])
def test_steps_are_those_of_one_rank(pair, alone, sequence):
    """Fifty with ``--prove``."""
    tmp_path, one = alone
    parallel = {"tensor": 2, "sequence": sequence}
    same_runs(one, curve(pair, tiny_run(tmp_path, run_dir=str(tmp_path / f"cut{sequence}"), parallel=parallel, **HOW)))


@pytest.mark.parametrize(
    "changes",
    [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}],
    ids=["tied", "biases"],
)
@pytest.mark.parametrize("sequence", [False, True])
def test_models_are_trained_as_on_one_rank(pair, tmp_path, changes, sequence):
    (tmp_path / "model").mkdir()
    save_tiny_llm(tmp_path / "model", **changes)
    how = {"steps": 3, "data": {"seq_len": 32, "micro_batch": 65}}
    one = curve(None, tiny_run(tmp_path, **how))
    parallel = {"tensor": 2, "sequence": sequence}
    same_runs(one, curve(pair, tiny_run(tmp_path, run_dir=str(tmp_path / "cut"), parallel=parallel, **how)))


@pytest.mark.parametrize("more", [{}, {"sequence": True, "tiles": 2}], ids=["plain", "sequence-tiles"])
def test_slices_that_are_sharded_too(pair, tmp_path, more):
    """Tensor ranks whose weights are on the host (zero 3 with one rank along data): uneven vocabularies, tied."""
    (tmp_path / "model").mkdir()
    save_tiny_llm(tmp_path / "model", tie_word_embeddings=True)
    how = {"steps": 3, "data": {"seq_len": 32, "micro_batch": 65}}
    one = curve(None, tiny_run(tmp_path, **how))
    parallel = {"tensor": 2, "offload": "all", **more}
    same_curves(one[0], curve(pair, tiny_run(tmp_path, run_dir=str(tmp_path / "cut"), parallel=parallel, **how))[0])


class Recorder:
    """A group of two ranks that says what is gathered."""

    def __init__(self):
        self.shapes = []

    def all_gather(self, x):
        self.shapes.append(x.shape)
        return torch.stack((x, x))


def test_ranks_with_fewer_rows_of_the_head_gather_as_often(monkeypatch):
    monkeypatch.setitem(split_loss.SPLIT_ELEMENTS, "cpu", 96)
    hidden, labels, gathers = torch.randn(12, 4), torch.arange(12), []
    for first, rows in ((0, 32), (32, 8)):
        group = Recorder()
        split_loss.split_cross_entropy(hidden, torch.randn(rows, 4), labels, -100, first=first, most=32, group=group)
        gathers.append(group.shapes)
    assert gathers[0] == gathers[1] == [(2, 3, 1)] * 4


def test_a_run_goes_on_in_another_layout(pair, tmp_path):
    """Two steps cut by tensors, two on one rank, two on two that share micro-batches; and all on one."""
    how = {"accumulate": 2, "data": {"seq_len": 32, "micro_batch": 64}, "schedule": {"kind": "constant"}}
    whole, _ = curve(None, tiny_run(tmp_path, steps=6, run_dir=str(tmp_path / "whole"), **how))
    log, found = [], None
    for steps, parallel in ((2, {"tensor": 2}), (4, {}), (5, {"data": 2, "zero": 1}), (6, {"tensor": 2})):
        config = tiny_run(tmp_path, steps=steps, run_dir=str(tmp_path / "cut"), parallel=parallel, **how)
        more, found = curve(pair, config, found)
        log += more
    assert [loss for loss, _ in log] == pytest.approx([loss for loss, _ in whole], abs=1e-5)


def test_the_same_layout_goes_on_to_the_bit(pair, tmp_path):
    how = {"parallel": {"tensor": 2, "sequence": True}, "precision": "mixed", "schedule": {"kind": "constant"}}
    whole, end = curve(pair, tiny_run(tmp_path, steps=4, run_dir=str(tmp_path / "whole"), **how))
    first, found = curve(pair, tiny_run(tmp_path, steps=2, run_dir=str(tmp_path / "cut"), **how))
    second, other = curve(pair, tiny_run(tmp_path, steps=4, run_dir=str(tmp_path / "cut"), **how), found)
    assert first + second == whole
    one, two = tensors_of(end), tensors_of(other)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "lora"}, r"set parallel\.tensor to 1, parallel\.data to 2"),
        ({"objective": "dpo"}, r"set parallel\.tensor to 1"),
        ({"optimizer": {"name": "muon"}}, 'set optimizer.name to "adamw"'),
        ({"samples": {"prompts": ["a"]}}, "samples are drawn from a whole model"),
        ({"parallel": {"tensor": 1, "sequence": True}}, "set that to 2 or more"),
    ],
)
def test_runs_that_cannot_be_cut_are_refused_with_what_can(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        check(tiny_run(tmp_path, **{"parallel": {"tensor": 2}} | changes))
