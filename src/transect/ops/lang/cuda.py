"""CUDA C++ launchers as plain functions: the libraries that ``cuda_build.py`` makes, loaded with ctypes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from ...hardware.device import target_of
from ..registry import Implementation, Unavailable
from .cuda_build import CUDA_TARGETS as CUDA_TARGETS
from .cuda_build import build, check, library_path

_skipping: ContextVar[bool] = ContextVar("skipping CUDA C++ launches", default=False)


@contextmanager
def skipped() -> Iterator[None]:
    """Make functions from ``bind`` launch nothing inside the block and report success, without waiting for nvcc.

    Their libraries are built in the background.
    """
    token = _skipping.set(True)
    try:
        yield
    finally:
        _skipping.reset(token)


def _target() -> str:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise Unavailable("CUDA C++ kernels need an NVIDIA GPU")
    return target_of().name


def library(name: str) -> ctypes.CDLL:
    """Load ``NAME.cu``, built for torch's current GPU (once, and cached in the user's folder).

    Raises:
        Unavailable: no GPU, or ``cuda_build.check`` finds that nothing can be built.
    """
    return _load(name, _target())


@cache
def _load(name: str, target: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(build(name, target)))


@cache
def _begin(name: str, target: str) -> None:
    """Build the library in the background. ``_load`` waits for it, and raises its errors."""

    def work() -> None:
        with suppress(Exception):
            build(name, target)

    threading.Thread(target=work, daemon=True).start()


def bind(name: str, symbol: str, signature: str) -> Callable[..., int]:
    """Return a launcher of ``NAME.cu`` for torch's current GPU; it is built and loaded when it is first called. Its
    arguments by letter: p pointer, i int, l long long, f float.

    Raises:
        Unavailable: no GPU, or ``cuda_build.check`` finds that nothing can be built.
    """
    target = _target()
    if not library_path(name, target).exists():
        check(target)
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_longlong, "f": ctypes.c_float}
    found: list[Callable[..., int]] = []

    def call(*arguments: int | float) -> int:
        if _skipping.get():
            _begin(name, target)
            return 0
        if found:
            return found[0](*arguments)
        function = getattr(_load(name, target), symbol)
        function.argtypes = [kinds[letter] for letter in signature]
        function.restype = ctypes.c_int
        found.append(cast(Callable[..., int], function))
        return found[0](*arguments)

    return call


def bind_on_hopper(name: str, symbol: str, signature: str, device: torch.device | None) -> Callable[..., int]:
    """Call ``bind`` for a source that runs on sm_90 only. Its caller allocates memory for the launches on ``device``.

    Raises:
        Unavailable: not a Hopper GPU, or the errors of ``bind``.
        RuntimeError: inside a CUDA graph capture, where that memory would belong to the graph.
    """
    if not target_of(device).hopper:
        raise Unavailable(f"{name}.cu is for sm_90 only")
    return _bind_with_memory(name, symbol, signature)


def bind_since_ampere(name: str, symbol: str, signature: str, device: torch.device | None) -> Callable[..., int]:
    """Call ``bind`` as ``bind_on_hopper`` does, for a source that runs on compute capability 8.0 and later.

    Raises:
        Unavailable: an older GPU, or the errors of ``bind``.
        RuntimeError: as in ``bind_on_hopper``.
    """
    target = target_of(device)
    if target.capability < (8, 0):
        raise Unavailable(f"{name}.cu is for compute capability 8.0 and later, not for {target.name}")
    return _bind_with_memory(name, symbol, signature)


def _bind_with_memory(name: str, symbol: str, signature: str) -> Callable[..., int]:
    launch = bind(name, symbol, signature)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{name}.cu: run the operator once before capturing it in a CUDA graph")
    return launch


def launcher(name: str, symbol: str) -> Callable[..., None]:
    """Return the ``extern "C"`` function ``symbol`` of ``NAME.cu``, built for torch's current GPU.

    Tensors become pointers, and the current stream is added.

    Raises:
        Unavailable: no GPU, or ``cuda_build.check`` finds that nothing can be built.

    Raises (when called):
        RuntimeError: the launcher refused the shape (-1) or CUDA reported an error.
    """
    return _launcher(name, symbol, _target())


@cache
def _launcher(name: str, symbol: str, target: str) -> Callable[..., None]:
    function = getattr(_load(name, target), symbol)

    def value(a: Tensor | int | float) -> Any:
        if isinstance(a, Tensor):
            return ctypes.c_void_p(a.data_ptr())
        return ctypes.c_double(a) if isinstance(a, float) else ctypes.c_longlong(a)

    def call(*arguments: Tensor | int | float) -> None:
        # A 64-bit integer is also read rightly as a 32-bit one in a register or on the stack; a float is a C double.
        values = [value(a) for a in arguments]
        code = function(*values, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        if code:
            raise RuntimeError(f"{symbol} of {name}.cu returned {code}" + (": not a shape it takes" * (code == -1)))

    return call


def in_cuda(
    name: str, call: Callable[..., Any], *, autograd: Callable[..., Any] | None = None, **facts: Any
) -> Implementation:
    """Describe an implementation in CUDA C++ for all NVIDIA targets. Loading it builds ``NAME.cu``, and raises
    Unavailable if there is no GPU or ``cuda_build.check`` finds that nothing can be built.

    Args:
        autograd: the ``torch.library`` operator over ``call``; None if it has no gradient.
        facts: further fields of ``Implementation``.
    """

    def load() -> Callable[..., Any]:
        library(name)
        return call

    loads_autograd = None if autograd is None else lambda: autograd
    return Implementation("cuda", load, CUDA_TARGETS, autograd=loads_autograd, source=f"{name}.cu", **facts)


def aligned(x: Tensor) -> Tensor:
    """Return ``x`` contiguous and aligned to 16 bytes, the width of the kernels' reads; copied if it is not."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
