"""Every layout trains models of several families as one rank does, and takes offloaded states."""

import pytest
import torch
from parallel_runs import curve, same_curves
from tiny_checkpoints import make_model
from tiny_llm import VOCAB, save_tiny_llm_text
from training_runs import tiny_run

torch.set_num_threads(1)
HOW = {"steps": 3, "accumulate": 2, "data": {"seq_len": 24, "micro_batch": 50}}
LAYOUTS = {
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
    "pipeline": {"pipeline": 2},
    "context": {"context": 2},
}


@pytest.fixture(scope="module", params=["qwen3", "gpt2", "mistral"])
def alone(request, tmp_path_factory):
    """A run of one rank to compare with."""
    tmp_path = tmp_path_factory.mktemp(request.param)
    (tmp_path / "model").mkdir()
    make_model(request.param, vocab_size=VOCAB).save_pretrained(tmp_path / "model")
    save_tiny_llm_text(tmp_path / "model")
    return tmp_path, curve(None, tiny_run(tmp_path, **HOW))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_that_of_one_rank(pair, alone, layout):
    tmp_path, (one, _) = alone
    config = tiny_run(tmp_path, run_dir=str(tmp_path / layout), parallel=LAYOUTS[layout], **HOW)
    same_curves(one, curve(pair, config)[0])  # not weights: the gradient of a bias of keys is but rounding


@pytest.fixture(scope="module")
def resident(tmp_path_factory):
    """Losses and norms of one rank with its states beside it."""
    return curve(None, tiny_run(tmp_path_factory.mktemp("resident"), **HOW))[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offloaded_states_are_those_of_one_rank(pair, tmp_path, resident, layout):
    parallel = {**LAYOUTS[layout], "offload": "optimizer"}
    two, _ = curve(pair, tiny_run(tmp_path, run_dir=str(tmp_path / "two"), parallel=parallel, **HOW))
    assert [loss for loss, _ in two] == pytest.approx([loss for loss, _ in resident], abs=1e-5)
