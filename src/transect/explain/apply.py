"""Does what findings say, where that can be done from outside of a script, and measures again.

Three changes need no edit: ``inference mode`` (the whole script runs under it), ``threads`` (torch uses all cores), and
``tf32`` (float32 products on tensor cores). Each is measured alone, without the profiler, against the script as it is.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ..hardware.cores import usable_cores
from .findings import Finding
from .program import Explanation

RUNS = 3


@dataclass(frozen=True, slots=True)
class Applied:
    """One change: seconds that were predicted and obtained, of ``before``; ``failed`` where the script did not run."""

    finding: Finding
    before: float
    after: float
    failed: str = ""

    @property
    def obtained(self) -> float:
        """Seconds saved."""
        return self.before - self.after

    def __str__(self) -> str:
        if self.failed:
            return f"applied {self.finding.apply}: the script fails with it ({self.failed}): left out"
        share = self.obtained / self.before
        return (
            f"applied {self.finding.apply}: predicted {1e3 * self.finding.gain:.1f} ms ({self.finding.share:.0%}), "
            f"obtained {1e3 * self.obtained:.1f} ms ({share:.0%}) of {1e3 * self.before:.1f}"
        )


@contextmanager
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


CHANGES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "inference mode": torch.inference_mode,
    "threads": _threads,
    "tf32": _tf32,
}
"""Names in ``Finding.apply``."""


def apply(path: Path, arguments: Sequence[str], explanation: Explanation) -> list[Applied]:
    """Run the script with each change that its findings name, and as it is, in turns; what it prints is left out."""
    done = []
    for finding in explanation.findings:
        change = CHANGES.get(finding.apply)
        if change is None:
            continue
        before = after = float("inf")
        failed = ""
        for _ in range(RUNS):
            before = min(before, _seconds(path, arguments))
            try:
                with change():
                    after = min(after, _seconds(path, arguments))
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"
                break
        done.append(Applied(finding, before, after, failed))
    return done


def _seconds(path: Path, arguments: Sequence[str]) -> float:
    before, folder = sys.argv, str(path.resolve().parent)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            began = time.perf_counter()
            with contextlib.suppress(SystemExit):
                runpy.run_path(str(path), run_name="__main__")
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return time.perf_counter() - began
    finally:
        sys.argv = before
        sys.path.remove(folder)
