"""Chooses, once, which implementation of every operator a model runs, and holds them as plain callables.

A call through the model costs what the callable costs: no lookup, no dispatch on device, no global switch. Two models
of one process may run different sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from ..hardware.device import target_of
from ..hardware.targets import compiled_as
from .activation import gelu, swiglu  # noqa: F401
from .attention.packed import attention  # noqa: F401
from .attention.paged import kv_cache_write, paged_attention, rotary_kv_write  # noqa: F401
from .linear import gate_up, linear  # noqa: F401
from .linear.adapters import add_low_rank  # noqa: F401
from .moe import combining, grouped_gate_up, grouped_linear, router, routing  # noqa: F401
from .norm import add_rms_norm, layer_norm, rms_norm  # noqa: F401
from .position import embed_tokens, norm_rotary, rotary  # noqa: F401
from .registry import Implementation, Unavailable, get

if TYPE_CHECKING:
    from .linear.stream_products import StreamProducts


@dataclass(frozen=True, slots=True)
class OpSet:
    """The operators of a decoder; arguments are those of the ``reference`` in the operator's file."""

    rms_norm: Callable[..., Any]
    layer_norm: Callable[..., Any]
    add_rms_norm: Callable[..., Any]
    rotary: Callable[..., Any]
    swiglu: Callable[..., Any]
    gate_up: Callable[..., Any]
    gelu: Callable[..., Any]
    linear: Callable[..., Any]
    add_low_rank: Callable[..., Any]
    attention: Callable[..., Any]
    kv_cache_write: Callable[..., Any]
    rotary_kv_write: Callable[..., Any]
    paged_attention: Callable[..., Any]
    embed_tokens: Callable[..., Any]
    expert_router: Callable[..., Any]
    expert_routing: Callable[..., Any]
    grouped_linear: Callable[..., Any]
    grouped_gate_up: Callable[..., Any]
    expert_combine: Callable[..., Any]
    stream_products: StreamProducts | None = None
    """Products that include the norms between them, for decode steps of up to 256 rows; None if unavailable."""
    chosen: tuple[tuple[str, str], ...] = ()
    """(operator, implementation), for the start-up line."""
    passed_over: tuple[tuple[str, str, str], ...] = ()
    """(operator, implementation, reason) of preferred implementations that cannot run here."""

    def is_batch_invariant(self, operator: str) -> bool:
        """Return True if a row's result of an operator does not depend on the other rows."""
        label = dict(self.chosen).get(operator)
        return label is not None and get(operator).implementations[label].batch_invariant


NOT_OPERATORS = ("stream_products", "chosen", "passed_over")
OPERATORS = tuple(field.name for field in fields(OpSet) if field.name not in NOT_OPERATORS)


def resolve_ops(
    device: torch.device | str = "cpu",
    backends: Sequence[str] = ("torch",),
    *,
    batch_invariant: bool = False,
    differentiable: bool = False,
) -> OpSet:
    """Pick for each operator the first implementation, in the order of ``backends``, that runs on ``device``.

    ``batch_invariant`` admits only implementations that say so, and no configuration that was tuned on this machine:
    slower, and a row's result is the same to the bit in any batch, and on any machine with such a device.
    ``differentiable`` takes each implementation's ``torch.library`` operator, for training;
    torch's own are differentiable as they are. ``ValueError`` names the operator for which nothing is left, and why.
    """
    target = _target(torch.device(device))
    picked: dict[str, Callable[..., Any]] = {}
    chosen: list[tuple[str, str]] = []
    passed_over: list[tuple[str, str, str]] = []
    for name in OPERATORS:
        candidates = [
            (label, implementation)
            for backend in backends
            for label, implementation in get(name).implementations.items()
            if implementation.backend == backend
        ]
        for label, implementation in candidates:
            load = implementation.load
            if differentiable and implementation.backend != "torch":
                load = implementation.autograd  # type: ignore[assignment]
            reason = _unfit(implementation, target, batch_invariant)
            if reason is None and load is None:
                reason = "has no gradient"
            if reason is None:
                try:
                    picked[name] = load()
                    if batch_invariant and _takes(picked[name], "own_tuning"):
                        picked[name] = partial(picked[name], own_tuning=False)
                except Unavailable as error:
                    reason = str(error)
            if reason is None:
                chosen.append((name, label))
                break
            passed_over.append((name, label, reason))
        if name not in picked:
            reasons = "; ".join(f"{label}: {reason}" for op, label, reason in passed_over if op == name)
            raise ValueError(
                f"operator {name!r} has no implementation for {target} among the backends {', '.join(backends)} "
                f"({reasons or 'none is registered'}); add 'torch' to the backends"
            )
    return OpSet(**picked, stream_products=None, chosen=tuple(chosen), passed_over=tuple(passed_over))


def with_dependent_launch(ops: OpSet, on: bool = True) -> OpSet:
    """Return the same operators with dependent launch (Hopper) on or off, where it exists. All other kernels on the
    stream must wait for their inputs, or be launched without dependent launch."""
    callables = {name: getattr(ops, name) for name in OPERATORS}
    told: dict[str, Any] = {
        name: partial(call, dependent_launch=on) for name, call in callables.items() if _takes(call, "dependent_launch")
    }
    return replace(ops, **told)


def _takes(call: Callable[..., Any], argument: str) -> bool:
    try:
        return argument in signature(call).parameters
    except ValueError:  # torch's own functions show no signature
        return False


def _unfit(implementation: Implementation, target: str, batch_invariant: bool) -> str | None:
    if target not in implementation.targets and "any" not in implementation.targets:
        return f"does not run on {target}"
    if batch_invariant and not implementation.batch_invariant:
        return "is not batch-invariant"
    return None


def _target(device: torch.device) -> str:
    """Return the registry's name of a device."""
    return compiled_as(target_of(device).name) if device.type == "cuda" else device.type
