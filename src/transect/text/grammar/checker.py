"""Trial compilation of grammars in a separate process.

A grammar from a request can keep the compiler busy for minutes and take gigabytes; a separate process can be ended, and
no other request waits for it.

``Checker`` is the near side. EBNF is translated here too. The far side is ``python -m transect.text.grammar.checker``:
it reads a vocabulary, then grammars, and answers each with what is wrong with it. It also
draws some tokens under a grammar, because slow masks would delay the steps of all requests.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import msgspec

from ...hardware.cores import niceness
from .complaints import explain
from .sources import from_ebnf
from .vocabulary import Vocabulary

TRIAL_TOKENS = 48
SLOWEST_MASK_S = 0.1
PATIENCE_S = 30.0
"""Seconds for the process to start and read the vocabulary."""
POLL_S = 0.02
BUSY = 6
"""Largest ratio of wall time to CPU time of compiling."""
NICENESS = 10
"""Niceness of the process on cores of the engine: it then has a tenth of a busy core."""
LENGTH_BYTES = 8
HEAP_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
)  # fmt: skip
_CHECK, _TRANSLATE, _RIGHT, _WRONG = b"c", b"t", b"+", b"-"
"""First bytes of messages and answers."""


def limits() -> Any:
    """Return the limits on a grammar: symbols, states and time, in llguidance's units."""
    import llguidance

    return llguidance.LLParserLimits(
        max_grammar_size=100_000,
        step_max_items=20_000,
        max_items_in_row=2000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


def compile_matcher(tokenizer: Any, grammar: str) -> Any:
    """Compile llguidance's matcher for a grammar.

    Raises:
        ValueError: the grammar cannot be compiled; see ``explain``.
    """
    import llguidance

    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if matcher.is_error():
        raise ValueError(explain(matcher.get_error()))
    return matcher


class Busy(ValueError):
    """The machine was busy with other work, so the check of a grammar was inconclusive."""


class Checker:
    """A checking process, started when it is first needed; for one thread.

    Args:
        seconds: of processor time that compiling may take, and a sixth of what it may take on a machine that is busy
            with other things.
        nbytes: of memory that it may take beyond what the process has anyway.
    """

    def __init__(self, vocabulary: Vocabulary, *, seconds: float = 1.25, nbytes: int = 512 * 2**20) -> None:
        self._vocabulary = vocabulary
        self._seconds, self._nbytes = seconds, nbytes
        self._process: subprocess.Popen[bytes] | None = None
        self._resting = 0
        self.spent = 0.0
        """Processor seconds of the last check."""
        self.nbytes = 0
        """Bytes of the compiled form of the last valid grammar; 0 if the system does not report them."""

    def start(self) -> None:
        """Start the process and wait until it is ready, unless it runs already."""
        self._started()

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def growth(self) -> int:
        """Bytes by which the process has grown since it started."""
        process = self._process
        return 0 if process is None else max(0, _memory(process.pid) - self._resting)

    def check(self, grammar: str) -> str | None:
        """Return the error of a grammar, or None if it is valid.

        Raises:
            Busy: the check took too long to decide.
        """
        try:
            self.nbytes = int(self._ask(_CHECK, grammar))
        except Busy:
            raise
        except ValueError as error:
            return str(error)
        return None

    def translate(self, grammar: str) -> str:
        """Translate EBNF to Lark.

        Raises:
            ValueError: the grammar is invalid; the message gives the reason.
        """
        return self._ask(_TRANSLATE, grammar)

    def _ask(self, what: bytes, grammar: str) -> str:
        process = self._started()
        try:
            _write(process.stdin, what + grammar.encode())
            answer = self._answer(process)
        except (OSError, EOFError):
            self.close()
            raise ValueError("compiling it ended the compiler: make it simpler") from None
        if answer.startswith(_WRONG):
            raise ValueError(answer[1:].decode())
        return answer[1:].decode()

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        process = subprocess.Popen(
            [sys.executable, "-m", "transect.text.grammar.checker", str(niceness(NICENESS))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        self._process = process
        words = self._vocabulary
        _write(process.stdin, msgspec.msgpack.encode((words.tokens, words.special_ids, words.eos_ids, words.size)))
        if not _readable(process, PATIENCE_S):
            self.close()
            raise RuntimeError(f"the process that checks grammars did not start within {PATIENCE_S:.0f} s")
        _read(process.stdout)
        self._resting = _memory(process.pid)
        return process

    def _answer(self, process: subprocess.Popen[bytes]) -> bytes:
        latest, before = time.monotonic() + BUSY * self._seconds, _processor_seconds(process.pid)
        while not _readable(process, POLL_S):
            self.spent = _processor_seconds(process.pid) - before
            if self.spent > self._seconds:
                self.close()
                raise ValueError(f"compiling it takes longer than {self._seconds:g} s: make it simpler")
            if time.monotonic() > latest:
                self.close()
                raise Busy("the machine is too busy to compile it now: send the request again")
            if _memory(process.pid) > self._resting + self._nbytes:
                self.close()
                raise ValueError(f"compiling it takes more than {self._nbytes >> 20} MiB: make it simpler")
        self.spent = max(0.0, _processor_seconds(process.pid) - before)
        return _read(process.stdout)


def _readable(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with selectors.DefaultSelector() as selector:
        assert process.stdout is not None
        selector.register(process.stdout.fileno(), selectors.EVENT_READ)
        return bool(selector.select(seconds))


def _memory(pid: int) -> int:
    """Return the resident bytes of a process; 0 if the system does not report them."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class _HeapInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in HEAP_FIELDS]


def heap_bytes() -> int:
    """Return the bytes that this process has allocated in glibc's heap; 0 with another C library."""
    try:
        info = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return 0
    info.restype = _HeapInfo
    found = info()
    return int(found.uordblks + found.hblkhd)


def _processor_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used; 0 if the system does not report them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def _write(pipe: IO[bytes] | None, data: bytes) -> None:
    assert pipe is not None
    pipe.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    pipe.flush()


def _read(pipe: IO[bytes] | None) -> bytes:
    assert pipe is not None
    head = pipe.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        raise EOFError
    return pipe.read(int.from_bytes(head, "little"))


def trial(matcher: Any, words: int) -> str | None:
    """Draw random tokens; returns an error if a mask takes too much CPU time or cannot be made."""
    import random

    import numpy as np

    mask = np.zeros(words, np.int32)
    chance = random.Random(0)
    for _ in range(TRIAL_TOKENS):
        began = time.thread_time()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            return explain(matcher.get_error())
        if time.thread_time() - began > SLOWEST_MASK_S:
            return "it takes too long to see which tokens may come next: make it simpler"
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if matcher.is_stopped() or not len(allowed):
            break
        matcher.consume_token(int(allowed[chance.randrange(len(allowed))]))
    return None


def _tried(tokenizer: Any, grammar: str, words: int) -> tuple[str | None, int]:
    """Compile a grammar and draw from it. Returns the problem and the bytes that its compiled form takes."""
    before = heap_bytes()
    matcher = compile_matcher(tokenizer, grammar)
    return trial(matcher, words), max(0, heap_bytes() - before)


def _end_with(parent: int) -> None:
    """Exit when the parent has ended: a busy compiler does not notice that the pipe is closed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def main() -> None:
    """Run the checking process until the pipe closes."""
    os.nice(int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    tokens, special, eos, size = msgspec.msgpack.decode(
        _read(stdin), type=tuple[list[bytes], list[int], list[int], int]
    )
    tokenizer = Vocabulary(tokens, special, eos, size).make()
    import numpy  # noqa: F401  (the first grammar's trial would pay for it)

    _write(stdout, b"")
    with contextlib.suppress(EOFError):
        while True:
            message = _read(stdin)
            grammar = message[1:].decode()
            try:
                if message.startswith(_TRANSLATE):
                    _write(stdout, _RIGHT + from_ebnf(grammar).encode())
                    continue
                problem, nbytes = _tried(tokenizer, grammar, -(-len(tokens) // 32))
                _write(stdout, _RIGHT + str(nbytes).encode() if problem is None else _WRONG + problem.encode())
            except ValueError as error:
                _write(stdout, _WRONG + (str(error) or "it cannot be compiled").encode())


if __name__ == "__main__":
    main()
