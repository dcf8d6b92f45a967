"""Training of a mixture whose experts ranks share: the steps, weights and states of one rank that has them all."""

import pytest
import torch
from parallel_runs import curve, same_curves, same_runs, tensors_of
from tiny_checkpoints import make_model
from tiny_llm import save_tiny_llm_text
from training_runs import tiny_run

from transect.train.loop.trainer import Trainer

torch.set_num_threads(1)


def mixture(tmp_path, family="qwen3_moe"):
    path = tmp_path / family
    if not path.exists():
        make_model(family, vocab_size=258).save_pretrained(path)
        save_tiny_llm_text(path)
    return str(path)


def run_of(tmp_path, name, family="qwen3_moe", **changes):
    how = {"model": mixture(tmp_path, family), "run_dir": str(tmp_path / name), "accumulate": 4, "log_to": []}
    how |= {"data": {"seq_len": 32, "micro_batch": 64}, "schedule": {"kind": "constant"}}
    return tiny_run(tmp_path, **{**how, "router": {"balance": 0.01, "z_loss": 0.01}, **changes})


SHARED = {"data": 2, "expert": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": {"expert_way": "gather"}},
        {"parallel": {"expert_way": "all_to_all"}},
        {"checkpointing": "full", "parallel": {"expert_way": "all_to_all"}},
        {"parallel": {"offload": "optimizer"}},
    ],
    ids=str,
)
def test_steps_are_those_of_one_rank(pair, tmp_path, changes):
    one = curve(None, run_of(tmp_path, "one", steps=4))
    two = curve(pair, run_of(tmp_path, "two", steps=4, **{**changes, "parallel": SHARED | changes.get("parallel", {})}))
    same_runs(two, one)


def test_shared_experts_and_sigmoid_scores(pair, tmp_path):
    """Also where each rank has weights in bfloat16, and the losses on routers are of its own tokens."""
    for family in ("qwen2_moe", "olmoe"):
        one, _ = curve(None, run_of(tmp_path, f"{family}-1", family, steps=3))
        two, _ = curve(pair, run_of(tmp_path, f"{family}-2", family, steps=3, parallel=SHARED))
        same_curves(two, one)


def test_a_run_goes_on_with_and_without(pair, tmp_path):
    whole, end = curve(None, run_of(tmp_path, "whole", steps=4))
    first, found = curve(pair, run_of(tmp_path, "cut", steps=2, parallel=SHARED))
    second, found = curve(None, run_of(tmp_path, "cut", steps=3), found)
    third, found = curve(pair, run_of(tmp_path, "cut", steps=4, parallel=SHARED), found)
    same_curves(first + second + third, whole)
    for name, tensor in tensors_of(end).items():
        torch.testing.assert_close(tensors_of(found)[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"data": 4, "expert": 2}}, "set both to 4, or parallel.expert to 1"),
        ({"parallel": {"data": 2, "expert_way": "all_to_all"}}, "set both parallel.data and parallel.expert to 2"),
        ({"parallel": SHARED, "optimizer": {"name": "muon"}}, "or parallel.expert to 1"),
        ({"parallel": SHARED, "task": "lora"}, "set parallel.expert to 1"),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        Trainer(run_of(tmp_path, "refused", **changes))
