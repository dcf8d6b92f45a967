"""Programs with one planted fault each: explain them, and time them with the fault and without."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from transect.costs.ceilings import Ceilings
from transect.explain.program.explain import Explain, Explanation

FOLDER = Path(__file__).resolve().parents[1] / "explain" / "program" / "faults"
_ALL = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
NAMES = [name for name in _ALL if not name.startswith("gpu_")]
HOST_ONLY = ("one_thread", "sync_in_the_loop", "tiny_operators")
"""On a GPU the first is no fault, and the others have programs of their own."""
GPU_NAMES = [name for name in _ALL if name not in HOST_ONLY]
"""Those that a GPU runs: made for it, or the same on its tensors."""
COPY_ONLY = ("python_sampling",)
"""On a GPU they read its tensors and run no kernel there, so their time is the host's."""


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
    said: str = ""
    """The whole explanation."""

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


def load(name: str, device: str = "cpu") -> ModuleType:
    """The program, with its tensors on ``device``."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with torch.device(device):
        spec.loader.exec_module(module)
    return module


def ceilings() -> Ceilings:
    """Round figures of a small processor, so that nothing is measured in a test."""
    return Ceilings("test", 20e9, 20e9, {"float32": 100e9, "bfloat16": 100e9})


def explain(name: str, limits: Ceilings | None = None, device: str = "cpu", trace: Path | None = None) -> Explanation:
    """What is said of the faulty program; it has run once before. ``trace``: keep the profiler's there."""
    torch.set_num_threads(1)  # two would wait for one another whenever something else runs here
    module = load(name, device)
    module.faulty()
    with Explain(limits or ceilings(), cores=getattr(module, "CORES", 1), trace=trace) as run:
        module.faulty()
    assert run.result is not None
    return run.result


def verdict(
    name: str, limits: Ceilings | None = None, device: str = "cpu", trace: Path | None = None, rounds: int = 5
) -> Verdict:
    """Explain a program, and time it with its fault and without."""
    found = explain(name, limits, device, trace)
    module = load(name, device)
    module.fixed()
    both = [(seconds(module.faulty), seconds(module.fixed)) for _ in range(rounds)]  # in turns: others use this machine
    with_fault, without = (min(column) for column in zip(*both, strict=True))
    first = found.findings[0].kind if found.findings else "nothing"
    mine = next((each.share for each in found.findings if each.kind == module.KIND), 0.0)
    return Verdict(name, module.KIND, first, mine, 1 - without / with_fault, with_fault, str(found))


def seconds(function) -> float:
    """Time of one call, and of what it left a GPU to do."""
    began = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def healthy(device: str = "cpu") -> torch.Tensor:
    """A program without a fault: large products, without gradients."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (700, torch.float32)
    x = torch.randn(size, size, device=device, dtype=dtype)
    with torch.inference_mode():
        for _ in range(10):
            x = (x @ x).mul_(0.01)
    return x
