"""Checkpoints: directories that are either complete or absent, written while training continues.

``RUN/step-00000100/`` holds the model in Hugging Face layout (config.json, safetensors, tokenizer), which ``transect
serve`` and transformers load as it is; ``train_state.safetensors`` with the optimizer's state, of several ranks a file
of each (``parts.py``, ``stored_state.py``); and ``train_state.json``: step, position in the data, the run's
configuration and the SHA-256 of every file and of itself. ``RUN/last`` is a link to the newest, ``RUN/best`` one to
that with the lowest validation loss.

A checkpoint is written to ``.partial-...``, each file is flushed to the disk, ``train_state.json`` last, and only then
the directory gets its name. So a directory called ``step-...`` is whole, whenever the process was killed.
Nothing is pickled or unpickled: tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import Tensor

from .parts import Given, adopt, entry, flush, tensors_file, write_part
from .stored_state import StoredTensors, digest, write_json, write_tensors

log = logging.getLogger(__name__)

VERSION = 1
STATE = "train_state.json"
_TENSORS = re.compile(r"train_state(-\d+-of-\d+)?\.safetensors")
_NAME = re.compile(r"step-(\d{8,})")


class NotWritten(ValueError):
    """A checkpoint could not be written; raised on every rank that takes part. Older ones are untouched."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one moment, in its own memory.

    ``write_model(directory)`` writes the model's files. ``tensors`` has everything else that must come back to the last
    bit, on the CPU. ``state`` is plain JSON.
    """

    step: int
    write_model: Callable[[Path], None]
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]
    best: int = 0
    """Step of the best checkpoint so far, which is kept; 0 if there is none."""
    rank: int = 0
    """Rank that took the snapshot. ``tensors`` are this rank's; only the first rank writes the rest."""
    ranks: int = 1
    """Number of ranks with tensors; with 1, only the first rank writes."""
    written: Callable[[], None] = lambda: None
    """Function called in the writing thread when the snapshot is no longer needed."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified, complete checkpoint."""

    path: Path
    step: int
    state: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class RunLock:
    """A lock by which one process at a time trains in a run's directory; it is released when the process ends.

    Use as a context manager.

    Raises:
        ValueError: another process trains there.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self._path = Path(run_dir) / ".lock"

    def __enter__(self) -> RunLock:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self._path, timeout=0)
            self._lock.acquire()
        except Timeout:
            raise ValueError(
                f"another process trains in {self._path.parent}: wait for it, or set another run_dir"
            ) from None
        except OSError as error:
            raise ValueError(f"cannot write to run_dir {self._path.parent}: {error.strerror}") from None
        return self

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


class Writer:
    """Writes snapshots in a thread of its own, one at a time, and keeps the newest few.

    Use as a context manager: leaving it waits for what is being written.

    Args:
        rank: of several that write together; all but the first write their part alone.
    """

    def __init__(self, run_dir: str | Path, keep: int, rank: int = 0) -> None:
        self.run_dir = Path(run_dir)
        self.keep, self.rank = keep, rank
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._ended = threading.Event()
        if rank:
            return
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            for rest in self.run_dir.glob(".partial-*"):  # of a process that was killed
                if rest.is_symlink():  # it was about to become ``last``
                    rest.unlink()
                else:
                    shutil.rmtree(rest, ignore_errors=True)
        except OSError as error:
            raise ValueError(f"cannot write to run_dir {self.run_dir}: {error.strerror}") from None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:
            self._ended.set()
            self._thread.join()

    def save(self, snapshot: Snapshot) -> None:
        """Start writing, after the previous snapshot has been written.

        Raises:
            NotWritten: that one could not be (a full disk, say).
        """
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint")
        self._thread.start()

    @property
    def failed(self) -> bool:
        """True if a snapshot could not be written, and ``wait`` has not reported it yet."""
        return self._error is not None

    def wait(self) -> None:
        """Wait until all writing is done; raises as ``save`` does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise NotWritten(
                f"the checkpoint could not be written to {self.run_dir} ({reason}): free some space or correct "
                "run_dir, then continue with --resume; earlier checkpoints are whole"
            ) from error

    def point(self, best: int) -> None:
        """Point ``last`` to the newest checkpoint and ``best`` to that of step ``best``, if they exist. A process that
        was killed between naming a checkpoint and its links leaves older links."""
        steps = [] if self.rank else list_steps(self.run_dir)
        if steps:
            _point(self.run_dir / "last", steps[-1].name)
        if not self.rank and (found := self.run_dir / f"step-{best:08}").is_dir():
            _point(self.run_dir / "best", found.name)

    def _write(self, snapshot: Snapshot) -> None:
        # Ranks on different machines may have equal process numbers.
        partial = self.run_dir / f".partial-{snapshot.step}-{snapshot.rank}-{os.getpid()}"
        try:
            if snapshot.rank:
                if snapshot.ranks > 1:
                    write_part(self.run_dir, snapshot.step, snapshot.rank, snapshot.ranks, snapshot.tensors)
                return
            write(snapshot, partial, self.run_dir / f"step-{snapshot.step:08}", self._ended)
            self.point(snapshot.best)
            best = self.run_dir / f"step-{snapshot.best:08}"
            for old in list_steps(self.run_dir)[: -self.keep]:
                if old == best:
                    continue
                doomed = old.with_name(f".partial-old-{old.name}")
                old.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
        except Given:
            shutil.rmtree(partial, ignore_errors=True)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            self._error = error
        finally:
            snapshot.written()


