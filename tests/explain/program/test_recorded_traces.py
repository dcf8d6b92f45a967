"""Traces of programs with a planted fault, recorded on an H200 (``faults/gpu_*.py``): what is said of them anywhere."""

from pathlib import Path

import pytest
from planted_faults import load

from transect.costs.presets import preset
from transect.explain.program.explain import explain_trace
from transect.explain.program.trace_file import read_trace
from transect.explain.roofline import points_of_trace

FOLDER = Path(__file__).parent / "traces"
SHARES = {"gpu_allocator_thrash": 0.91, "gpu_float32_products": 0.87, "gpu_repeated_upload": 0.92}
SHARES |= {"gpu_unpinned_copies": 0.73, "recompilation": 0.83, "conversion_every_step": 0.56, "layout_copies": 0.84}
SHARES |= {"gpu_sync_in_the_loop": 0.15, "small_batch": 0.975}
"""What the fix saved there, as a share of the program's time."""
PROFILER_S = 6.7e-6
"""What a launch took longer there while it was profiled."""


@pytest.mark.parametrize("name", sorted(SHARES))
def test_the_right_fault_comes_first_with_what_its_fix_saves(name):
    found = explain_trace(read_trace(FOLDER / f"{name}.json.gz"), preset("h200").ceilings(), profiler_s=PROFILER_S)
    first = found.findings[0]
    assert first.kind == load(name).KIND, str(found)
    assert first.share == pytest.approx(SHARES[name], rel=0.3)
    assert all(each.share < 0.05 for each in found.findings[1:]), str(found)
    assert found.split.on_gpu and sum(found.split.parts.values()) == pytest.approx(found.split.wall, rel=1e-6)
    assert found.split.share("unexplained") < 0.05


def test_what_the_profilers_start_held_up_is_not_the_programs():
    """Its first kernel began 16 ms after its launch; without the profiler the program took 20.3 ms."""
    trace = read_trace(FOLDER / "conversion_every_step.json.gz")
    split = explain_trace(trace, preset("h200").ceilings(), profiler_s=PROFILER_S).split
    assert split.wall == pytest.approx(37.5e-3, rel=0.01) and split.own == pytest.approx(20.3e-3, rel=0.02)
    assert split.parts["sync"] < 0.001


def test_two_kernels_of_an_operator_share_its_floor():
    """The product adds its parts up in a second kernel: both together are one point of the roofline."""
    limits = preset("h200").ceilings()
    found = explain_trace(read_trace(FOLDER / "conversion_every_step.json.gz"), limits, profiler_s=PROFILER_S)
    first, second = (op for op in found.split.ops if op.operator == "aten::mm")
    assert first.calls * first.floor / first.seconds == pytest.approx(second.calls * second.floor / second.seconds)
    least = 60 * max(2 * 16 * 8192**2 / limits.rate("float32"), 4 * 8192**2 / limits.copy_bytes_per_second)
    assert first.calls * first.floor + second.calls * second.floor == pytest.approx(least, rel=0.02)
    (point,) = (each for each in points_of_trace(found.split, limits) if each.name == "aten::mm x60")
    assert point.flops == 60 * 2 * 16 * 8192**2 and point.seconds == pytest.approx(first.seconds + second.seconds)
    assert first.title.startswith("aten::mm: sm80_xmma_gemm") and "aten::copy_: unrolled_elementwise_kernel" in str(
        found
    )
