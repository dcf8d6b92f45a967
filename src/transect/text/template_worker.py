"""Rendering of chat templates in another process, which can be killed: a template is a program from a file.

``TemplateWorker`` is the process as its owner sees it: one rendering at a time, of the template given last.
``TemplateApart`` is a template with such a process, for callers that render and wait. The process ends itself when a
rendering takes too long (an alarm that no Python code handles), is refused memory beyond a bound, and ends with its
standard input, so that it never outlives its owner by more than one rendering.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any

import msgspec

from ..hardware.cores import niceness
from .chat_template import ChatTemplate

TIME_LIMIT_S = 5.0
MEMORY_LIMIT_BYTES = 1 << 30
"""Most bytes beyond the memory that the process has when it starts."""
BACKSTOP_S = 5.0
"""Seconds after which a process that has not ended itself is killed."""
NICENESS = 5
"""Niceness of the process on cores of an engine, which waits in every operator for each of its threads: a quarter of a
busy core."""
_LENGTH_BYTES = 8
_NOT_PLAIN = "messages and variables of a chat template must be plain values (strings, numbers, lists, mappings): {}"


class TemplateWorker:
    """A process that renders; started by the first rendering, or by ``start``. Threads take turns.

    Args:
        time_limit_s: seconds that one rendering may take.
        memory_limit_bytes: most bytes that one rendering may allocate.
    """

    def __init__(self, time_limit_s: float = TIME_LIMIT_S, memory_limit_bytes: int = MEMORY_LIMIT_BYTES) -> None:
        self._time_limit_s, self._memory_limit_bytes = time_limit_s, memory_limit_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._template: ChatTemplate | None = None
        self._end: weakref.finalize[..., TemplateWorker] | None = None
        self._ready = False
        self._turn = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Process id, if there is a process."""
        return None if self._process is None else self._process.pid

    def start(self, template: ChatTemplate) -> None:
        """Start the process, or give it another template. Does not wait for it."""
        with self._turn:
            self._start(template)

    def _start(self, template: ChatTemplate) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "transect.text.template_worker"),
                    *(str(self._time_limit_s), str(self._memory_limit_bytes), str(niceness(NICENESS))),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,  # Ctrl-C in a terminal is the owner's business
            )
            self._end = weakref.finalize(self, _end, self._process)
            self._template, self._ready = None, False
        if self._template is not template:
            self._send(pickle.dumps(template))
            self._template = template

    def render(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages like ``ChatTemplate.render``.

        Raises:
            ValueError: as ``ChatTemplate.render``; or the template took too much time or memory, or a value cannot be
                sent to another process.
        """
        try:
            asked = pickle.dumps((messages, add_generation_prompt, dict(kwargs or {})))
        except Exception as error:  # an object can raise anything when it is pickled
            raise ValueError(_NOT_PLAIN.format(error)) from None
        with self._turn:
            try:
                self._start(template)
                self._send(asked)
                reply = self._receive()
            except (OSError, EOFError, ValueError):  # of a pipe that ``close`` has closed
                self.close()
                raise ValueError(
                    "the chat template asks for too much: it was ended after "
                    f"{self._time_limit_s:g} s, or for want of memory; correct the template, or shorten the messages"
                ) from None
            except BaseException:
                self.close()
                raise
        if "error" in reply:
            raise ValueError(reply["error"])
        text: str = reply["text"]
        return text

    def close(self) -> None:
        """End the process, even a busy one. Another thread may call this: a rendering then raises."""
        end, self._process, self._template = self._end, None, None
        if end is not None:
            end()

    def _send(self, message: bytes) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise EOFError
        _write(process.stdin, message)

    def _receive(self) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdout is None:
            raise EOFError
        if not self._ready:
            _read(process.stdout)  # how long a process takes to start says nothing about a template
            self._ready = True
        backstop = threading.Timer(self._time_limit_s + BACKSTOP_S, process.kill)
        backstop.daemon = True
        backstop.start()
        try:
            return msgspec.msgpack.decode(_read(process.stdout), type=dict[str, Any])
        finally:
            backstop.cancel()


class TemplateApart:
    """A chat template that renders in a process of its own, which the first rendering starts. For any thread.

    Args:
        template: template to render.
        worker: shared with other templates; None makes one.
    """

    def __init__(self, template: ChatTemplate, worker: TemplateWorker | None = None) -> None:
        self._template = template
        self._worker = worker or TemplateWorker()

    def __reduce__(self) -> tuple[type[TemplateApart], tuple[ChatTemplate]]:
        """Pickle the template alone: a copy starts its own process."""
        return TemplateApart, (self._template,)

    @property
    def source(self) -> str:
        """Jinja text of the template."""
        return self._template.source

    @property
    def variables(self) -> frozenset[str]:
        """Names that the template takes from its caller."""
        return self._template.variables

    @property
    def tool_source(self) -> str:
        """Jinja text for conversations with tools, see ``ChatTemplate.tool_source``."""
        return self._template.tool_source

    def with_source(self, source: str) -> TemplateApart:
        """Return a template with another source, see ``ChatTemplate.with_source``."""
        return TemplateApart(self._template.with_source(source), self._worker)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """Render messages, see ``TemplateWorker.render``."""
        return self._worker.render(self._template, messages, add_generation_prompt, kwargs)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    head = pipe.read(_LENGTH_BYTES)
    data = pipe.read(int.from_bytes(head, "little")) if len(head) == _LENGTH_BYTES else b""
    if not data:
        raise EOFError
    return data


def main() -> None:
    """Run the process: read templates or arguments of renderings from the input, write results to the output."""
    time_limit_s, memory_limit_bytes = float(sys.argv[1]), int(sys.argv[2])
    os.nice(int(sys.argv[3]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + memory_limit_bytes,) * 2)
    template: ChatTemplate | None = None
    _write(sys.stdout.buffer, b"ready")
    while True:
        try:
            received = _read(sys.stdin.buffer)
        except EOFError:
            return
        try:
            message = pickle.loads(received)
        except (AttributeError, ImportError) as error:  # of a class that is not to be found here
            _write(sys.stdout.buffer, msgspec.msgpack.encode({"error": _NOT_PLAIN.format(error)}))
            continue
        if isinstance(message, ChatTemplate):
            template = message
            continue
        assert template is not None
        messages, add_generation_prompt, kwargs = message
        signal.setitimer(signal.ITIMER_REAL, time_limit_s)  # SIGALRM's default is the end, in the middle of anything
        try:
            reply = {"text": template.render(messages, add_generation_prompt, **kwargs)}
        except ValueError as error:
            reply = {"error": str(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(sys.stdout.buffer, msgspec.msgpack.encode(reply))


if __name__ == "__main__":
    main()
