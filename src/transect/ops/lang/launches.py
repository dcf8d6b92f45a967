"""Launches a Triton kernel without looking up again what it needs.

For each launch Triton asks of every argument what the compiled code may rely on (a type, a multiple of 16), makes a
key of that and of the options' text, reads settings, and calls two chains of hooks, empty or not. A step of a model
launches the same few kernels layer by layer with other pointers, so most of that is asked again and again.

``Launches`` stands before a kernel and remembers, for each kind of arguments, the kernel that Triton chose. What
Triton asks of an argument is part of the kind: of a tensor its dtype and whether it begins at a multiple of 16 bytes,
of a bulk copy's description its tile, of anything else its type and value. So a launch that is remembered is the one
that Triton would have made. Whatever is not known here goes Triton's own way: other kinds of arguments, a grid that is
a function, warm-ups, hooks, AMD GPUs, and versions of Triton whose launcher was not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

VERSIONS = ("3.6.",)
"""Versions of Triton that are known to launch as this file does."""
MOST_KINDS = 4096
"""Kinds of arguments that a kernel remembers; with more it begins anew."""
ALIGNED = 16
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_PLAIN = frozenset((int, float, bool, str, type(None)))


class Remembered(NamedTuple):
    """A compiled kernel, and how its arguments are put in order."""

    run: Callable[..., None]
    function: int
    metadata: Any
    rest: tuple[tuple[str, Any], ...]
    """Parameters behind the positional ones, with their defaults."""


class Launches:
    """The ``run`` of one of Triton's functions.

    Args:
        function: a ``triton.JITFunction``.
        triton: the module.
    """

    def __init__(self, function: Any, triton: Any) -> None:
        self._function = function
        self._slowly: Callable[..., Any] = function.run
        self._settings = triton.knobs.runtime
        self._driver = triton.runtime.driver
        self._kinds: dict[tuple[Any, ...], Remembered] = {}
        self.remembered = 0
        """Launches so far that needed no look-up."""

    def __call__(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        settings = self._settings
        hooks = settings.launch_enter_hook.calls or settings.launch_exit_hook.calls or self._function.pre_run_hooks
        if warmup or hooks or settings.jit_cache_hook is not None or type(grid) is not tuple:
            return self._slowly(*args, grid=grid, warmup=warmup, **kwargs)
        driver = self._driver.active
        device = driver.get_current_device()
        kind = _kind(device, args, kwargs)
        if kind is None:
            return self._slowly(*args, grid=grid, warmup=warmup, **kwargs)
        known = self._kinds.get(kind)
        if known is None:
            compiled = self._slowly(*args, grid=grid, warmup=warmup, **kwargs)
            self._remember(kind, compiled, len(args))
            return compiled
        run, function, metadata, rest = known
        sizes = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = driver.get_current_stream(device)
        values = [kwargs.get(name, default) for name, default in rest]
        run(*sizes, stream, function, metadata, None, None, None, *args, *values)
        self.remembered += 1
        return None

    def _remember(self, kind: tuple[Any, ...], compiled: Any, positional: int) -> None:
        if compiled is None:
            return
        compiled = compiled.result() if hasattr(compiled, "result") else compiled
        if len(self._kinds) >= MOST_KINDS:
            self._kinds.clear()
        rest = tuple((each.name, each.default) for each in self._function.params[positional:])
        self._kinds[kind] = Remembered(compiled.run, compiled.function, compiled.packed_metadata, rest)


def _kind(device: int, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """All that Triton goes by when it chooses a kernel for these arguments; None: they have something unknown."""
    found: list[Any] = [device, *kwargs]
    for arg in (*args, *kwargs.values()):
        kind = type(arg)
        if kind in _TENSORS:
            found += arg.dtype, arg.data_ptr() % ALIGNED
        elif kind in _PLAIN:
            found += kind, arg
        elif kind.__name__ == "TensorDescriptor":
            base = arg.base
            if type(base) not in _TENSORS:
                return None
            found += kind, base.dtype, *arg.block_shape, getattr(arg, "layout", None), arg.padding
        else:
            return None
    return tuple(found)


def remember(function: Any, triton: Any) -> Any:
    """``function`` with its launches remembered, where its Triton is one that is known to launch like this."""
    nvidia = torch.version.hip is None
    if nvidia and triton.__version__.startswith(VERSIONS) and isinstance(function, triton.JITFunction):
        function.run = Launches(function, triton)
    return function
