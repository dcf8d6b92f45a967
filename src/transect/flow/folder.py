"""The folder of a flow: states and results of its steps, written so that a kill at any moment loses nothing.

    DIR/chain.json                  state of every step, as of the last change
    DIR/events.jsonl                a line for each start, end and reason, appended
    DIR/work/STEP-KEY/              files of a step for one set of inputs; KEY is their hash
    DIR/work/STEP-KEY/outcome.json  its result; exists only if the step has ended

A file is written beside its place, flushed, and renamed, so an ``outcome.json`` is whole. Work of other inputs stays
for the day when these settings return.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

CHAIN, EVENTS, OUTCOME = "chain.json", "events.jsonl", "outcome.json"


class FlowFolder:
    """Reads and writes the files of a flow.

    Args:
        path: the folder; it is created when something is written.

    Methods that write raise ValueError if the disk refuses; earlier files stay whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def work(self, step: str, key: str) -> Path:
        """Return the folder of a step's files for the inputs with this hash."""
        return self.path / "work" / f"{step}-{key}"

    def outcome(self, step: str, key: str) -> dict[str, Any] | None:
        """Read the result of a step for these inputs; None if it has not ended."""
        return read_json(self.work(step, key) / OUTCOME)

    def chain(self) -> dict[str, Any] | None:
        """Read the states of all steps; None if the flow has never run."""
        return read_json(self.path / CHAIN)

    def write_chain(self, values: Mapping[str, Any]) -> None:
        """Write the states of all steps. They are a view of the outcomes, so they need not survive a power failure."""
        write_json(values, self.path / CHAIN, flush=False)

    def write_outcome(self, step: str, key: str, values: Mapping[str, Any]) -> None:
        """Write the result of a step, which ends it."""
        write_json(values, self.work(step, key) / OUTCOME)

    def tell(self, **values: Any) -> None:
        """Append a line to the events."""
        line = json.dumps({"time": round(time.time(), 3), **values}) + "\n"
        with writing(self.path / EVENTS), (self.path / EVENTS).open("a", encoding="utf-8") as file:
            file.write(line)

    def events(self) -> list[dict[str, Any]]:
        """Read the events; a line that a kill has cut short is left out."""
        found = []
        with suppress(FileNotFoundError):
            for line in (self.path / EVENTS).read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):
                    found.append(json.loads(line))
        return found

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one process at a time run the flow; the lock ends with the process. Raises ValueError if another runs
        it."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(f"another process runs the flow in {self.path}: wait for it, or set another dir") from None
        except OSError as error:
            raise ValueError(f"cannot write to dir {self.path}: {error.strerror}") from None
        try:
            yield
        finally:
            lock.release()

    def is_running(self) -> bool:
        """Return True if a process runs the flow now."""
        if not (self.path / ".lock").exists():
            return False
        lock = FileLock(self.path / ".lock", timeout=0)
        try:
            lock.acquire()
        except (Timeout, OSError):
            return True
        lock.release()
        return False


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the disk into a ValueError that names the file and says what to do."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write {path} ({error.strerror or error}): free some space or correct the path, then run the flow "
            "again; finished steps are kept"
        ) from error


def write_json(values: Any, path: Path, *, flush: bool = True) -> None:
    """Write plain values as JSON, in one step. Raises ValueError if the disk refuses."""
    write_bytes(json.dumps(values, indent=1, sort_keys=True).encode() + b"\n", path, flush=flush)


def write_bytes(content: bytes, path: Path, *, flush: bool = True) -> None:
    """Write a file in one step: beside its place, flushed to the disk, renamed. Raises ValueError if the disk
    refuses."""
    partial = path.with_name(f".partial-{path.name}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            if flush:
                os.fsync(file.fileno())
        partial.replace(path)
        if not flush:
            return
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if there is no such file.

    Raises:
        ValueError: it is damaged; the message says what to do.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): remove it, and run the flow again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not hold a JSON object: remove it, and run the flow again")
    return found
