"""A child of ``Ranks.start``: ``python -m transect.parallel.rank FOLDER RANK SIZE [JOB]``. JOB: a module to import.

It meets the others and runs the jobs that rank 0 announces, one after another. Its standard input is a pipe from rank
0; when that closes, rank 0 has ended or wants it to end, and it ends whatever it is doing.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from .children import arrived, last_words, told

if TYPE_CHECKING:
    from .world import World

PATIENCE_S = 30.0


def main() -> None:
    """Run a child; exits with 1 when a job fails, after writing the reason to a file."""
    gc.disable()  # what is imported stays; searching it for garbage takes a tenth of a start
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Service managers (systemd, Slurm) send SIGTERM to every process. Rank 0 has work to finish, and then closes the
    # pipe. A function, not SIG_IGN: processes that are started here would inherit that.
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Thread(target=_exit_with_parent, args=(sys.stdin.fileno(), Path(sys.argv[1])), daemon=True).start()
    folder, (rank, size) = Path(sys.argv[1]), map(int, sys.argv[2:4])
    from .launch import broken, meet  # imports torch, which takes seconds

    try:
        for job in sys.argv[4:]:
            importlib.import_module(job)
        gc.enable()
        device, first_device = told(folder)
        arrived(folder, rank).touch()
        serve_jobs(meet(folder, rank, size, device, first_device))
    except Exception as error:
        if broken(error):  # another rank has ended; rank 0 notices that first, and reports it
            time.sleep(PATIENCE_S)
        else:
            traceback.print_exc()
            last_words(folder, rank).write_text(f"{type(error).__name__}: {error}".splitlines()[0])
        sys.stderr.flush()
        os._exit(1)


def serve_jobs(world: World) -> None:
    """Run the jobs that rank 0 announces, until it announces None."""
    while (job := world.listen()) is not None:
        name, argument = job
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function)(world, argument)


def _exit_with_parent(pipe: int, folder: Path) -> None:
    while os.read(pipe, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)  # a parent that was killed has left it
    os._exit(0)


if __name__ == "__main__":
    main()
