"""Memory that nobody has written holds NaN, so that a test or a kernel that reads it fails each time, not seldom.

Fresh memory of a process is zeros most of the time: what forgets to fill a tensor passes, and fails on the day when the
allocator returns bytes that something else left there.
"""

from __future__ import annotations

import ctypes

M_PERTURB = -6
"""Of glibc's ``mallopt``: bytes that ``malloc`` returns are the complement of the number's lowest byte; 0 turns it off,
so 256 gives 0xff. Four of them are a float32 NaN, two a bfloat16 or float16 NaN, and -1 as an integer."""


def fill_with_nan() -> bool:
    """For this process, from now on. False where the C library is another than glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_PERTURB, 256) == 1
