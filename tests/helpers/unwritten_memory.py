"""Memory that nobody has written holds NaN, so that a test or a kernel that reads it fails each time, not seldom.

Fresh memory of a process is zeros most of the time: what forgets to fill a tensor passes, and fails on the day when the
allocator returns bytes that something else left there.
"""

from __future__ import annotations

import ctypes

M_PERTURB = -6
"""A parameter of glibc's ``mallopt``. ``malloc`` fills what it returns with the complement of the value's lowest byte;
0 turns that off, so 256 gives bytes of 0xff. They are NaN as float32, bfloat16 and float16, and -1 as an integer."""


def fill_with_nan() -> bool:
    """For this process, from now on. False where the C library is another than glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_PERTURB, 256) == 1
