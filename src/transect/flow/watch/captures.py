"""Files of captured requests, answers and feedback: segments of JSON lines in a private directory.

``captures-<milliseconds since 1970>.jsonl`` holds records in the order of their arrival; the oldest segment is deleted
first, when the directory is over its quota or the segment's first record is over its age. ``lock`` serializes the
processes that change segments: servers that append, and a command that deletes a user's records. A server reopens its
segment for each batch, so that a segment may be replaced between two batches. ``user.key`` is the secret with
which ids of users become the hashes in records.

The directory has permissions 0700, and its files 0600.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

PATTERN = "captures-*.jsonl"
PARTS = 16
"""Segments of a full directory, and of a full age: the share that leaves at once."""
RESERVE_BYTES = 64 * 2**20
"""Free bytes of the file system below which nothing is captured, so that captures never fill a disk."""
USER_DIGITS = 32


class CaptureFiles:
    """The segments of a directory.

    Args:
        folder: made if it is missing.
        quota_bytes: most bytes of all segments together.
        age_s: most seconds that a record is kept.
        reserve_bytes: free bytes that the file system keeps.
        clock: seconds since 1970.

    Raises:
        ValueError: the directory cannot be used, or others may read it.
    """

    def __init__(
        self,
        folder: Path | str,
        quota_bytes: int = 2**30,
        age_s: float = 30 * 86400.0,
        reserve_bytes: int = RESERVE_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = private_folder(folder)
        self.quota_bytes, self.age_s = quota_bytes, age_s
        self.longest_line = quota_bytes // PARTS
        """Most bytes of a record."""
        self._reserve, self._clock = reserve_bytes, clock
        self._secret = b""

    def user_hash(self, user: str) -> str:
        """Return the hash that stands for a user. Raises OSError."""
        self._secret = self._secret or _key(self.folder)
        return _hash(self._secret, user)

    def append(self, lines: list[bytes]) -> tuple[Path, int, int]:
        """Append records, each without its line break. Older segments make room; nothing is kept of a failed write.

        Returns:
            the segment, and the offsets of the first byte and after the last.

        Raises:
            OSError: the disk is full, or another error of the file system.
        """
        block = b"".join(line + b"\n" for line in lines)
        with locked(self.folder):
            self._expire(len(block))
            free = os.statvfs(self.folder)
            if free.f_bavail * free.f_frsize < self._reserve + len(block):
                raise OSError(errno.ENOSPC, f"less than {self._reserve >> 20} MiB are free", str(self.folder))
            path = self._current(len(block))
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                start = os.fstat(fd).st_size
                _write(fd, block)
            finally:
                os.close(fd)
        return path, start, start + len(block)

    def expire(self) -> None:
        """Delete segments that are over the age or the quota."""
        with locked(self.folder):
            self._expire(0)

    def size(self) -> int:
        """Return the bytes of all segments."""
        return sum(path.stat().st_size for path in segments(self.folder))

    def _expire(self, coming: int) -> None:
        found = segments(self.folder)
        sizes = [path.stat().st_size for path in found]
        total, oldest_ms = sum(sizes) + coming, 1000 * (self._clock() - self.age_s)
        for path, size in zip(found, sizes, strict=True):
            if total <= self.quota_bytes and _begun_ms(path) > oldest_ms:
                return
            path.unlink()
            total -= size

    def _current(self, coming: int) -> Path:
        """Return the segment to append to: the newest if it has room and is young, else a new one."""
        now = int(1000 * self._clock())
        newest = next(reversed(segments(self.folder)), None)
        if newest is not None:
            young = now - _begun_ms(newest) < 1000 * self.age_s / PARTS
            if young and newest.stat().st_size + coming <= self.quota_bytes // PARTS:
                return newest
            now = max(now, _begun_ms(newest) + 1)
        return self.folder / f"captures-{now:014d}.jsonl"


def private_folder(folder: Path | str) -> Path:
    """Make the directory if it is missing, for this user alone.

    Raises:
        ValueError: it cannot be made or used, or others may read it.
    """
    path = Path(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = path.stat().st_mode
    except OSError as error:
        raise ValueError(f"{path} cannot hold captures ({error.strerror or error}): name another directory") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ValueError(f"{path} is open to other users: run chmod 700 on it, or name a new directory")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"{path} is not writable by this user: name another directory")
    return path


def segments(folder: Path | str) -> list[Path]:
    """List the segments of a directory, oldest first."""
    return sorted(Path(folder).glob(PATTERN))


def lines_in(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the whole lines of a segment from byte ``start`` on, each with the offset after it."""
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            yield start, line


def parsed(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it is not a record, for example because a crash has cut it off."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read(folder: Path | str, after: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield all records of a directory, oldest first. Segments that leave meanwhile are passed over.

    Args:
        after: segments that ended before this time, in seconds since 1970, are passed over.

    Raises:
        ValueError: there is no such directory.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"there is no directory {folder}: name the --capture-dir of a server")
    found = segments(folder)
    for path, following in zip(found, [*found[1:], None], strict=False):
        if following is not None and _begun_ms(following) <= 1000 * after:
            continue
        with contextlib.suppress(FileNotFoundError):
            for _, line in lines_in(path):
                record = parsed(line)
                if record is not None:
                    yield record


def user_hash(folder: Path | str, user: str) -> str:
    """Return the hash that stands for a user in the records of a directory: HMAC-SHA256 with the directory's key."""
    return _hash(_key(Path(folder)), user)


def delete_user(folder: Path | str, user: str, client: str | None = None) -> int:
    """Delete all requests, answers and feedback of a user, and return their number.

    Args:
        user: id as clients sent it.
        client: name of an API key; only records of this client are deleted.

    Raises:
        OSError: a segment cannot be replaced, which also happens on a full disk.
    """
    wanted = user_hash(folder, user)
    needle, deleted = wanted.encode(), 0
    with locked(Path(folder)):
        for path in segments(folder):
            kept, found = [], 0
            for line in path.read_bytes().splitlines(keepends=True):
                record = parsed(line) if needle in line else None
                gone = record is not None and record.get("user") == wanted and client in (None, record.get("client"))
                found += gone
                kept += [] if gone else [line]
            if found:
                _replace(path, kept)
            deleted += found
    return deleted


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    """Replace a segment by these lines; an empty one is deleted."""
    block = b"".join(lines)
    if not block:
        path.unlink()
        return
    fresh = path.with_suffix(".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write(fd, block)
        os.fsync(fd)
    except OSError:
        fresh.unlink()
        raise
    finally:
        os.close(fd)
    fresh.replace(path)


def _write(fd: int, block: bytes) -> None:
    """Write all bytes or none. Raises OSError."""
    start, view = os.fstat(fd).st_size, memoryview(block)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, start)
        raise


def _begun_ms(path: Path) -> int:
    digits = path.stem.partition("-")[2]
    return int(digits) if digits.isdigit() else 0


def _hash(key: bytes, user: str) -> str:
    return hmac.new(key, user.encode(errors="replace"), hashlib.sha256).hexdigest()[:USER_DIGITS]


def _key(folder: Path) -> bytes:
    path = folder / "user.key"
    with locked(folder):
        if not path.exists():
            fresh = folder / "user.key.new"
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                _write(fd, secrets.token_bytes(32))
                os.fsync(fd)
            finally:
                os.close(fd)
            fresh.replace(path)
        return path.read_bytes()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the directory's lock, which other processes and threads wait for."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
