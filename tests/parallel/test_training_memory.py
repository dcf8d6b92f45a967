"""What a rank needs to train: parts add up to the whole, and the account is what the allocator hands out."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from allocated import shape_of, watched
from training_runs import tiny_run

from transect.costs.memory.fit import first_that_fits
from transect.costs.memory.training import training
from transect.costs.memory.training_plan import TrainingPlan
from transect.costs.memory.training_ranks import estimator, training_ranks
from transect.costs.units import parse_bytes
from transect.spec.layouts.ranks import owners
from transect.spec.layouts.spread import Spread
from transect.spec.shapes import PRESETS
from transect.spec.weights import parameter_count
from transect.train.config import TrainConfig
from transect.train.loop.follow import JOB, RunArguments
from transect.train.loop.memory import plan_of, spread_of

LLAMA_1B, LLAMA_8B = PRESETS["llama-3.2-1b"], PRESETS["llama-3.1-8b"]
PLAN = TrainingPlan(precision="mixed", micro_batch=8192, seq_len=4096, accumulate=8)


def terms(stage):
    return {term.name: term.bytes for term in stage.estimate.terms}


def only(plan=PLAN, model=LLAMA_8B, **spread):
    (found,) = training_ranks(model, plan, Spread(**spread))
    return found


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results/h200"
ON_TWO = {
    "one": {},
    "ddp": {"data": 2},
    "tensor sequence": {"tensor": 2, "sequence": True},
    "mixed zero 3": {"data": 2, "zero": 3},
}


def account_of(model, parallel, limit=140e9, **changes):
    """The peak of a run as ``benchmarks/train/parallel.py`` and ``train_offload.py`` start it on H200s."""
    data = {"train": ["random.tokens"], "seq_len": 4096, "micro_batch": 8192 * parallel.get("tensor", 1)}
    values = {"model": model, "task": "pretrain", "steps": 9, "data": data, "parallel": parallel, **changes}
    config, gpu = TrainConfig.from_dict(values), torch.device("cuda")
    plan, account = plan_of(config, PRESETS[model], gpu), estimator(spread_of(config, gpu))
    fitted = first_that_fits(PRESETS[model], plan, int(limit), account)
    return (account(PRESETS[model], plan) if config.checkpointing != "auto" else fitted[1]).peak


def test_peaks_that_were_measured_on_two_gpus():
    models = {"1b": "llama-3.2-1b", "8b": "llama-3.1-8b"}
    rows = json.loads((RESULTS / "train_parallel_again.json").read_text())["rows"]
    assert {row["way"] for row in rows} == set(ON_TWO)
    for row in rows:
        parallel, precision = ON_TWO[row["way"]], "mixed" if row["way"].startswith("mixed") else "bfloat16"
        how = {"accumulate": parallel.get("data", 1), "precision": precision, "checkpointing": "none"}
        spread = parallel | ({"reduce": "bfloat16"} if "data" in parallel else {})
        found = account_of(models[row["work"]], spread, **how)
        assert found == pytest.approx(max(row["peak_bytes"]), rel=0.1), row["way"]


@pytest.mark.parametrize("part", ["memory", "accumulate", "delayed", "all", "disk"])
def test_peaks_that_were_measured_with_states_elsewhere(part):
    row = json.loads((RESULTS / f"train_offload_{part}.json").read_text())
    parallel = {"offload": "all" if row.get("all") else "optimizer", "delayed_update": row.get("delayed", False)}
    parallel |= {"offload_path": "states"} if row["part"] == "disk" else {}
    how = {"accumulate": row.get("accumulate", 1), "checkpointing": "full" if row.get("all") else "auto"}
    found = account_of(row["model"], parallel, parse_bytes(row["limit"]), precision="mixed", **how)
    assert found == pytest.approx(row["peak_bytes"], rel=0.1)


def test_one_rank_is_the_account_of_one_device():
    assert only().estimate == training(LLAMA_8B, PLAN)


def test_what_is_cut_by_each_zero():
    whole, numbers = terms(only()), parameter_count(LLAMA_8B)
    one, two, three = (terms(only(data=8, zero=zero)) for zero in (1, 2, 3))
    for name in ("optimizer state", "master weights"):
        for found in (one, two, three):
            assert found[name] == pytest.approx(whole[name] / 8, rel=0.01)
    assert one["gradients"] == 4 * numbers and two["gradients"] == pytest.approx(one["gradients"] / 8, rel=0.01)
    assert one["weights"] == two["weights"] == 2 * numbers
    assert three["weights"] == pytest.approx(2 * numbers / 8, rel=0.01)
    peaks = [only(replace(PLAN, accumulate=8), data=8, zero=zero).estimate.peak for zero in (0, 1, 2, 3)]
    assert peaks == sorted(peaks, reverse=True)


def test_what_tensor_pipeline_and_context_ranks_share():
    whole, tensor = terms(only()), terms(only(tensor=4))
    assert tensor["weights"] == pytest.approx(whole["weights"] / 4, rel=0.01)
    both = terms(only(tensor=4, sequence=True))
    assert both["activations"] < tensor["activations"] < whole["activations"]
    # what goes into q, k, v and into gate, up is whole on every rank: two rows of bfloat16 for each token and layer
    gathered = 2 * 2 * LLAMA_8B.dim * 8192 * LLAMA_8B.n_layers
    assert both["activations"] == pytest.approx((whole["activations"] - gathered) / 4 + gathered, rel=0.01)
    assert terms(only(context=4))["activations"] == pytest.approx(whole["activations"] / 4, rel=0.01)
    stages = training_ranks(LLAMA_8B, PLAN, Spread(pipeline=4))
    assert sum(terms(s)["weights"] for s in stages) == pytest.approx(whole["weights"], rel=1e-5)
    # 1F1B: the first stage has a micro-batch on its way through each of the four, the last its own alone
    assert [terms(s).get("activations in flight", 0) // terms(s)["activations"] for s in stages] == [3, 2, 1, 0]
    gpipe, twice = (
        terms(training_ranks(LLAMA_8B, PLAN, Spread(pipeline=4, schedule=name, chunks=chunks))[0])
        for name, chunks in (("gpipe", 1), ("interleaved", 2))
    )
    assert gpipe["activations in flight"] == 7 * gpipe["activations"]
    assert twice["activations in flight"] == pytest.approx(4.5 * twice["activations"])
    # ranks with the same weights sum gradients, and zero cuts over them, whether they share tokens or micro-batches
    assert terms(only(context=4))["gradients"] == terms(only(data=4))["gradients"]
    assert terms(only(data=2, context=2, zero=1))["optimizer state"] == terms(only(data=4, zero=1))["optimizer state"]
    assert "loss" not in terms(stages[0]) and "loss" in terms(stages[3])


def test_states_on_the_host_leave_the_device():
    here, there = only(), only(host_state=True)
    moved = sum(terms(here)[name] for name in ("master weights", "optimizer state"))
    host = {term.name: term.bytes for term in there.estimate.host}
    assert host.pop("gradients") == moved // 3  # float32 sums, until the processor steps with them
    assert sum(host.values()) == moved
    assert here.estimate.peak - there.estimate.peak >= moved
    sharded = only(data=2, zero=3, host_state=True)
    all_there = only(data=2, zero=3, host_state=True, host_weights=True)
    weights = terms(sharded)["weights"]
    assert sharded.estimate.peak - all_there.estimate.peak == weights
    assert {term.name: term.bytes for term in all_there.estimate.host}["weights"] == weights
    assert 'offload = "all"' in Spread(data=2, zero=3, host_state=True, host_weights=True).settings


def test_experts_that_ranks_share_are_cut():
    mixture = replace(PRESETS["qwen3-30b-a3b"], n_layers=2)
    plan = TrainingPlan(accumulate=2)
    one, shared = (training_ranks(mixture, plan, Spread(data=2, expert=on))[0] for on in (False, True))
    experts = 3 * 128 * 768 * 2048 * mixture.n_layers
    count = [sum(math.prod(shape) for shape in stage.part.shapes.values()) for stage in (one, shared)]
    assert count[0] - count[1] == experts // 2
    assert "expert = 2" in Spread(data=2, expert=True).settings


def test_a_layout_that_cannot_be_is_refused_with_one_that_can():
    for spread, message in (
        ({"data": 3}, "set accumulate to 9"),
        ({"tensor": 3}, "8 key heads cannot be cut for 3 ranks: set parallel.tensor to 1"),
        ({"pipeline": 33}, "has 32 layers"),
        ({"zero": 1}, r"parallel\.data to 2"),
        ({"sequence": True}, r"parallel\.tensor to 2"),
    ):
        with pytest.raises(ValueError, match=message):
            only(**spread)
    for spread, plan in (({"tensor": 2}, {"task": "lora"}), ({"pipeline": 2}, {"optimizer": "muon"})):
        with pytest.raises(ValueError, match=r"parallel\.(tensor|pipeline) .* 1"):
            training_ranks(LLAMA_8B, replace(PLAN, **plan), Spread(**spread))
    with pytest.raises(ValueError, match=r"set parallel\.zero to 2"):
        only(replace(PLAN, task="lora"), data=2, zero=3)


def test_owners_have_about_as_much_each():
    sizes = {f"{i}": 10 + i * i % 17 for i in range(40)}
    owner = owners(sizes, 3)
    held = [sum(size for name, size in sizes.items() if owner[name] == rank) for rank in range(3)]
    assert max(held) - min(held) <= max(sizes.values()) and math.fsum(held) == sum(sizes.values())


LONG = [
    {"zero": 0},
    {"zero": 1},
    {"zero": 2},
    {"zero": 3, "checkpointing": "full"},
    {"zero": 0, "precision": "mixed"},
    {"zero": 3, "precision": "mixed"},
    {"zero": 1, "accumulate": 4, "precision": "bfloat16"},
    {"zero": 3, "accumulate": 4},
]
MODES = [{"zero": 2, "precision": "mixed"}, {"zero": 3}, *(pytest.param(m, marks=pytest.mark.prove) for m in LONG)]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_predicted_peak_is_that_of_a_rank(pair, tmp_path, mode):
    torch.set_num_threads(1)
    changes = dict(mode)
    parallel = {"data": 2, "zero": changes.pop("zero")}
    config = tiny_run(
        tmp_path, model=shape_of(tmp_path), load_format="dummy", steps=2, parallel=parallel, threads=1,
        data={"seq_len": 256, "micro_batch": 1024}, **{"accumulate": 2, **changes},
    )  # fmt: skip
    run = RunArguments(config.to_dict())
    pair.call(JOB, run)
    made = run.trainer(pair.world)
    measured = watched(made)
    made.run()
    spread = made.crew.strategy.parallel.spread
    units = getattr(spread, "units", [])
    kept = sum(unit.piece.nbytes for unit in units) or sum(p.nbytes for p in spread.parameters.values())
    peak = max(phase.bytes for phase in made.memory.estimate.phases if phase.name not in ("checkpoint", "cutting"))
    assert peak == pytest.approx(kept + made.optimizer.state_bytes() + measured[0], rel=0.10)
