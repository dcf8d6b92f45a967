"""Namespaces without network for programs of strangers: nothing can be written, and home folders are empty.

``unshare`` (util-linux) makes the namespaces, ``python -m transect.learn.grade.sandbox`` in them closes the file system
and gives up all capabilities, then runs the command. A kernel that does not let users make namespaces has no sandbox,
and such programs are refused there.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY = 442, -100, 0x8000, 1
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, LAST_CAPABILITY = 24, 38, 63
UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--mount-proc", "--mount",
           "--kill-child")  # fmt: skip
MEMORY_BYTES = 16 << 30
FILE_BYTES = 64 << 20


@cache
def refusal() -> str:
    """Say why this machine has no sandbox; empty if it has one."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return "programs of strangers run in a sandbox alone, and this needs Linux with `unshare` (util-linux)"
    done = subprocess.run(_command(["true"]), capture_output=True, text=True, env={**os.environ, **_sources()})
    if done.returncode == 0:
        return ""
    words = done.stderr.strip().splitlines()
    return (
        "programs of strangers run in a sandbox alone, and this system does not let users make one "
        f"({words[-1] if words else 'unshare failed'}); allow user namespaces, or grade on another machine"
    )


def wrapped(command: Sequence[str]) -> list[str]:
    """Wrap a command to run in a sandbox.

    Raises:
        ValueError: there is none here.
    """
    if reason := refusal():
        raise ValueError(reason)
    return _command(command)


def _command(command: Sequence[str]) -> list[str]:
    return [*UNSHARE, sys.executable, "-m", "transect.learn.grade.sandbox", *command]


def _sources() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}


def needed() -> list[str]:
    """List the folders that Python and this package need, which may lie in a home folder."""
    found = {sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)}
    return sorted(each for each in found if os.path.isdir(each))


def close_files() -> None:
    """Make every file read-only, and home folders and /tmp empty; for this process and its children."""
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        text = [None if each is None else each.encode() for each in (source, target, kind, data)]
        if libc.mount(text[0], text[1], text[2], flags, text[3]):
            raise OSError(ctypes.get_errno(), f"cannot mount {target}")

    mount("none", "/", None, MS_REC | MS_PRIVATE)
    hidden = [place for place in dict.fromkeys((str(Path.home()), "/home", "/root", "/tmp")) if os.path.isdir(place)]
    kept = [(place, os.open(place, os.O_PATH)) for place in needed() if _within(place, hidden)]
    for place in hidden:
        if os.path.isdir(place):
            mount("tmpfs", place, "tmpfs", 0, "size=256m")
    for place, descriptor in kept:
        os.makedirs(place, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", place, None, MS_BIND | MS_REC)
    attributes = (ctypes.c_uint64 * 4)(ATTR_RDONLY, 0, 0, 0)
    if libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(attributes), 32):
        raise OSError(ctypes.get_errno(), "cannot make files read-only")
    mount("tmpfs", "/tmp", "tmpfs", 0, "size=256m")
    for place, descriptor in kept:
        if _within(place, ["/tmp"]):
            os.makedirs(place, exist_ok=True)
            mount(f"/proc/self/fd/{descriptor}", place, None, MS_BIND | MS_REC)
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(ctypes.byref(header), ctypes.byref(none)):
        raise OSError(ctypes.get_errno(), "cannot give up capabilities")


def _within(place: str, folders: Sequence[str]) -> bool:
    return any(place == folder or place.startswith(f"{folder}/") for folder in folders)


def main(command: Sequence[str]) -> None:
    """Close the file system and run a command in this process."""
    close_files()
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir("/tmp")
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    main(sys.argv[1:])
