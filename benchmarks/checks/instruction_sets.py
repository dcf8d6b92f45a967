"""The C++ kernels on every instruction set that this machine or an emulator can run: passed tests of each.

    python benchmarks/checks/instruction_sets.py [--out FILE]

Runs ``tests/ops/cpu/test_kernels.py`` (AVX-512, AVX2 and plain x86-64, as far as this processor has them) and
``tests/ops/cpu/test_other_processors.py`` (NEON and SVE under qemu). A test that is skipped counts for nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import _paths  # noqa: F401
from benchmarks import record
from transect.ops.cpu.library import load

TESTS = ("tests/ops/cpu/test_kernels.py", "tests/ops/cpu/test_other_processors.py")


def marks() -> dict[str, str]:
    """Return parts of tests' names, each with the instruction set that such a test runs."""
    emulated = {"SVE of 256": "SVE of 256 bits", "SVE of 512": "SVE of 512 bits", "NEON": "NEON", "neon": "NEON"}
    return {"native": load(1).isa, "x86-64-v3": "AVX2", "x86-64": "plain x86-64", **emulated}


def counted(report: Path) -> dict[str, dict[str, int]]:
    """Count tests that passed and failed, by instruction set."""
    found: dict[str, dict[str, int]] = {}
    known = marks()
    for case in ET.parse(report).iter("testcase"):
        name = case.attrib["name"]
        if "compiles_for" in name or case.find("skipped") is not None:
            continue
        isa = next((isa for part, isa in known.items() if part in name), None)
        if isa is not None:
            row = found.setdefault(isa, {"passed": 0, "failed": 0})
            row["passed" if case.find("failure") is None and case.find("error") is None else "failed"] += 1
    return found


def row(result: dict[str, dict[str, dict[str, int]]], measured: str, processors: Sequence[str] = ("AMD EPYC",)) -> str:
    """Format the row of processors in the README's table; ``measured`` are the instruction sets of recorded races, on
    these ``processors``."""
    right = [isa for isa, counts in result["sets"].items() if counts["passed"] and not counts["failed"]]
    timed = [isa for isa in right if isa in measured]
    here = [isa for isa in right if isa not in timed and not isa.startswith(("NEON", "SVE"))]
    emulated = [isa for isa in right if isa.startswith(("NEON", "SVE"))]
    own = f"Linux, x86-64 with {' and '.join(timed)} ({', '.join(processors)})"
    own += f"; tests also run the {' and '.join(here)} code" if here else ""
    arm = f"Arm in an emulator ({', '.join(emulated)}): the same outputs, never timed" if emulated else ""
    return f"| CPU | {own} | {arm} | {'' if emulated else 'Arm'} | Windows, macOS |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "instruction_sets.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *TESTS, "--prove", f"--junitxml={report}"]
        subprocess.run(command, cwd=record.ROOT)
        found = counted(report)
    result = {
        "command": "python benchmarks/checks/instruction_sets.py",
        "environment": record.environment(("torch",)),
        "sets": found,
    }
    record.write(options.out, result)
    print(found)
    return int(any(counts["failed"] for counts in found.values()))


if __name__ == "__main__":
    sys.exit(main())
