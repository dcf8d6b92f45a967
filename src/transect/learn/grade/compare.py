"""Compares a result with the exact answer, and says where they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_SHOWN = 300
"""Characters of a call that is shown to the student."""


def difference(got: Any, want: Any, tolerance: float, where: str = "the result", *, scale: float | None = None) -> str:
    """Say in a sentence how ``got`` differs from ``want``; empty if it does not.

    Floating-point numbers may differ by ``tolerance``, relative in the 2-norm of each tensor; everything else not at
    all. NaN and infinities must stand where they do in ``want``. ``scale``: errors of a tensor are relative to it, in
    place of the tensor's norm.
    """
    if isinstance(want, np.ndarray):
        want = torch.from_numpy(want)
    if isinstance(want, Tensor):
        return _tensors(got, want, tolerance, where, scale)
    if isinstance(want, list | tuple):
        if not isinstance(got, list | tuple):
            return f"{where} is of the type {type(got).__name__}; a list of {len(want)} is expected"
        if len(got) != len(want):
            return f"{where} has {len(got)} entries instead of {len(want)}"
        names = (f"entry {i} of {where}" for i in range(len(want)))
        pairs = zip(got, want, names, strict=True)
        return next(filter(None, (difference(g, w, tolerance, name) for g, w, name in pairs)), "")
    if isinstance(want, dict):
        if not isinstance(got, dict) or set(got) != set(want):
            return f"{where} must have the keys {', '.join(map(str, want))}"
        return next(filter(None, (difference(got[k], want[k], tolerance, _part(k, where)) for k in want)), "")
    if isinstance(want, float):
        if isinstance(got, Tensor) and got.numel() == 1:
            got = got.item()
        if isinstance(got, bool) or not isinstance(got, int | float):
            return f"{where} is of the type {type(got).__name__}; a number is expected"
        return "" if _close(float(got), want, tolerance) else f"{where} is {got:.6g} instead of {want:.6g}"
    if type(got) is not type(want) or got != want:
        return f"{where} is {_short(got)} instead of {_short(want)}"
    return ""


def _part(key: Any, whole: str) -> str:
    return f"{key}" if whole == "the result" else f"{key!r} of {whole}"


def _close(got: float, want: float, tolerance: float) -> bool:
    if math.isnan(want) or math.isinf(want):
        return got == want or (math.isnan(want) and math.isnan(got))
    return abs(got - want) <= tolerance * max(abs(want), 1e-6) if math.isfinite(got) else False


def _tensors(got: Any, want: Tensor, tolerance: float, where: str, scale: float | None) -> str:
    if not isinstance(got, Tensor):
        return f"{where} is of the type {type(got).__name__}; a tensor of the shape {list(want.shape)} is expected"
    if got.shape != want.shape:
        return f"{where} has the shape {list(got.shape)} instead of {list(want.shape)}"
    if not want.is_floating_point():
        wrong = got.long() != want.long()
        count = int(wrong.sum())
        return f"{where} differs in {count} of {want.numel()} places{_first(wrong, got, want)}" if count else ""
    wide, exact = got.double(), want.double()
    usable = exact.isfinite()
    special = ~usable & ~((wide == exact) | (wide.isnan() & exact.isnan()))
    if bool(special.any()) or bool((usable & ~wide.isfinite()).any()):
        wrong = special | (usable & ~wide.isfinite())
        return f"{where} is NaN or infinite in the wrong places{_first(wrong, got, want)}"
    error = float((wide - exact)[usable].norm())
    scale = float(exact[usable].norm()) if scale is None else scale
    if error <= tolerance * (scale or 1.0):
        return ""
    wrong = (wide - exact).abs() > 10 * tolerance * max(scale / max(1, exact.numel()) ** 0.5, 1e-30)
    share = int(wrong.sum()) / max(1, exact.numel())
    return f"{where} is off by {error / (scale or 1):.1e} (at most {tolerance:.0e}), {share:.0%} of the elements" + (
        _first(wrong, got, want) if bool(wrong.any()) else ""
    )


def _first(wrong: Tensor, got: Tensor, want: Tensor) -> str:
    at = wrong.nonzero()[0].tolist()
    a, b = got[tuple(at)].item(), want[tuple(at)].item()
    return f"; at {at}: {a:.6g} instead of {b:.6g}" if not isinstance(b, bool) else f"; at {at}: {a} instead of {b}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def call_text(entry: str, arguments: Sequence[Any]) -> str:
    """Write a call as Python, with tensors as shapes; empty if it is longer than ``MOST_SHOWN`` characters."""
    text = f"{entry}({', '.join(map(_argument, arguments))})"
    return text if len(text) <= MOST_SHOWN else ""


def _argument(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype)[6:]} {list(value.shape)}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]"
    return repr(value)
