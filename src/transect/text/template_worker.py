"""Chat templates rendered in another process, which can be ended: a template is a program from a file.

``TemplateWorker`` is the process as its owner sees it: one rendering at a time, of the template given last. The process
ends itself when a rendering takes too long (an alarm that no Python code handles), is refused memory beyond a bound,
and ends with its standard input, so that it never outlives its owner by more than one rendering.
"""

from __future__ import annotations

import contextlib
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

from .chat_template import ChatTemplate

TIME_LIMIT_S = 5.0
MEMORY_LIMIT_BYTES = 1 << 30
"""Beyond what the process has when it starts."""
BACKSTOP_S = 5.0
"""A process that has not even ended itself is killed this much later."""
_LENGTH_BYTES = 8


class TemplateWorker:
    """A process that renders; started by the first rendering, or by ``start``. For one thread at a time.

    Args:
        time_limit_s: seconds that one rendering may take.
        memory_limit_bytes: what one rendering may allocate.
    """

    def __init__(self, time_limit_s: float = TIME_LIMIT_S, memory_limit_bytes: int = MEMORY_LIMIT_BYTES) -> None:
        self._time_limit_s, self._memory_limit_bytes = time_limit_s, memory_limit_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._template: ChatTemplate | None = None
        self._end: weakref.finalize[..., TemplateWorker] | None = None

    @property
    def pid(self) -> int | None:
        """Process id, if there is a process."""
        return None if self._process is None else self._process.pid

    def start(self, template: ChatTemplate) -> None:
        """Start the process, or give it another template. Does not wait for it."""
        if self._process is None:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "transect.text.template_worker"),
                    *(str(self._time_limit_s), str(self._memory_limit_bytes)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,  # Ctrl-C in a terminal is the owner's business
            )
            self._end = weakref.finalize(self, _end, self._process)
            self._template = None
        if self._template is not template:
            self._send(template)
            self._template = template

    def render(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """See ``ChatTemplate.render``.

        Raises:
            ValueError: as ``ChatTemplate.render``; or the template took too much time or memory.
        """
        try:
            self.start(template)
            self._send((messages, add_generation_prompt, dict(kwargs or {})))
            reply = self._receive()
        except (OSError, EOFError):
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
        """End the process, whatever it is doing. Another thread may call this: a rendering then raises."""
        end, self._process, self._template = self._end, None, None
        if end is not None:
            end()

    def _send(self, message: object) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise EOFError
        _write(process.stdin, pickle.dumps(message))

    def _receive(self) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdout is None:
            raise EOFError
        backstop = threading.Timer(self._time_limit_s + BACKSTOP_S, process.kill)
        backstop.daemon = True
        backstop.start()
        try:
            return msgspec.msgpack.decode(_read(process.stdout), type=dict[str, Any])
        finally:
            backstop.cancel()


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
    """Entry point of the process: a template or the arguments of a rendering on the input, results on the output."""
    time_limit_s, memory_limit_bytes = float(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + memory_limit_bytes,) * 2)
    template: ChatTemplate | None = None
    while True:
        try:
            message = pickle.loads(_read(sys.stdin.buffer))
        except EOFError:
            return
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
