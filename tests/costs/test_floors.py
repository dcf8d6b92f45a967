"""Floors of published shapes against figures worked out elsewhere, at 4.35 TB/s and 750 TFLOP/s."""

import json

import pytest

from transect.bench.workload import throughput_protocol
from transect.checkpoints.layouts import storage_of
from transect.checkpoints.resolve import resolve
from transect.costs.ceilings import Ceilings
from transect.costs.floors import Floor, Rates, batch_floor, step_floor
from transect.costs.model import Row
from transect.costs.storage import Storage
from transect.spec.hf import to_hf
from transect.spec.layouts.ranks import RankLayout
from transect.spec.shapes import PRESETS

RATES = Rates(4.35e12, 750e12)


@pytest.mark.parametrize(
    ("model", "batch", "milliseconds"),
    [
        ("llama-3.1-8b", 1, 3.47),
        ("llama-3.1-8b", 8, 3.61),
        ("llama-3.1-8b", 32, 4.10),
        ("llama-3.1-8b", 64, 4.75),
        ("llama-3.1-8b", 128, 6.06),
        ("llama-3.1-8b", 256, 10.06),
        ("qwen3-0.6b", 1, 0.29),
        ("qwen3-0.6b", 64, 1.37),
    ],
)
def test_decode(model, batch, milliseconds):
    floor = step_floor(PRESETS[model], [Row(1, 640)] * batch, RATES)
    assert floor.seconds * 1e3 == pytest.approx(milliseconds, abs=0.006)


def test_prefill():
    floor = step_floor(PRESETS["llama-3.1-8b"], [Row(512, 512)] * 256, RATES)
    assert floor.seconds == pytest.approx(2.46, abs=0.005)
    assert floor.flops / RATES.flops_per_second == pytest.approx(floor.seconds, rel=0.01)  # bound by arithmetic


@pytest.mark.parametrize(("model", "rate"), [("qwen3-0.6b", 36_200), ("llama-3.1-8b", 13_030), ("qwen3-8b", 12_440)])
def test_the_throughput_protocol(model, rate):
    work = throughput_protocol()
    prefill, decode = batch_floor(PRESETS[model], [(len(each.prompt), each.output_tokens) for each in work], RATES)
    assert 133_966 / (prefill + decode).seconds == pytest.approx(rate, rel=0.001)


def test_the_work_of_each_device_of_several():
    """A rank of two has half of everything; a group of two half of the sequences and all weights; a stage half the
    time."""
    config, lengths = PRESETS["llama-3.1-8b"], [(512, 8)] * 4
    one = sum(batch_floor(config, lengths, RATES), Floor()).seconds
    half = sum(batch_floor(config, lengths[:2], RATES), Floor()).seconds
    layouts = RankLayout(tensor=2), RankLayout(data=2), RankLayout(pipeline=2), RankLayout(data=2, pipeline=2)
    found = [sum(batch_floor(config, lengths, RATES, None, layout), Floor()).seconds for layout in layouts]
    assert found[1:] == pytest.approx([half, one / 2, half / 2])
    assert one / 2 < found[0] < 0.51 * one  # norms are whole on both
    assert half > 0.6 * one
    with pytest.raises(ValueError, match="cannot be cut for 3 ranks"):
        step_floor(config, [Row(1, 8)], RATES, ranks=3)


def test_by_hand():
    """One step of one row, small enough to count: bytes of matrices, of what goes through them, and of the cache."""
    config = PRESETS["qwen3-0.6b"]
    d, f, q, kv, v = 1024, 3072, 2048, 1024, 151936
    matrices = 28 * (d * q + 2 * d * kv + q * d + 3 * d * f)
    through = 28 * (d + q + 2 * kv + q + d + d + 2 * f + f + d)
    floor = step_floor(config, [Row(1, 100)], Rates(1.0, 1e30), Storage(linear=8, head=4, kv=16, activation=32))
    assert floor.bytes == matrices + 4 * through + v * d / 2 + 4 * (v + d) + 28 * 2 * 100 * kv * 2
    assert floor.flops == 2 * matrices + 2 * v * d + 28 * 4 * 100 * q
    assert floor.seconds == floor.bytes
    no_logits = step_floor(config, [Row(1, 100)], Rates(1.0, 1e30), Storage(linear=8, kv=16, activation=32), 0)
    assert no_logits.bytes == matrices + 4 * through + 28 * 2 * 100 * kv * 2


def test_shares():
    shares = Floor(flops=300.0, bytes=50.0, seconds=2.0).compared(4.0, Rates(100.0, 150.0))
    assert shares == {"floor_s": 2.0, "of_floor": 0.5, "mbu": 0.125, "mfu": 0.5}


def test_rates_of_measured_ceilings():
    ceilings = Ceilings("d", 2.0, 3.0, {"float32": 5.0})
    assert Rates.of(ceilings, "float32") == Rates(2.0, 5.0, "d")
    with pytest.raises(ValueError, match="no rate is known for bfloat16"):
        Rates.of(ceilings, "bfloat16")


def test_storage(smollm2, tmp_path):
    packed = storage_of(smollm2, "auto", keeps_quantized=True)
    assert 4 < packed.linear < 9 and packed.kv == 16
    dense = storage_of(smollm2, "float32", keeps_quantized=False)
    assert dense.linear == dense.kv == 32
    (tmp_path / "config.json").write_text(json.dumps(to_hf(PRESETS["qwen3-0.6b"])))
    assert storage_of(resolve(str(tmp_path), load_format="dummy"), "auto", keeps_quantized=True).linear == 16


def test_layers_that_stream_take_as_long_as_the_host_link_needs():
    rates = Rates.of(
        Ceilings("any", 4.35e12, 4e12, {"bfloat16": 750e12}, host_to_device_bytes_per_second=50e9), "bfloat16"
    )
    config, row = PRESETS["llama-3.1-8b"], Row(1, 640)
    stays, streams = Storage(), Storage(streamed=14e9)
    assert step_floor(config, [row], rates, stays).seconds == pytest.approx(3.47e-3, rel=0.01)
    assert step_floor(config, [row], rates, streams).seconds == pytest.approx(14 / 50)
    prompts = [Row(512, 512)] * 256  # arithmetic takes longer
    assert step_floor(config, prompts, rates, streams) == step_floor(config, prompts, rates, stays)
    assert step_floor(config, [row], RATES, streams).seconds == step_floor(config, [row], RATES, stays).seconds
