"""Name the parts of a tensor that ranks keep in files. No torch.

A rank that has some numbers of a tensor keeps them as a vector under ``NAME@BEGINofSHAPE``, such as
``embed.weight/m@4096of49152x576``: the numbers from 4096 on of a tensor of that shape. From these names the tensor
can be reassembled, whatever the number of ranks was.
"""

from __future__ import annotations

from collections.abc import Sequence


def part_name(name: str, begin: int, shape: Sequence[int]) -> str:
    """Return the name of the vector that holds the numbers from ``begin`` on of the tensor ``name``."""
    return f"{name}@{begin}of{'x'.join(map(str, shape))}"


def parse(key: str) -> tuple[str, int, tuple[int, ...] | None]:
    """Return (name, begin, shape) of a ``part_name``; for any other name the name itself, 0 and None."""
    name, cut, rest = key.rpartition("@")
    if not cut:
        return key, 0, None
    begin, _, shape = rest.partition("of")
    return name, int(begin), tuple(map(int, shape.split("x"))) if shape else ()
