"""Triton's interpreter without work that it repeats: it replaces the functions of ``triton.language`` by its own again
for every call of a device function, which takes longer than most of those calls.

Within a launch they are replaced already, and which functions of a module are to be replaced does not change. So a
launch replaces them once, and remembers their names. It also remembers NumPy's names of dtypes, and shapes with their
types, which the interpreter makes anew for every number. And it omits the check of integers for overflow, whose result
the interpreter drops unless it debugs. What runs is the same; ``--prove`` runs the interpreter as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
import threading
from typing import Any

TENSOR = ("super", "__init__", "handle", "is_block", "shape", "constexpr", "math", "prod", "numel", "type", "scalar",
          "dtype", "tuple")  # fmt: skip
BLOCK = ("element_ty", "isinstance", "list", "tuple", "_unwrap_shape", "shape", "TypeError", "validate_block_shape",
         "numel", "name")  # fmt: skip
"""Names in the constructors that are replaced: those of another Triton are left alone if they differ."""
NEEDED = ("GridExecutor", "_get_np_dtype", "_patch_attr", "_patch_builtin", "_patch_lang", "tl")


def install() -> bool:
    """Change the interpreter in this process, if it has been imported and has the functions that are changed."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if os.environ.get("TRITON_INTERPRET") != "1" or not all(hasattr(interpreter, name) for name in NEEDED):
        return False
    assert interpreter is not None
    if hasattr(interpreter, "replaced_by_tests"):
        return True
    if not hasattr(interpreter.tl.core, "_type_for_tuple_values"):
        return False
    patch_lang, call, tl = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter.tl
    names: dict[Any, list[str]] = {}
    launch_of = threading.local()
    """``replaced``: the modules that are replaced for this thread's launch, and what the interpreter returned for them;
    None where no launch runs."""

    def patch_builtin(package: Any, *how: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, *how)

    def patch_once(fn: Any) -> Any:
        replaced = getattr(launch_of, "replaced", None)
        if replaced is None:
            return patch_lang(fn)
        modules = [id(value) for value in fn.__globals__.values() if value is tl or value is tl.core]
        if modules and all(each in replaced for each in modules):
            return type(replaced[modules[0]])()  # nothing to put back
        scope = patch_lang(fn)
        replaced.update(dict.fromkeys(modules, scope))
        return scope

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = getattr(launch_of, "replaced", None)
        launch_of.replaced = {}
        try:
            return call(self, *args, **kwargs)
        finally:
            launch_of.replaced = before

    dtype_of, dtypes = interpreter._get_np_dtype, {}

    def numpy_dtype(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = dtype_of(dtype)
        return dtypes[dtype.name]

    type_of_values = tl.core._type_for_tuple_values
    types: dict[tuple[int, ...], Any] = {}

    def type_of_shape(values: Any, fields: Any = None) -> Any:
        if fields is not None or not all(isinstance(each, tl.constexpr) and type(each.value) is int for each in values):
            return type_of_values(values, fields)
        shape = tuple(each.value for each in values)
        if shape not in types:
            types[shape] = type_of_values(values)
        return types[shape]

    tl.core._type_for_tuple_values = type_of_shape
    interpreter._get_np_dtype = numpy_dtype
    remember_shapes(tl)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_once
    interpreter.GridExecutor.__call__ = launch
    interpreter.replaced_by_tests = True
    return True


def remember_shapes(tl: Any) -> None:
    """Let types of blocks, and their tensors, share what follows from the shape: nothing changes a shape in place.

    Plain numbers and blocks of one shape, which are nearly all, need no look at the other cases.
    """
    block_type, tensor = tl.core.block_type, tl.core.tensor
    make_block, make_tensor = block_type.__init__, tensor.__init__
    if make_block.__code__.co_names != BLOCK or make_tensor.__code__.co_names != TENSOR:
        return
    shapes: dict[tuple[int, ...], tuple[Any, int]] = {}
    scalar = tl.core.constexpr(1), tl.core.tuple([])

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([each.value if isinstance(each, tl.constexpr) else each for each in shape])
        if key not in shapes:
            make_block(self, element_ty, shape)
            self.shape.of_tensors = tl.core.constexpr(self.numel), tl.core.tuple([tl.constexpr(n) for n in self.shape])
            shapes[key] = self.shape, self.numel
            return
        self.element_ty = element_ty
        self.shape, self.numel = shapes[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not isinstance(type, block_type):
            self.numel, self.shape = scalar
        elif known := type.shape.__dict__.get("of_tensors"):
            self.numel, self.shape = known
        else:  # a type from before, such as a constant of a module
            make_tensor(self, handle, type)

    unwrap, constexpr = tl.core._unwrap_if_constexpr, tl.core.constexpr

    def unwrap_first(value: Any) -> Any:
        kind = type(value)
        return value if kind is int else value.value if kind is constexpr else unwrap(value)

    semantic = sys.modules["triton.language.semantic"].TritonSemantic
    broadcast = semantic.broadcast_impl_value

    def broadcast_unlike(self: Any, left: Any, right: Any) -> Any:
        alike = isinstance(left.type, block_type) and isinstance(right.type, block_type)
        return (left, right) if alike and left.type.shape is right.type.shape else broadcast(self, left, right)

    tl.core._unwrap_if_constexpr, semantic.broadcast_impl_value = unwrap_first, broadcast_unlike
    name = functools.cached_property(lambda self: f"<{self.shape}, {self.element_ty}>")
    name.__set_name__(block_type, "name")
    block_type.name, block_type.__init__, tensor.__init__ = name, init_block, init_tensor
