"""A process that has torch and Triton loaded, and forks one child for each program that is graded.

``python -m transect.learn.grade.zygote FD`` serves requests on an inherited socket. A request "run" comes with two file
descriptors: the child's connection to the grader, and where it prints. "kill" ends a child that takes too long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

import numpy
import torch
import torch._dynamo  # the first function mode loads it, for a second

from .session import serve_forked


def main(descriptor: int) -> None:
    """Serve until the grader hangs up."""
    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):
        import triton.language
        import triton.runtime.interpreter  # noqa: F401
    numpy.seterr(all="ignore")
    control = socket.socket(fileno=descriptor)
    children: set[int] = set()
    control.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 64, 2)
        if not message:
            break
        if message == b"run":
            child = os.fork()
            if child == 0:
                control.close()
                serve_forked(socket.socket(fileno=descriptors[0]), descriptors[1])
            children.add(child)
            control.send(str(child).encode())
        else:
            asked = int(message.split()[1])
            if asked in children:  # else it has ended, and another process may have its number
                _kill(asked)
                children.discard(asked)
            control.send(b"killed")
        for each in descriptors:
            os.close(each)
        for child in list(children):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(child, os.WNOHANG)[0]:
                    children.discard(child)
    for child in children:
        _kill(child)


def _kill(child: int) -> None:
    """End a child and all that it has started."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
