"""One check as the command makes it: a workshop for the device, and one that compiles kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from ...costs.ceilings import Ceilings
from ..record import Rung
from .grader import grade
from .verdict import Verdict
from .workshop import Workshop


def check(
    rung: Rung, path: Path, device: str, ceilings: Callable[[], Ceilings], *, compile_kernels: bool = True
) -> Verdict:
    """Grade a program on ``cpu`` or ``cuda``. Ceilings are measured where a floor is needed."""
    with ExitStack() as stack:
        shop = stack.enter_context(Workshop(device if rung.kind == "triton" else "cpu"))
        compiler = None
        if compile_kernels and rung.compiled and device == "cpu":
            compiler = stack.enter_context(Workshop(interpret=False))
        return grade(rung, path, shop=shop, ceilings=ceilings, compiler=compiler)
