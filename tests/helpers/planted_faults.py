"""Programs with one planted fault each: explain them, and time them with the fault and without."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from transect.explain.program import Explain, Explanation
from transect.hardware.ceilings import Ceilings

FOLDER = Path(__file__).resolve().parents[1] / "explain" / "faults"
_ALL = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
NAMES = [name for name in _ALL if not name.startswith("gpu_")]
GPU_NAMES = [name for name in _ALL if name.startswith("gpu_")]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a program was, and what was said of it."""

    name: str
    kind: str
    first: str
    predicted: float
    """What the right finding promises, as a share of the program's time; 0 where there is none."""
    obtained: float
    """What the fix saves, as a share of it."""
    wall: float

    @property
    def right(self) -> bool:
        """Whether the right fault came first."""
        return self.first == self.kind

    @property
    def near(self) -> bool:
        """Whether the prediction is within 30% of what the fix gives."""
        return abs(self.predicted - self.obtained) <= 0.3 * self.obtained

    def __str__(self) -> str:
        return (
            f"{self.name:26} {self.kind:14} first: {self.first:14} predicted {self.predicted:6.1%}, "
            f"obtained {self.obtained:6.1%} of {1e3 * self.wall:7.1f} ms"
        )


def load(name: str) -> ModuleType:
    """The program."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ceilings() -> Ceilings:
    """Round figures of a small processor, so that nothing is measured in a test."""
    return Ceilings("test", 20e9, 20e9, {"float32": 100e9, "bfloat16": 100e9})


def explain(name: str, limits: Ceilings | None = None) -> Explanation:
    """What is said of the faulty program; it has run once before."""
    torch.set_num_threads(1)  # two would wait for one another whenever something else runs here
    module = load(name)
    module.faulty()
    with Explain(limits or ceilings(), cores=getattr(module, "CORES", 1)) as run:
        module.faulty()
    assert run.result is not None
    return run.result


def verdict(name: str, limits: Ceilings | None = None) -> Verdict:
    """Explain a program, and time it with its fault and without."""
    found = explain(name, limits)
    module = load(name)
    module.fixed()
    both = [(seconds(module.faulty), seconds(module.fixed)) for _ in range(5)]  # in turns: others use this machine
    with_fault, without = (min(column) for column in zip(*both, strict=True))
    first = found.findings[0].kind if found.findings else "nothing"
    mine = next((each.share for each in found.findings if each.kind == module.KIND), 0.0)
    return Verdict(name, module.KIND, first, mine, 1 - without / with_fault, with_fault)


def seconds(function) -> float:
    """Time of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


if __name__ == "__main__":
    import sys

    from transect.explain.program import machine_ceilings

    limits = machine_ceilings()
    verdicts = []
    for each in sys.argv[1:] or NAMES:
        verdicts.append(verdict(each, limits))
        print(verdicts[-1], flush=True)
    print(f"{sum(v.right for v in verdicts)} of {len(verdicts)} first, {sum(v.near for v in verdicts)} within 30%")
