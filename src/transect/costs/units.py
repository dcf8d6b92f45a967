"""Sizes of memory and times as text."""

from __future__ import annotations

GIB = 2**30
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": GIB}


def gib(size: float) -> str:
    """Format bytes as ``12.34 GiB``, or in MiB if there are fewer than a tenth of one GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def seconds_text(seconds: float) -> str:
    """Format seconds with a suitable unit, such as ``1.5 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def parse_bytes(text: str) -> int:
    """Read ``80GB``, ``24 GiB``, ``500MB`` or a number of bytes.

    Raises:
        ValueError: ``text`` is anything else.
    """
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        size = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        size = -1.0
    if not 0 < size < 2**60:
        raise ValueError(f"{text!r} is not a size of memory: write it as 80GB, 24GiB or a number of bytes")
    return int(size)
