"""Gluon, Triton's language of layouts and barriers, under the names that the kernels here use.

Gluon is experimental, and each Triton renames some of it. What differs between the versions that this package supports
(Triton 3.6, which torch 2.11 brings, to 3.9, which torch 2.15 brings) is settled here, by looking for the name and not
at the version; a kernel imports from here whatever is not in every version:

=================  ====================================  ================================
here               newer Triton                          older Triton
=================  ====================================  ================================
``block_barrier``  ``gl.barrier`` (3.7)                  ``gl.thread_barrier``
``async_load``     ``tma.async_load`` (3.8)              ``tma.async_copy_global_to_shared``
``reinterpreted``  the method ``reinterpret`` (3.9)      the method ``_reinterpret``
=================  ====================================  ================================

Where Triton is missing, or where its Gluon lacks what is needed, ``gluon`` is None and ``GLUON_MISSING`` says why.
Operators then run their plain Triton kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .jit import triton

gluon: Any
gl: Any
mbarrier: Any
tma: Any
fence_async_shared: Any
warpgroup_mma: Any
warpgroup_mma_init: Any
warpgroup_mma_wait: Any
block_barrier: Any
async_load: Any
reinterpreted: Any
tensor_descriptor: Any


def _first_of(module: Any, *names: str) -> Any:
    """Return the first of these names that a module or class has.

    Raises:
        AttributeError: it has none of them.
    """
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"{getattr(module, '__name__', module)} has none of {', '.join(names)}")


try:
    from triton.experimental import gluon  # type: ignore[no-redef]
    from triton.experimental.gluon import language as gl  # type: ignore[no-redef]
    from triton.experimental.gluon.language._core import builtin
    from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[no-redef]
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_init,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block_barrier = _first_of(gl, "barrier", "thread_barrier")
    async_load = _first_of(tma, "async_load", "async_copy_global_to_shared")
    tensor_descriptor = TensorDescriptor.from_tensor
    _missing = ""
    _reinterpret = _first_of(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")

    @builtin
    def reinterpreted(memory, dtype, shape, layout, _semantic=None):  # type: ignore[no-redef, no-untyped-def]
        """View shared memory with another dtype, shape and layout."""
        return _reinterpret(memory, dtype, shape, layout, _semantic=_semantic)

except (ImportError, AttributeError) as error:
    gluon = gl = mbarrier = tma = fence_async_shared = None
    warpgroup_mma = warpgroup_mma_init = warpgroup_mma_wait = None
    block_barrier = async_load = reinterpreted = tensor_descriptor = None
    _missing = (
        "Triton is not installed: pip install 'transect[gpu]'"
        if triton is None
        else f"the Gluon of Triton {triton.__version__} is not one that this package knows ({error})"
    )

GLUON_MISSING = _missing
"""Reason why no Gluon kernel can be compiled here; empty if they can."""


def gluon_kernel(function: Callable[..., Any], sizes: Sequence[str] = ()) -> Any:
    """Apply ``gluon.jit`` where Gluon can be used, else return the function unchanged.

    ``sizes``: integers that are compiled for any value; of others Triton compiles one kernel for 1, one for multiples
    of 16 and one for the rest, seconds each.
    """
    return function if gluon is None else gluon.jit(function, do_not_specialize=sizes)
