"""Predicted step times: parts that add up, what each axis costs, and two steps that were measured."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from transect.costs.links import Axis, beside
from transect.costs.machine import Machine, Shares
from transect.costs.memory.training_plan import TrainingPlan
from transect.costs.presets import preset
from transect.costs.training import predict
from transect.spec.layouts.spread import Spread
from transect.spec.shapes import PRESETS

H200 = Machine.of(preset("h200"))
LLAMA_1B, LLAMA_8B = PRESETS["llama-3.2-1b"], PRESETS["llama-3.1-8b"]
PLAN = TrainingPlan(task="pretrain", precision="bfloat16", micro_batch=8192, seq_len=4096, merged=True)
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results/h200/train.json"


def test_the_planner_needs_no_torch():
    code = "import transect.plan.layouts, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_steps_that_were_measured_on_one_gpu():
    rows = {row["work"]: row for row in json.loads(RESULTS.read_text())["rows"] if row["contender"] == "transect"}
    for work, model, task in (("full 1b", LLAMA_1B, "pretrain"), ("lora 8b", LLAMA_8B, "lora")):
        expected = predict(model, replace(PLAN, task=task), Spread(), H200)
        assert expected.seconds == pytest.approx(rows[work]["step_seconds"]["median"], rel=0.10)


def test_steps_that_were_measured_on_two_gpus():
    """Data parallel by copy engines and by NCCL, and with everything cut over the ranks."""
    plan = replace(PLAN, accumulate=2)
    ways = {
        "ddp": {"zero": 0}, "ddp nccl": {"zero": 0, "copies": False}, "zero 1": {"zero": 1}, "zero 3": {"zero": 3},
        "mixed zero 3": {"zero": 3},
    }  # fmt: skip
    seen = 0
    for model, name in ((LLAMA_1B, "1b"), (PRESETS["llama-3.2-3b"], "3b"), (LLAMA_8B, "8b")):
        for row in json.loads((RESULTS.parent / f"train_parallel_{name}.json").read_text())["rows"]:
            if row["way"] in ways:
                precision = "mixed" if row["way"].startswith("mixed") else "bfloat16"
                spread = Spread(data=2, reduce=2, **ways[row["way"]])
                expected = predict(model, replace(plan, precision=precision), spread, H200)
                assert expected.seconds == pytest.approx(row["step_seconds"]["median"], rel=0.10), (name, row["way"])
                seen += 1
    assert seen == 7


def test_parts_add_up_and_tokens_are_all_ranks():
    found = predict(LLAMA_1B, replace(PLAN, accumulate=8), Spread(data=4, zero=2), H200)
    assert found.seconds == sum(found.parts.values())
    assert found.tokens == 8 * 8192 and found.tokens_per_second == found.tokens / found.seconds


def test_rings():
    axis = Axis(replace(H200, latency=0.0, shares=Shares(link=1.0)), 4)
    b = H200.link_bytes_per_second
    assert axis.all_reduce(8e9) == pytest.approx(2 * 3 / 4 * 8e9 / b)
    assert axis.gather(8e9) == pytest.approx(3 / 4 * 8e9 / b)
    assert Axis(H200, 1).all_reduce(8e9) == 0
    assert Axis(H200, 4, stride=8).bandwidth < Axis(H200, 4, stride=2).bandwidth  # the second stays in a host


def test_what_is_hidden_costs_less_than_it_takes_where_the_machine_says_so():
    machine = replace(H200, shares=Shares(hidden=0.5))
    assert beside(3.0, 2.0, machine).exposed == 1.0 + 0.5 * 2.0
    assert beside(1.0, 2.0, machine).exposed == 0.5


def test_each_axis_costs_what_it_says():
    plan = replace(PLAN, accumulate=8, precision="mixed")
    one = predict(LLAMA_8B, plan, Spread(), H200)
    tensor = predict(LLAMA_8B, plan, Spread(tensor=4), H200)
    assert tensor.communication > 0 and tensor.compute < one.compute / 3
    stages = predict(LLAMA_8B, plan, Spread(pipeline=4), H200)
    # one micro-batch of each other stage; the slowest, with the head, has eight
    assert 2 / 8 < stages.bubble / stages.compute < 3 / 8
    in_two = predict(LLAMA_8B, plan, Spread(pipeline=4, schedule="interleaved", chunks=2), H200)
    assert in_two.bubble == stages.bubble / 2 and in_two.communication > stages.communication
    context = predict(LLAMA_8B, plan, Spread(context=2), H200)
    assert context.compute < 0.55 * one.compute
    by_zero = [predict(LLAMA_8B, plan, Spread(data=8, zero=zero), H200) for zero in (0, 1, 2, 3)]
    assert by_zero[1].optimizer == pytest.approx(by_zero[0].optimizer / 8, rel=0.01)
    assert by_zero[1].communication > by_zero[0].communication > by_zero[3].communication > 0
    again = predict(LLAMA_8B, replace(plan, checkpointing="full"), Spread(), H200)
    assert 0.25 < again.recompute / one.compute < 0.34
    host = predict(LLAMA_8B, plan, Spread(host_state=True), H200)
    numbers = 8_030_261_248
    assert host.optimizer == 0 and host.host == pytest.approx(
        28 * numbers / H200.host_memory_bytes_per_second, rel=0.01
    )


def test_a_larger_batch_shares_what_a_step_costs_once():
    few, many = (predict(LLAMA_1B, replace(PLAN, accumulate=n), Spread(data=2, zero=1), H200) for n in (2, 32))
    assert many.tokens_per_second > few.tokens_per_second
    assert many.optimizer == few.optimizer and many.communication == few.communication
