"""Write a checkpoint from several ranks: each writes its part of the state, in parallel, in the background.

Every rank but the first writes its part into a folder of its own beside the checkpoint that the first one makes. When
all of it is on the disk, ``part.json`` says so with its size and sum. The first rank waits for every part, moves the
files into its own unfinished checkpoint, and continues as if it had written them: the list of all files last, then the
name. So a checkpoint is whole on all ranks or not there, whichever of them is killed, and when. The ranks talk through
the disk alone; no collective runs beside those of the training.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .stored_state import digest, write_json, write_tensors

PART = "part.json"
WAIT_S = 1800.0
"""Seconds that the first rank waits for a part after its own is written."""
POLL_S = 0.02


class Given(RuntimeError):
    """The run ended while a part was awaited."""


def tensors_file(rank: int, ranks: int) -> str:
    """Return the file name of a rank's tensors."""
    return "train_state.safetensors" if ranks == 1 else f"train_state-{rank:05}-of-{ranks:05}.safetensors"


def flush(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def entry(path: Path) -> dict[str, Any]:
    """Return the entry of a file in a checkpoint's list."""
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def write_part(run_dir: Path, step: int, rank: int, ranks: int, tensors: Mapping[str, Tensor]) -> None:
    """Write a rank's part, or the error that prevented it; called on every rank but the first."""
    folder = _folder(run_dir, step, rank)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        file = folder / tensors_file(rank, ranks)
        write_tensors(tensors, file)
        flush(file)
        _say(folder, entry(file))
    except Exception as error:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / tensors_file(rank, ranks)).unlink(missing_ok=True)  # gives room for the message
        _say(folder, {"error": str(error)})
        raise


def _say(folder: Path, values: Mapping[str, Any]) -> None:
    new = folder / f"{PART}.new"
    write_json(values, new)
    flush(new)
    new.replace(folder / PART)
    flush(folder)


def adopt(run_dir: Path, step: int, rank: int, ranks: int, into: Path, ended: threading.Event) -> None:
    """Wait for a rank's part, and move its file ``into`` the unfinished checkpoint; called on the first rank.

    Raises:
        OSError: the rank could not write it, or it did not come in time. Given: ``ended`` was set.
    """
    folder = _folder(run_dir, step, rank)
    until = time.monotonic() + WAIT_S
    while not (folder / PART).exists():
        if ended.wait(POLL_S):
            raise Given(f"the run ended before rank {rank} had written its part")
        if time.monotonic() > until:
            raise OSError(
                f"rank {rank} has not written its part within {WAIT_S:.0f} s: run_dir must be one folder for all ranks"
            )
    said = json.loads((folder / PART).read_text(encoding="utf-8"))
    if "error" in said:
        raise OSError(f"rank {rank}: {said['error']}")
    (folder / tensors_file(rank, ranks)).replace(into / tensors_file(rank, ranks))
    shutil.rmtree(folder, ignore_errors=True)


def _folder(run_dir: Path, step: int, rank: int) -> Path:
    return run_dir / f".partial-{step}-rank-{rank}"
