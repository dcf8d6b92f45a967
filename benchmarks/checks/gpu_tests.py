"""Runs the tests marked ``gpu``, each file in a process of its own, and keeps what came of them.

    python benchmarks/checks/gpu_tests.py [FILE ...] [--out OUT] [--workers N] [--limit SECONDS] [--parts N]

Without FILE: every file of tests that has such a mark. Results of files that are not run again stay in OUT, each with
its commit. ``--parts``: a file's tests are split over this many processes, for files whose kernels compile for minutes.
Exit 1 where a test failed or a file was cut off by the limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record

OPTIONS = ("-q", "-m", "gpu", "-p", "no:cacheprovider")


def marked() -> list[str]:
    """List the files of tests with the mark, relative to the repository's root."""
    files = sorted((record.ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(record.ROOT)) for file in files if "mark.gpu" in file.read_text()]


def outcome(report: Path) -> dict[str, Any]:
    """Count the results of a JUnit report, and list the tests that failed."""
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


def pytest(*arguments: str, limit: float) -> subprocess.CompletedProcess[str]:
    """Run it on what has the mark; subprocess.TimeoutExpired after ``limit`` seconds."""
    command = [sys.executable, "-m", "pytest", *OPTIONS, *arguments]
    return subprocess.run(command, cwd=record.ROOT, capture_output=True, text=True, timeout=limit, check=False)


def names(file: str, limit: float) -> list[str]:
    """List pytest's names of the marked tests in a file; raises as ``pytest`` does."""
    done = pytest("-o", "addopts=--import-mode=importlib", "--collect-only", file, limit=limit)
    # Of a file outside of the repository it shortens the path.
    return [f"{file}::{line.split('::', 1)[1]}" for line in done.stdout.splitlines() if "::" in line]


def run(file: str, limit: float, parts: int = 1) -> dict[str, Any]:
    """Run the tests of one file, in ``parts`` processes. A process that is cut off has a note in place of counts."""
    began = time.perf_counter()

    def process(tests: list[str]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            done = pytest(f"--junitxml={report}", *tests, limit=limit - (time.perf_counter() - began))
            found = outcome(report) if report.exists() else {"passed": 0, "skipped": 0, "failed": ["the whole file"]}
        if found["failed"]:
            print(done.stdout[-4000:] + done.stderr[-4000:], flush=True)
        return found

    try:
        tests = names(file, limit) if parts > 1 else []
        dealt = [tests[part::parts] for part in range(min(parts, len(tests)))] or [[file]]
        with ThreadPoolExecutor(len(dealt)) as pool:
            found = list(pool.map(process, dealt))
    except subprocess.TimeoutExpired:
        return {"cut_off_after_s": limit}
    total: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": []}
    for part in found:
        total = {key: total[key] + part[key] for key in total}
    return {**total, "seconds": round(time.perf_counter() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200" / "gpu_tests.json")
    parser.add_argument("--workers", type=int, default=4, help="files at once")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a file")
    parser.add_argument("--parts", type=int, default=1, help="processes for a file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("these tests need a CUDA GPU, and torch sees none")
    environment = record.environment(("torch", "triton"))
    commit = environment.pop("commit")
    kept = json.loads(options.out.read_text()) if options.out.exists() else {"files": {}}
    kept |= {"environment": environment, "device": torch.cuda.get_device_name()}
    bad = False
    with ThreadPoolExecutor(options.workers) as pool:
        files = options.files or marked()
        for file, found in zip(
            files, pool.map(lambda each: run(each, options.limit, options.parts), files), strict=True
        ):
            print(f"{file}: {found}", flush=True)
            bad |= bool(found.get("failed", True))
            kept["files"][file] = {"commit": commit, "version": environment["version"], **found}
            record.write(options.out, kept)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
