"""Traces of programs with a planted fault, recorded on an H200 (``faults/gpu_*.py``): what is said of them anywhere."""

from pathlib import Path

import pytest
from planted_faults import load

from transect.explain.program import explain_trace
from transect.explain.trace_file import read_trace
from transect.hardware.presets import preset

FOLDER = Path(__file__).parent / "traces"
SHARES = {"gpu_allocator_thrash": 0.91, "gpu_float32_products": 0.87, "gpu_repeated_upload": 0.92}
SHARES |= {"gpu_unpinned_copies": 0.73, "recompilation": 0.83}
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
