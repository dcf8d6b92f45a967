"""Environment variables: those with names of their own, and a warning for any ``TRANSECT_...`` that is not known.

All others are named after an option: ``TRANSECT_SERVE_PORT`` is ``transect serve --port``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

PREFIX = "TRANSECT"

VARIABLES = {
    "TRANSECT_ADMIN_API_KEY": "The operator's key of a server: the one that `transect serve` demands, and the one that "
    "`transect flow` sends.",
    "TRANSECT_API_KEY": "The key of a server: the one that `transect serve` demands (several with blanks between), and "
    "the one that `transect top` and `transect explain` send.",
    "TRANSECT_CACHE": "The folder for fetched models, compiled kernels, tuned choices and measured ceilings. Default: "
    "`transect` in `$XDG_CACHE_HOME` or in `~/.cache`.",
    "TRANSECT_CXXFLAGS": "Further flags for the compiler of the C++ kernels, after our own.",
    "TRANSECT_DEBUG": "If set, a command that fails shows a traceback.",
}
"""Variables that belong to no single option, with their meanings."""

_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP|SCTP).*)?$")
"""Pattern of variables that Kubernetes sets in every pod if a service is called `transect`."""


def unknown_variables(
    environment: Mapping[str, str], context: Any, commands: Collection[str]
) -> Iterator[tuple[str, str | None]]:
    """Find variables that no option reads, each with the nearest known name (None if none is near).

    Args:
        environment: as ``os.environ``.
        context: the click context of the command that runs; its options are known.
        commands: names of all commands; variables of the other ones are not looked at.
    """
    prefix = context.auto_envvar_prefix
    known = {*VARIABLES, *(f"{prefix}_{str(param.name).upper()}" for param in context.command.params)}
    others = [f"{PREFIX}_{name.upper()}_" for name in commands]
    for name, value in environment.items():
        if not name.startswith(f"{PREFIX}_") or name in known or name.startswith(f"{PREFIX}_TEST_"):
            continue
        if not name.startswith(f"{prefix}_") and name.startswith(tuple(others)):
            continue
        if _OF_KUBERNETES.search(name) and (value.startswith(("tcp://", "udp://", "sctp://")) or "_SERVICE_" in name):
            continue
        yield name, next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.8)), None)


def warning(name: str, near: str | None) -> str:
    """Return the warning that a variable is ignored."""
    hint = f" (did you mean {near}?)" if near else ""
    return f"transect: the environment variable {name} is not known{hint}: it is ignored"
