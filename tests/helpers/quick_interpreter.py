"""Triton's interpreter without work that it repeats: it replaces the functions of ``triton.language`` by its own again
for every call of a device function, which takes longer than most of those calls.

Within a launch they are replaced already, and which functions of a module are to be replaced does not change. So a
launch replaces them once, and remembers their names. What runs is the same; ``--prove`` runs the interpreter as it is.
"""

from __future__ import annotations

import inspect
import sys
import threading
from typing import Any

NEEDED = ("GridExecutor", "_patch_attr", "_patch_builtin", "_patch_lang", "tl")


def install() -> bool:
    """Change the interpreter in this process, if it has been imported and has the functions that are changed."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or not all(hasattr(interpreter, name) for name in NEEDED):
        return False
    if hasattr(interpreter, "replaced_by_tests"):
        return True
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

    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_once
    interpreter.GridExecutor.__call__ = launch
    interpreter.replaced_by_tests = True
    return True
