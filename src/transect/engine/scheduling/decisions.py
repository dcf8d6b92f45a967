"""Log the scheduler's decisions in every step, the reasons for waiting, and the times of events.

``DecisionLog`` accompanies the ``EngineCore`` and writes one small msgpack record for each event: a request added or
ended from outside, a step planned, a step done. The records go to a ring in memory (``DecisionRing``), and to a file
where one is asked for. They hold counts, times and positions, and no token: of prompts and answers they keep the hashes
of full KV blocks, by which the prefix cache finds them. So a log is enough to run the shipping scheduler again
(``explain/engine/replay.py``) and to split a request's time (``explain/engine/bill.py``), without any text.

A file is a sequence of records, each after its length (4 bytes, little endian). The first one is the ``Header``. A
file whose end is torn off can be read up to there.
"""

from __future__ import annotations

import itertools
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from .batch import ScheduledBatch, StepResult
from .request import Request, RequestState, Sequence
from .scheduler import Scheduler

FORMAT = 2
RING_BYTES = 16 * 2**20
"""Most bytes of records in memory: some ten thousand steps of a busy engine, far more of one that only decodes."""
FLUSH_S = 1.0
DIGEST_BYTES = 8
"""Leading bytes of a KV block's hash that are kept."""
_LENGTH = struct.Struct("<I")


class Header(msgspec.Struct, tag="h"):
    """Description of the engine. Floors are computed from ``model``, ``storage`` and ``device``, which are empty if
    unknown."""

    format: int
    scheduler: dict[str, Any]
    """The fields of ``SchedulerConfig``."""
    lag: int
    began: float
    """Start of the log on the engine's clock, in seconds."""
    model: dict[str, Any] = {}
    storage: dict[str, Any] = {}
    device: dict[str, Any] = {}


class Added(msgspec.Struct, tag="a", array_like=True):
    """A request joined the queue at ``at``. Its choices have the numbers ``first_seq``, ``first_seq + 1``, ..."""

    at: float
    request_id: str
    first_seq: int
    prompt_tokens: int
    n: int
    max_tokens: int | None
    priority: int
    arrival: float
    grammar: bool
    prompt_logprobs: bool
    """True if log-probabilities of the prompt are requested."""
    client: str = ""
    weight: float = 1.0
    pooling: str | None = None
    known: list[int] | None = None
    """Known tokens of each choice, -1 if it has ended; None for a request that did not begin elsewhere."""
    adapter: str = ""
    given: bool = False
    """See ``Request``."""
    prompt_logprobs_start: int = 0
    """See ``SamplingParams``."""


class Aborted(msgspec.Struct, tag="x", array_like=True):
    """A request, or one choice of it, was ended from outside: the client left, or a stop string was found."""

    at: float
    request_id: str
    choice: int | None
    ended: list[tuple[int, str, int, bytes]] = []
    """Choices that ended, see ``Done``."""


class Planned(msgspec.Struct, tag="s", array_like=True):
    """A step was planned (``step`` 0: nothing could run), from ``began`` to ``at``.

    ``rows`` has (sequence number, first position, tokens) for each row, as 32-bit integers; None for the rows of the
    step before, each advanced by one token.
    """

    step: int
    began: float
    at: float
    rows: bytes | None
    copies: int
    held_back: str
    """Reason that the head of the queue was not admitted: ``places`` (max_num_seqs are taken), ``kv`` (too few free
    blocks),
    ``budget`` (the step is full), ``batch`` (the static batch runs), ``flight`` (a step of it is in flight); empty if
    no request waits. If others were admitted before the head, ``places`` and ``kv`` refer to the next of them."""
    waiting: int
    running: int
    free_blocks: int


class Done(msgspec.Struct, tag="c", array_like=True):
    """The result of a step was known at ``at``; the engine had started waiting for it at ``waited``."""

    step: int
    waited: float
    at: float
    committed: float
    """Time at which its tokens were committed."""
    ended: list[tuple[int, str, int, bytes]] = []
    """(sequence number, reason, output tokens, hashes of its full blocks) of each choice that ended since the last
    record of this kind."""
    errors: list[tuple[int, bool]] = []
    """(sequence number, True if its KV is sound) of each failure."""
    learned: float = 0.0
    """Seconds of the step as learned by the scheduler; 0 if its steps are not sized by time."""
    jumps: list[tuple[int, int]] = []
    """(sequence number, tokens) of each jump over tokens that a grammar forces (``jump_ahead.py``)."""
    launched: str = ""
    """Way in which the step was launched: ``graph``, ``captured`` (a graph that had to be made) or ``eager`` (kernel by
    kernel); empty if there is only one way."""
    drawn: float = 0.0
    """Time at which the draws were launched, if they waited for masks of grammars; else 0."""
    ranks: float = 0.0
    """Seconds that the host spent on exchanging data between ranks since the last record, mostly waiting."""
    accepted: list[tuple[int, int]] = []
    """(sequence number, accepted drafts) of each row with drafts, which ``Planned.rows`` counts among its tokens."""


