"""The thread that writes captures. Requests never wait for it: its queue is bounded, and what finds no room is dropped.

A full disk, or any other error of the file system, stops the capture: records are dropped and counted until a try every
``RETRY_S`` succeeds. Nothing else of the server notices.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ...flow.watch import captures
from .redaction import Redaction, SlowRule
from .slips import CaptureSlip

log = logging.getLogger("transect.server")

MOST_WAITING, MOST_WAITING_BYTES = 1024, 64 * 2**20
BATCH = 32
"""Records of one write."""
RETRY_S = 30.0
EXPIRE_S = 60.0
"""Seconds between checks of the age when nothing is written."""
MOST_KNOWN = 65536
"""Captured answers, newest first, for which feedback is taken."""
MOST_FEEDBACK = 16
"""Feedback on one answer."""
CLOSE_S = 5.0


@dataclass(slots=True)
class Known:
    """A captured answer, for feedback on it."""

    client: str
    user: str
    model: str
    release: str
    choices: int
    feedback: int = 0


class RecorderJob:
    """Work for the recorder's thread besides slips. ``done`` is called there with the result or the error."""

    def __init__(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], object]) -> None:
        self.work, self.done = work, done


class Recorder:
    """Writes slips to files, and knows which answers are captured.

    Args:
        files: where to.
        redaction: rules for all texts.
        decode: returns the text of token ids.
        dropped: called with the reason and the number of records that are not kept.
        written: called with the number of records that were written.
    """

    def __init__(
        self,
        files: captures.CaptureFiles,
        redaction: Redaction,
        decode: Callable[[list[int]], str],
        dropped: Callable[[str, int], None],
        written: Callable[[int], None],
    ) -> None:
        self.files, self._redaction, self._decode = files, redaction, decode
        self._dropped, self._written = dropped, written
        self.problem = ""
        """Reason for which nothing is captured now; empty while all is well."""
        self._retry_at = 0.0
        self._broken = False
        self._queue: queue.Queue[CaptureSlip | RecorderJob | None] = queue.Queue(MOST_WAITING)
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._read_to: dict[tuple[int, str], int] = {}
        self._deleted: OrderedDict[tuple[str, str], float] = OrderedDict()
        """Times of deletions, by user and client; the client is empty if records of all clients were deleted."""
        self._thread = threading.Thread(target=self._run, name="transect-captures", daemon=True)
        self._thread.start()

    def put(self, item: CaptureSlip | RecorderJob) -> bool:
        """Hand work to the thread. Returns False, without waiting, if the queue is full; a slip is dropped then."""
        size = item.size if isinstance(item, CaptureSlip) else 0
        with self._lock:
            fits = self._waiting_bytes + size <= MOST_WAITING_BYTES
            if fits:
                try:
                    self._queue.put_nowait(item)
                    self._waiting_bytes += size
                except queue.Full:
                    fits = False
        if not fits and isinstance(item, CaptureSlip):
            self._dropped("queue", 1)
        return fits

    def close(self) -> None:
        """Write everything that waits, and end the thread; gives up after ``CLOSE_S``."""
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def find(self, answer: str) -> Known | None:
        """Return a captured answer; in the thread only."""
        self._refresh()
        return self._known.get(answer)

    def add(self, record: dict[str, Any]) -> None:
        """Write a record of feedback, redacted; in the thread only. Raises OSError or SlowRule."""
        texts = {name: self._redaction.value(record[name]) for name in ("correction", "comment") if record.get(name)}
        if not self._append([msgspec.json.encode(record | texts)]):
            raise OSError(self.problem)

    def delete(self, user: str, client: str | None) -> int:
        """Delete the records of a user, and those of requests that still run; in the thread only. Raises OSError."""
        key = self.files.user_hash(user)
        self._deleted[key, client or ""] = time.time()
        while len(self._deleted) > MOST_KNOWN:
            self._deleted.popitem(last=False)
        count = captures.delete_user(self.files.folder, user, client)
        for answer in [each for each, known in self._known.items() if known.user == key]:
            if client in (None, self._known[answer].client):
                del self._known[answer]
        return count

    def _run(self) -> None:
        try:
            self._refresh()
        except OSError as error:
            self._stop(error)
        while True:
            try:
                items = self._take()
            except queue.Empty:
                self._expire()
                continue
            slips = [item for item in items if isinstance(item, CaptureSlip)]
            if slips:
                self._write(slips)
            for item in items:
                if isinstance(item, RecorderJob):
                    self._do(item)
            if items[-1] is None:
                return

    def _take(self) -> list[CaptureSlip | RecorderJob | None]:
        """Wait for work, and return what is there: slips, then at most one job or the end."""
        items = [self._queue.get(timeout=EXPIRE_S)]
        while isinstance(items[-1], CaptureSlip) and len(items) < BATCH:
            try:
                items.append(self._queue.get_nowait())
            except queue.Empty:
                break
        with self._lock:
            self._waiting_bytes -= sum(item.size for item in items if isinstance(item, CaptureSlip))
        return items

    def _do(self, job: RecorderJob) -> None:
        try:
            result, error = job.work(), None
        except Exception as caught:  # goes to the request that waits
            result, error = None, caught
        with contextlib.suppress(RuntimeError):  # the event loop of the request has ended
            job.done(result, error)

    def _write(self, slips: list[CaptureSlip]) -> None:
        if self._broken or (self.problem and time.monotonic() < self._retry_at):
            self._dropped("stopped", len(slips))
            return
        lines: list[bytes] = []
        for slip in slips:
            try:
                line = self._line(slip)
            except SlowRule as error:
                self._broken = True
                self._stop(error)
                self._dropped("stopped", len(slips))
                return
            except Exception:
                log.exception("transect: a request could not be captured")
                self._dropped("error", 1)
                continue
            if line is not None:
                lines.append(line)
        if lines and not self._append(lines):
            self._dropped("stopped", len(lines))

    def _line(self, slip: CaptureSlip) -> bytes | None:
        """Return the line of a slip; None if its user's records were deleted after it began, or it is too long."""
        user = self.files.user_hash(slip.sender.user) if slip.sender.user else ""
        if user and any(slip.created < self._deleted.get((user, each), 0.0) for each in ("", slip.client)):
            self._dropped("deleted", 1)
            return None
        line = msgspec.json.encode(slip.record(self._redaction.value, self._decode, user))
        if len(line) >= self.files.longest_line:
            self._dropped("size", 1)
            return None
        return line

    def _append(self, lines: list[bytes]) -> bool:
        try:
            path, start, end = self.files.append(lines)
            place = path.stat().st_ino, path.name
        except OSError as error:
            self._stop(error)
            return False
        if self._read_to.get(place, 0) == start:  # no other process has appended to the segment
            self._read_to[place] = end
            for line in lines:
                self._note(captures.parsed(line))
        if self.problem:
            log.warning("transect: CaptureStopped is over: captures are written again")
        self.problem = ""
        self._written(len(lines))
        return True

    def _stop(self, error: Exception) -> None:
        text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        if not self.problem:
            log.error("transect: error: CaptureStopped: no requests are captured (%s); answers are not affected", text)
        self.problem, self._retry_at = text, time.monotonic() + RETRY_S

    def _expire(self) -> None:
        try:
            self.files.expire()
        except OSError as error:
            log.error("transect: error: old captures cannot be deleted: %s", error)

    def _refresh(self) -> None:
        """Read what was appended since the last time, by this process or by others. Raises OSError."""
        before, self._read_to = self._read_to, {}
        for path in captures.segments(self.files.folder):
            try:
                place = path.stat().st_ino, path.name
                self._read_to[place] = before.get(place, 0)
                for end, line in captures.lines_in(path, self._read_to[place]):
                    self._note(captures.parsed(line))
                    self._read_to[place] = end
            except FileNotFoundError:
                continue

    def _note(self, record: dict[str, Any] | None) -> None:
        if record is None or not isinstance(record.get("id"), str):
            return
        if record.get("kind") == "feedback":
            if record["id"] in self._known:
                self._known[record["id"]].feedback += 1
            return
        client, user, model, release = (str(record.get(name) or "") for name in ("client", "user", "model", "release"))
        self._known[record["id"]] = Known(client, user, model, release, len(record.get("answers") or ()))
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
