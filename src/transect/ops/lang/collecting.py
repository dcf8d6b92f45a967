"""Finds the Triton kernels that some work needs, by doing that work without launching any of them."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

from . import cuda
from .jit import triton

_HOOK = threading.Lock()
"""Triton has one hook for the whole process."""


class CollectedKernel(NamedTuple):
    """A kernel for one kind of arguments."""

    module: str
    name: str
    specialization: str
    """Triton's own description, JSON."""

    def load(self) -> Any:
        """Compile it for Triton's active driver, or read it from Triton's cache; its next launch finds it loaded."""
        return getattr(import_module(self.module), self.name).preload(self.specialization)


@contextmanager
def collected(found: Callable[[CollectedKernel], None]) -> Iterator[None]:
    """Collect kernels instead of launching them, Triton's and CUDA C++, inside the block.

    ``found`` is called once for each Triton kernel that would have been launched. Kernels of other libraries (torch,
    cuBLAS) do run, on uninitialized memory. Other threads, perhaps of another engine, launch as always, but load their
    kernels again meanwhile. A second collecting thread waits.
    """
    with _HOOK, _hooked(found), cuda.skipped():
        yield


@contextmanager
def _hooked(found: Callable[[CollectedKernel], None]) -> Iterator[None]:
    seen: set[CollectedKernel] = set()
    here = threading.get_ident()

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if threading.get_ident() != here:
            return False
        kernel = CollectedKernel(fn.module, fn.name, compile["specialization_data"])
        if kernel not in seen:
            seen.add(kernel)
            found(kernel)
        return True  # neither compiled nor launched

    runtime = triton.knobs.runtime
    before = runtime.jit_cache_hook
    # What has been compiled in this process would be launched: it is put aside.
    compiled = [(function, function.device_caches) for function in _functions() if function.device_caches]
    for function, _ in compiled:
        function.device_caches = defaultdict(function.create_binder)
    runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        runtime.jit_cache_hook = before
        for function, caches in compiled:
            function.device_caches = caches


def _functions() -> list[Any]:
    """List all Triton functions of this package."""
    package = __name__.partition(".")[0] + "."
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(package)]
    return [value for module in modules for value in vars(module).values() if isinstance(value, triton.JITFunction)]