class Filled(msgspec.Struct, tag="f", array_like=True):
    """``StepBudget.fill_tokens`` was changed."""

    tokens: int | None


class CacheReset(msgspec.Struct, tag="r", array_like=True):
    """The prefix cache was emptied."""


class TakenBack(msgspec.Struct, tag="t", array_like=True):
    """A step raised ``reason``: all steps in flight are void, and their sequences wait to be recomputed."""

    at: float
    reason: str
    partly: bool
    """True if the tokens of a step were being committed, and some choices have theirs."""
    ended: list[tuple[int, str, int, bytes]] = []
    """Choices that this ended, and those that had ended since the last record; see ``Done``."""


Record = Header | Added | Aborted | Planned | Done | Filled | CacheReset | TakenBack
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[str, Any] = {
    "h": msgspec.msgpack.Decoder(Header),
    "": msgspec.msgpack.Decoder(Added | Aborted | Planned | Done | Filled | CacheReset | TakenBack),
}


class DecisionRing:
    """The newest records of an engine, up to a number of bytes; the header is always kept."""

    def __init__(self, limit: int = RING_BYTES) -> None:
        self.limit = limit
        self.header = b""
        self.lost = False
        """True if old records have been dropped."""
        self.touched = time.monotonic()
        """Time of the newest record, in seconds on the clock of this process."""
        self.count = 0
        """Number of chunks that were put, those that have been dropped included."""
        self.listeners: list[Callable[[], None]] = []
        """Callables without arguments that each ``put`` calls."""
        self._chunks: deque[bytes] = deque()
        self._size = 0

    def put(self, chunk: bytes) -> None:
        """Add one or several records, each preceded by its length. The first record of all is the header."""
        self.touched = time.monotonic()
        if not self.header:
            end = _LENGTH.size + _LENGTH.unpack_from(chunk)[0]
            self.header, chunk = chunk[:end], chunk[end:]
        self._chunks.append(chunk)
        self.count += 1
        self._size += len(chunk)
        while self._size > self.limit:
            self._size -= len(self._chunks.popleft())
            self.lost = True
        for listener in self.listeners:
            listener()

    def since(self, count: int, limit: int = RING_BYTES) -> bytes:
        """Return the newest chunks: those after the first ``count``, as far back as they are kept, and at most
        ``limit`` bytes of them."""
        found: list[bytes] = []
        for chunk in itertools.islice(reversed(self._chunks), max(0, self.count - count)):
            limit -= len(chunk)
            if limit < 0:
                break
            found.append(chunk)
        return b"".join(reversed(found))

    def newest(self, limit: int) -> tuple[bytes, bool]:
        """Return the header with at most ``limit`` bytes of the newest chunks, and True if that is the whole log."""
        found = self.since(0, limit)
        return self.header + found, not self.lost and len(found) == self._size

    def mentioning(self, name: bytes) -> bytes:
        """Return the chunks from the first one that has ``name`` in it; empty if none has."""
        chunks = list(self._chunks)
        first = next((number for number, chunk in enumerate(chunks) if name in chunk), len(chunks))
        return b"".join(chunks[first:])

    def records(self) -> list[Record]:
        """Return all kept records, oldest first."""
        return list(read_records(b"".join((self.header, *self._chunks))))

    def __bytes__(self) -> bytes:
        return b"".join((self.header, *self._chunks))


