"""Serving steps from model, layout, machine and load: by hand, against floors, and against recorded steps."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.engine import serving_steps
from transect.costs.fitting import fit_efficiency
from transect.costs.floors import Rates, step_floor
from transect.costs.links import Axis, MeasuredLinks
from transect.costs.machine import Machine
from transect.costs.model import Row
from transect.costs.presets import preset
from transect.costs.serving import HOPPER, IDEAL, ServingSteps, batch_seconds, exchanged
from transect.costs.steps import StepLoad
from transect.costs.storage import Storage
from transect.spec.layouts.ranks import RankLayout
from transect.spec.shapes import PRESETS

RATES = Rates(4e12, 700e12)
LINKS = MeasuredLinks({1024: 4e-6, 2048: 6e-6})
LLAMA = PRESETS["llama-3.1-8b"]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load_of(rows: list[Row]) -> StepLoad:
    return StepLoad.of([(row.length - row.new, row.new) for row in rows])


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("storage", [Storage(), Storage(linear=4.25, kv=8)])
@pytest.mark.parametrize("rows", [[Row(1, 500)], [Row(1, 2000)] * 64, [Row(3000, 3000)]])
def test_an_ideal_machine_takes_the_floor(model: str, storage: Storage, rows: list[Row]) -> None:
    config = PRESETS[model]
    ideal = ServingSteps(config, RATES, IDEAL, storage).seconds(load_of(rows))
    assert ideal == pytest.approx(step_floor(config, rows, RATES, storage).seconds, rel=1e-9)


def test_a_window_bounds_what_attention_reads() -> None:
    config = dataclasses.replace(LLAMA, sliding_window=256)
    rows = [Row(1, 4000)] * 8
    windowed, whole = (ServingSteps(each, RATES, IDEAL).seconds(load_of(rows)) for each in (config, LLAMA))
    assert windowed == pytest.approx(step_floor(config, rows, RATES).seconds) and windowed < whole


def test_a_rank_has_its_share_of_the_floor() -> None:
    rows = [Row(1, 100)] * 4
    whole, half = step_floor(LLAMA, rows, RATES), step_floor(LLAMA, rows, RATES, ranks=2)
    assert half.flops == pytest.approx(whole.flops / 2)
    assert whole.bytes / 2 < half.bytes < 0.51 * whole.bytes  # inputs of products are on every rank
    with pytest.raises(ValueError, match="cannot be cut for 3"):
        step_floor(LLAMA, rows, RATES, ranks=3)


def test_sums_between_measured_sizes_and_on_more_ranks() -> None:
    assert LINKS.pair(8) == 4e-6 and LINKS.pair(1536) == pytest.approx(5e-6) and LINKS.pair(4096) == 12e-6
    assert LINKS.among(1).all_reduce(4096) == 0 and LINKS.among(2).all_reduce(1536) == pytest.approx(5e-6)
    # six messages of a quarter, where two ranks send two halves
    assert LINKS.among(4).all_reduce(4096) == pytest.approx(3 * 6e-6)
    assert LINKS.among(2).all_reduce(2 * 1536, 2) == pytest.approx(2 * 5e-6)
    assert LINKS.among(2).gather(2048) == pytest.approx(3e-6)


def test_tensor_ranks_exchange_hidden_states_and_logits() -> None:
    hidden, logits = exchanged(LLAMA, 1, 1, LINKS.among(2))
    assert hidden == pytest.approx(65 * 2 * 4096 / 2048 * 6e-6)
    assert logits == pytest.approx(2 * 128256 / 2048 * 6e-6 / 2)
    shared = MeasuredLinks(LINKS.seconds, shared=128).among(2)  # ranks read each other's logits
    assert exchanged(LLAMA, 1, 1, shared) == pytest.approx((hidden, 2 * 4 * 1002 / 2048 * 6e-6))
    assert exchanged(LLAMA, 1, 1, LINKS.among(1)) == (0.0, 0.0)
    load, layout = StepLoad.of([(99, 1)]), RankLayout(tensor=2)
    two = ServingSteps(LLAMA, RATES, IDEAL, None, layout, LINKS.among(2)).seconds(load)
    assert two == pytest.approx(step_floor(LLAMA, [Row(1, 100)], RATES, ranks=2).seconds + hidden + logits)
    with pytest.raises(ValueError, match="give collectives"):
        ServingSteps(LLAMA, RATES, IDEAL, None, layout)


def test_links_of_a_data_sheet_do_as_well() -> None:
    axis = Axis(Machine.of(preset("h100-80gb")), 4)
    found = ServingSteps(LLAMA, RATES, IDEAL, None, RankLayout(tensor=4), axis).seconds(StepLoad.of([(99, 1)] * 8))
    hidden, logits = exchanged(LLAMA, 8, 8, axis)
    assert found == pytest.approx(step_floor(LLAMA, [Row(1, 100)] * 8, RATES, ranks=4).seconds + hidden + logits)


def test_stages_take_their_part_of_the_layers() -> None:
    config = dataclasses.replace(LLAMA, n_layers=9)
    load, hops = StepLoad.of([(500, 1)] * 32), LINKS.among(2)
    whole = ServingSteps(config, RATES, IDEAL)
    layers, head = whole._stage(load)
    two = ServingSteps(config, RATES, IDEAL, None, RankLayout(pipeline=2), hops=hops)
    assert two.seconds(load) == pytest.approx(max(5 / 9 * layers, 4 / 9 * layers + head))
    assert two.latency(load) == pytest.approx(layers + head + hops.send(32 * config.dim * 2))
    assert whole.latency(load) == whole.seconds(load) == pytest.approx(layers + head)
    with pytest.raises(ValueError, match="give hops"):
        ServingSteps(config, RATES, IDEAL, None, RankLayout(pipeline=2))


def test_layers_that_stream_wait_for_the_host_link() -> None:
    rates = dataclasses.replace(RATES, host_bytes_per_second=50e9)
    steps = ServingSteps(LLAMA, rates, HOPPER["bf16"], Storage(streamed=10e9))
    assert steps.seconds(StepLoad.of([(99, 1)])) == pytest.approx(0.2)
    assert steps.seconds(StepLoad.of([(0, 65536)])) > 1


def test_padding_is_computed() -> None:
    steps, load = ServingSteps(LLAMA, RATES, IDEAL), StepLoad.of([(0, 3000)])
    assert steps.seconds(load._replace(padded=4096)) > 1.3 * steps.seconds(load)


def test_more_work_takes_longer_under_every_coefficient() -> None:
    steps = ServingSteps(LLAMA, RATES, HOPPER["bf16"])
    base = steps.seconds(StepLoad.of([(999, 1)] * 16))
    assert base > ServingSteps(LLAMA, RATES, IDEAL).seconds(StepLoad.of([(999, 1)] * 16))
    for rows in ([(999, 1)] * 17, [(1999, 1)] * 16, [*[(999, 1)] * 15, (0, 64)]):
        assert steps.seconds(StepLoad.of(rows)) > base
    for name in ("few", "keys", "moved"):
        slower = dataclasses.replace(HOPPER["bf16"], **{name: 0.5})
        assert ServingSteps(LLAMA, RATES, slower).seconds(StepLoad.of([(999, 1)] * 16)) > base, name


def test_a_batch_is_prefill_and_a_step_for_each_token() -> None:
    lengths = [(10, 3), (20, 2)]
    steps = [[Row(10, 10), Row(20, 20)], [Row(1, 11), Row(1, 21)], [Row(1, 12)]]
    one = ServingSteps(LLAMA, RATES, IDEAL)
    assert batch_seconds(one, lengths) == pytest.approx(sum(one.seconds(load_of(rows)) for rows in steps))
    assert batch_seconds(one, lengths, step_tokens=10) > batch_seconds(one, lengths)
    shared = ServingSteps(LLAMA, RATES, IDEAL, None, RankLayout(data=2))
    assert batch_seconds(shared, lengths) == pytest.approx(batch_seconds(one, lengths[:1]))
    staged = ServingSteps(LLAMA, RATES, IDEAL, None, RankLayout(pipeline=2), hops=LINKS.among(2))
    apart = sum(batch_seconds(one, [each]) for each in lengths)
    assert apart / 2 < batch_seconds(staged, lengths) < 0.6 * apart  # the head is the last stage's


def test_a_sweep_calibrates_the_coefficients() -> None:
    truth = dataclasses.replace(HOPPER["bf16"], few=0.8, weights=0.7, keys=0.6, norm=4.0)
    loads = [StepLoad.of([(length, 1)] * rows) for rows in (1, 8, 16, 32, 96, 256) for length in (200, 4000)]
    sweep = [(lambda known: ServingSteps(LLAMA, RATES, known), load) for load in loads]
    measured = [(make, load, make(truth).seconds(load)) for make, load in sweep]
    free = ("few", "weights", "keys", "norm")
    found = fit_efficiency(HOPPER["bf16"], measured, free)
    for make, load, seconds in measured:
        assert make(found).seconds(load) == pytest.approx(seconds, rel=0.01)
    assert (found.few, found.keys) == pytest.approx((0.8, 0.6), abs=0.03) and found.products == truth.products
    with pytest.raises(ValueError, match="4 coefficients need at least as many measured steps, not 3"):
        fit_efficiency(truth, measured[:3], free)


@pytest.fixture
def recorded():  # type: ignore[no-untyped-def]
    return serving_steps


def test_the_coefficients_are_those_of_recorded_steps(recorded) -> None:  # type: ignore[no-untyped-def]
    kept = json.loads((BENCHMARKS / "results/h200/serving_steps.json").read_text())["coefficients"]
    for form, known in HOPPER.items():
        for name, value in kept[form].items():
            assert getattr(known, name) == pytest.approx(value, rel=0.01), (form, name)
    for each in recorded.dense():
        assert each.predicted(HOPPER["bf16"]) == pytest.approx(each.seconds, rel=0.03), each.name


def test_a_model_and_a_layout_that_were_never_fitted(recorded) -> None:  # type: ignore[no-untyped-def]
    """Llama-3.3-70B on two GPUs, by coefficients of smaller models."""
    steps = list(recorded.decodes("tp_llama-3.3-70b", "llama-3.3-70b", "bf16", "tp2 decode ", 2))
    assert len(steps) == 3
    for each in steps:
        assert each.predicted(HOPPER["bf16"]) == pytest.approx(each.seconds, rel=0.05), each.name
        assert each.predicted(IDEAL) < 0.95 * each.seconds