def write(snapshot: Snapshot, partial: Path, final: Path, ended: threading.Event | None = None) -> None:
    """Write a snapshot to ``partial``, with the parts of all other ranks, and rename it to ``final``.

    An existing ``final`` is replaced. ``ended`` is set when the result is not needed any more.
    """
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    snapshot.write_model(partial)
    write_tensors(snapshot.tensors, partial / tensors_file(0, snapshot.ranks))
    for rank in range(1, snapshot.ranks):
        adopt(final.parent, snapshot.step, rank, snapshot.ranks, partial, ended or threading.Event())
    files = {}
    for path in sorted(partial.rglob("*")):
        if path.is_file():
            flush(path)
            files[str(path.relative_to(partial))] = entry(path)
    stored = {"version": VERSION, "step": snapshot.step, "state": snapshot.state, "files": files}
    write_json(stored | {"sha256": _sum(stored)}, partial / STATE)
    flush(partial / STATE)
    flush(partial)
    old = final.with_name(f".partial-old-{final.name}")
    if final.exists():  # the same step of a run that was resumed from before it
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    partial.rename(final)
    flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def list_steps(run_dir: str | Path) -> list[Path]:
    """List the checkpoints of a run, oldest first."""
    found = [path for path in Path(run_dir).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def set_aside_after(checkpoint: Checkpoint) -> list[Path]:
    """Rename checkpoints of later steps, because a run resumed from an earlier step writes them again."""
    moved = []
    best = checkpoint.path.parent / "best"
    if best.is_symlink() and int(best.readlink().name.removeprefix("step-")) > checkpoint.step:
        best.unlink()
    for path in list_steps(checkpoint.path.parent):
        if int(path.name.removeprefix("step-")) > checkpoint.step:
            aside = path.with_name(f"aside-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            moved.append(path)
    return moved


def read(path: str | Path, *, check: bool = True) -> Checkpoint:
    """Open a checkpoint; tensors are read on demand.

    Args:
        check: compare every file of it with its sum.

    Raises:
        ValueError: it is not one, or a file of it is missing, cut short or changed; the message names the file.
    """
    path = Path(path).resolve()
    try:
        stored = json.loads((path / STATE).read_text(encoding="utf-8"))
        version, step, state, files = stored["version"], int(stored["step"]), stored["state"], stored["files"]
    except FileNotFoundError:
        raise ValueError(f"{path} is not a training checkpoint: it has no {STATE}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / STATE} is damaged ({error}): {_advice(path)}") from None
    if version != VERSION:
        raise ValueError(f"{path} is a checkpoint of version {version}; this reads version {VERSION}")
    if stored.pop("sha256", None) not in (None, _sum(stored)):  # earlier checkpoints have none
        raise ValueError(f"{path / STATE} is damaged (its SHA-256 differs): {_advice(path)}")
    for name, expected in files.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != expected["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes and should have {expected['bytes']}"
            raise ValueError(f"{file} {found}: {_advice(path)}")
        if check and digest(file) != expected["sha256"]:
            raise ValueError(f"{file} is not what was written (its SHA-256 differs): {_advice(path)}")
    try:
        tensors = StoredTensors([path / name for name in files if _TENSORS.fullmatch(name)])
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the state in {path} cannot be read ({error}): {_advice(path)}") from None
    return Checkpoint(path, step, state, tensors)


def newest(run_dir: str | Path, *, check: bool = True) -> Checkpoint:
    """Return the last checkpoint of a run; or ``run_dir`` itself, if that is a checkpoint. ``check`` as in ``read``.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    if (Path(run_dir) / STATE).exists():
        return read(run_dir, check=check)
    steps = list_steps(run_dir)
    if not steps:
        others = [path.name for path in list_steps(Path(run_dir).parent)]
        if _NAME.fullmatch(Path(run_dir).name) and others:
            raise ValueError(f"there is no {run_dir}: resume from {' or '.join(others)}")
        raise ValueError(f"{run_dir} has no checkpoint to resume from: start the run without --resume")
    return read(steps[-1], check=check)


def _sum(stored: Mapping[str, Any]) -> str:
    """Compute the SHA-256 of plain values, unchanged by writing and reading them."""
    plain = json.loads(json.dumps(stored))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _advice(path: Path) -> str:
    others = [other.name for other in list_steps(path.parent) if other != path]
    if others:
        return f"move {path.name} away to resume from {others[-1]}"
    return "there is no other checkpoint; start the run again"


def _point(link: Path, target: str) -> None:
    """Make ``link`` a symbolic link to ``target`` in one step."""
    part = link.with_name(f".partial-link-{os.getpid()}")
    part.unlink(missing_ok=True)
    part.symlink_to(target)
    part.replace(link)