class DecisionLog:
    """Writes the records of one engine.

    Args:
        scheduler: whose decisions these are.
        header: description of the engine.
        sink: gets each record, preceded by its length; by default ``self.ring`` does.
        file: also written there, as steps are done, and at least every second.
        now: the clock of the times, in seconds; it has to be that of the scheduler.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        header: Header,
        *,
        sink: Callable[[bytes], None] | None = None,
        file: str | Path | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.ring = DecisionRing()
        self.now = now
        self.sink = sink or self.ring.put
        self.rank_seconds: Callable[[], float] | None = None
        """Seconds spent so far on communication between ranks; None for a single rank."""
        self._ranks = 0.0
        self._fill = scheduler.budget.fill_tokens
        self._file = None
        self._flushed = 0.0
        if file is not None:
            try:
                self._file = open(file, "wb")  # noqa: SIM115 (it lives as long as the engine)
            except OSError as error:
                raise ValueError(
                    f"the decision log {file} cannot be written ({error.strerror}): choose another file"
                ) from None
        scheduler.ended = []
        self.header = _framed(header)
        self._write(self.header)

    def added(self, request: Request) -> None:
        """Record that a request was queued."""
        self._put(added_record(self.scheduler.requests[request.request_id], self.now()))

    def aborted(self, request_id: str, choice: int | None) -> None:
        """Record that a request was aborted; the caller filters unknown ids."""
        self._put(Aborted(self.now(), request_id, choice, self._ended()))

    def cache_reset(self) -> None:
        """Record that the prefix cache was emptied."""
        self._put(CacheReset())

    def taken_back(self, reason: str, partly: bool) -> None:
        """Record that all steps in flight are void; arguments as in ``TakenBack``."""
        self.scheduler.jumps.last.clear()
        self._put(TakenBack(self.now(), reason, partly, self._ended()))

    def check_fill(self) -> None:
        """Record a change of ``fill_tokens`` before a step is planned."""
        if self.scheduler.budget.fill_tokens != self._fill:
            self._fill = self.scheduler.budget.fill_tokens
            self._put(Filled(self._fill))

    def planned(self, batch: ScheduledBatch | None, began: float) -> None:
        """Record that a step was planned, or could not be."""
        scheduler = self.scheduler
        rows: bytes | None = b""
        step = copies = 0
        if batch is not None:
            step, copies = batch.step, len(batch.block_copies)
            rows = None
            if not batch.again or scheduler.config.pipeline_depth > 1:
                rows = array("I", [n for r in batch.rows for n in (r.seq_id, r.start, r.num_tokens)]).tobytes()
        self._put(
            Planned(
                step,
                began,
                self.now(),
                rows,
                copies,
                scheduler.held_back,
                len(scheduler.waiting),
                len(scheduler.running),
                scheduler.cache.num_free,
            )
        )

    def done(
        self,
        batch: ScheduledBatch,
        result: StepResult,
        waited: float,
        at: float,
        learned: float,
        launched: str = "",
        drawn: float = 0.0,
    ) -> None:
        """Record that a step's result was committed; other arguments as in ``Done``."""
        errors = [(seq_id, seq_id in result.sound) for seq_id in result.errors] if result.errors else []
        jumps = self.scheduler.jumps.last
        ranks = 0.0
        if self.rank_seconds is not None:
            spent = self.rank_seconds()
            ranks, self._ranks = spent - self._ranks, spent
        ended, now = self._ended(), self.now()
        speculation = self.scheduler.speculation
        accepted = [] if speculation is None else list(speculation.last)
        self._put(
            Done(batch.step, waited, at, now, ended, errors, learned, list(jumps), launched, drawn, ranks, accepted)
        )
        jumps.clear()
        if accepted and speculation is not None:
            speculation.last.clear()

    def close(self) -> None:
        """Record the choices that have not ended, and close the file."""
        if self._file is not None and not self._file.closed:
            live = [s for state in self.scheduler.requests.values() for s in state.choices if s.finish_reason is None]
            ended = [*self._ended(), *(_ending(seq, "") for seq in live)]
            now = self.now()
            self._put(Done(0, now, now, now, ended))
            self._file.close()

    def _ended(self) -> list[tuple[int, str, int, bytes]]:
        ended = self.scheduler.ended
        if not ended:
            return []
        found = [_ending(seq, seq.finish_reason or "") for seq in ended]
        ended.clear()
        return found

    def _put(self, record: Record) -> None:
        self._write(_framed(record))

    def _write(self, framed: bytes) -> None:
        self.sink(framed)
        if self._file is not None and not self._file.closed:
            self._file.write(framed)
            now = time.monotonic()
            if now - self._flushed > FLUSH_S:
                self._flushed = now
                self._file.flush()


def added_record(state: RequestState, at: float) -> Added:
    """Build the record of a request that joined the queue at ``at``."""
    request = state.spec
    params, given = request.params, request.output_token_ids
    return Added(
        at,
        request.request_id,
        state.leader.seq_id,
        len(request.prompt_token_ids),
        params.n,
        params.max_tokens,
        request.priority,
        state.arrival,
        request.constraint is not None,
        params.prompt_logprobs is not None,
        request.client,
        request.weight,
        request.pooling,
        None if given is None else [-1 if tokens is None else len(tokens) for tokens in given],
        request.adapter,
        request.given,
        params.prompt_logprobs_start,
    )


def _ending(seq: Sequence, reason: str) -> tuple[int, str, int, bytes]:
    hashes = b"".join(each[:DIGEST_BYTES] for each in seq.block_hashes)
    return seq.seq_id, reason, len(seq.output_token_ids), hashes


def _framed(record: Record) -> bytes:
    body = _encoder.encode(record)
    return _LENGTH.pack(len(body)) + body


def read_events(data: bytes) -> Iterator[Record]:
    """Yield the records of complete chunks that follow a header (``DecisionRing.since``)."""
    decode, at = _decoders[""].decode, 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        yield decode(data[at : at + length])
        at += length


def read_records(data: bytes) -> Iterator[Record]:
    """Yield the records in ``data``, up to the last complete one.

    Raises:
        ValueError: this is not a decision log, or one of another version.
    """
    at = 0
    first = True
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        body = data[at + _LENGTH.size : at + _LENGTH.size + length]
        if len(body) < length:
            break
        try:
            record = _decoders["h" if first else ""].decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            what = "this is not a decision log" if first else "the decision log is damaged"
            raise ValueError(f"{what} (byte {at}: {error}): give a file that --decision-log wrote") from None
        if first and record.format != FORMAT:
            raise ValueError(
                f"the decision log has format {record.format}, this version reads {FORMAT}: record a new log"
            )
        first = False
        yield record
        at += _LENGTH.size + length
    if first:
        raise ValueError("this is not a decision log (it has no header): give a file that --decision-log wrote")
