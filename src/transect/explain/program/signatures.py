"""Reads PyTorch's schema of an operator in a trace: the inputs that it writes, whether it returns a view, and whether
other operators do its work on a CPU.

A trace has a name and the types of the inputs, which determine the overload. Another version of PyTorch may have
recorded the trace: if no overload fits, there are no facts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

COMPOSITE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
"""Dispatch keys of kernels for all devices: they call other operators."""


@dataclass(frozen=True, slots=True)
class Signature:
    """An overload of an operator. ``updated``: indices of the inputs that it reads and writes; ``outputs``: of those
    that it only writes (``out=``)."""

    updated: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    view: bool = False
    """True if the output is a view of an input."""
    composite: bool = False
    """True if other operators do its work on a CPU."""


@functools.cache
def signature(name: str, types: tuple[str, ...]) -> Signature:
    """Return the signature of the first overload that takes inputs of these types, as recorded in a trace; an empty one
    if there is none."""
    for schema in torch._C._jit_get_schemas_for_operator(name) if name.startswith("aten::") else ():
        arguments = [str(each.type) for each in schema.arguments]
        if len(arguments) == len(types) and all(map(_fits, arguments, types)):
            return _signature(schema)
    return Signature()


def _fits(argument: str, recorded: str) -> bool:
    """Return True if an argument of a type can have been recorded like this; None is recorded without a type."""
    tensor, many = "Tensor" in argument, "List[" in argument
    if recorded == "TensorList":
        return tensor and many
    if recorded in ("ScalarList", "GenericList"):
        return many and not tensor
    return not recorded or (not many and tensor == (recorded != "Scalar"))


def _signature(schema: Any) -> Signature:
    written = [place for place, each in enumerate(schema.arguments) if each.alias_info and each.alias_info.is_write]
    outputs = tuple(place for place in written if schema.arguments[place].is_out)
    aliases = [each.alias_info for each in schema.returns]
    view = bool(aliases) and all(each is not None and not each.is_write for each in aliases)
    full = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    try:
        has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, full)
        composite = not has("CPU") and any(has(key) for key in COMPOSITE)
    except RuntimeError:  # an operator of scripts alone
        composite = False
    return Signature(tuple(place for place in written if place not in outputs), outputs, view, composite)
