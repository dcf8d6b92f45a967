"""Every Triton kernel compiles ahead of time for every target that it declares, without spills, with wide accesses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from effort import proving

from transect.hardware.targets import PLAIN_TARGETS, TARGETS

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_all.py")
    done = subprocess.run(
        [sys.executable, str(script), *(["--prove"] if proving() else [])],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles(compiled: list[dict]) -> None:
    assert len(compiled) >= 3 * 5
    for made in compiled:
        last = "amdgcn" if made["target"] == "gfx942" else "ptx"
        first = set() if "hopper" in made["kernel"] else {"ttir"}  # what is written in Gluon begins a stage later
        assert {*first, "ttgir", "llir", last} <= set(made["stages"]), made


def test_every_kernel_fits_its_target(compiled: list[dict]) -> None:
    """Shared memory of a block, and registers: without spills on the targets of the portable tilings."""
    assert {made["target"] for made in compiled} == set(TARGETS)
    for made in compiled:
        assert made["shared"] <= made["room"], made
        if made["target"] in PLAIN_TARGETS and TARGETS[made["target"]].nvidia:
            assert not made["spilled"], made


def test_memory_bound_kernels_use_the_widest_access(compiled: list[dict]) -> None:
    seen = 0
    for made in compiled:
        reads = made["kernel"] != "combine" and made["access"]["load"]
        if made["op"] in ("vector_add", "sum", "dot", "softmax") and reads:
            seen += 1
            assert "16" in made["access"]["load"], made
            assert not made["spilled"], made
    assert seen >= 15
