"""Triton's interpreter without work that it repeats: it replaces the functions of ``triton.language`` by its own again
for every call of a device function, which takes longer than most of those calls.

Within a launch they are replaced already, and which functions of a module are to be replaced does not change. So a
launch replaces them once, and remembers their names. It also remembers NumPy's names of dtypes, and the types of
shapes, which the interpreter makes anew for every number. What runs is the same; ``--prove`` runs the interpreter as it
is.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from typing import Any

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
    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_once
    interpreter.GridExecutor.__call__ = launch
    interpreter.replaced_by_tests = True
    return True
