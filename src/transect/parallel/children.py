"""Start the child processes that become ranks 1 and up (``Children``). No torch.

They can be started before this process imports torch, so that all processes import it at the same time. Each child is
``python -m transect.parallel.rank FOLDER RANK SIZE [JOB]``. It imports its modules, waits for its device (``begin``),
and reports that it is ready. It holds one end of a pipe from this process and exits when the pipe closes, so no child
outlives this process, however that ends.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

BEGIN_S = 300.0
"""Seconds for all ranks to import torch and meet."""


class RankFailure(RuntimeError):
    """A rank has ended, and the others cannot continue without it. The message names the rank and the known facts."""


class Children:
    """``size`` ranks, of which this process is the first.

    Args:
        job: a module that their work will need; they import it meanwhile.
    """

    def __init__(self, size: int, job: str | None = None) -> None:
        self.size = size
        self.folder = Path(tempfile.mkdtemp(prefix="transect-ranks-"))
        """Folder in which the ranks meet."""
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.taken = False
        """True if other code ends the children."""
        try:
            for rank in range(1, size):
                arguments = (str(self.folder), str(rank), str(size), *([] if job is None else [job]))
                self.processes[rank] = subprocess.Popen(
                    [sys.executable, "-m", "transect.parallel.rank", *arguments],
                    stdin=subprocess.PIPE,
                    stdout=2,  # the output of a program is rank 0's
                    process_group=0,  # a terminal's Ctrl-C is rank 0's business
                )
        except BaseException:
            self.kill()
            raise

    def begin(self, device: str, first_device: int) -> None:
        """Wait until all children are ready to meet, and let them do so on ``device``: rank i on ``first_device`` + i.

        Raises:
            RankFailure: one has ended, or takes too long.
        """
        written = self.folder / "begin.part"
        written.write_text(f"{device} {first_device}")
        written.rename(_told(self.folder))
        until = time.monotonic() + BEGIN_S
        while missing := [rank for rank in self.processes if not arrived(self.folder, rank).exists()]:
            for rank in missing:
                code = self.processes[rank].poll()
                if code is not None:
                    raise RankFailure(ended(rank, self.processes[rank].pid, code, self.folder) + " while it started")
            if time.monotonic() > until:
                raise RankFailure(f"rank {missing[0]} has not begun within {BEGIN_S:.0f} s")
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill the children."""
        for child in self.processes.values():
            child.kill()
            child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def starting(size: int, job: str) -> Iterator[Children | None]:
    """Provide ``Children``; end them with the block unless they have been taken over. None for a size of 1."""
    children = Children(size, job) if size > 1 else None
    try:
        yield children
    finally:
        if children is not None and not children.taken:
            children.kill()


def told(folder: Path) -> tuple[str, int]:
    """Wait in a child for the device and the number of the first device."""
    path = _told(folder)
    while not path.exists():
        time.sleep(0.01)
    device, first = path.read_text().split()
    return device, int(first)


def arrived(folder: Path, rank: int) -> Path:
    """Return the file that a child creates when it is about to meet the others."""
    return folder / f"rank-{rank}"


def last_words(folder: Path, rank: int) -> Path:
    """Return the file in which a child records the reason of its end."""
    return folder / f"rank-{rank}.error"


def ended(rank: int, pid: int, code: int, folder: Path | None) -> str:
    """Describe the end of a child."""
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    words = ""
    if folder is not None:
        with contextlib.suppress(OSError):
            words = last_words(folder, rank).read_text().strip()
    return f"rank {rank} (process {pid}) {how}" + (f": {words}" if words else "")


def _told(folder: Path) -> Path:
    return folder / "begin"
