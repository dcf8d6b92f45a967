"""Queue of work that no GPU has run yet, by descending priority: runs as much as fits into the time on a GPU.

    python benchmarks/gpu_queue.py OUT [--seconds 560] [--only NAME,...]
    python benchmarks/gpu_queue.py --list

``gpu_queue.toml`` has the work: what it is, how it is asked for, what a processor has shown, and the commands that run
or measure it, with the seconds that they are given and the GPUs that they need. Each entry gets GPUs of its own
(``CUDA_VISIBLE_DEVICES``). It begins as soon as enough GPUs are free, if enough time is left, and is ended with all its
processes when its time is over. ``OUT/NAME`` has its results and what it printed (``log.txt``), ``OUT/queue.json`` how
each ended. Exit 1 where one was not done.

``docs/lab-notes/waiting-for-a-gpu.md`` is made of the same file. What has run is taken out of it.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record

QUEUE = Path(__file__).with_suffix(".toml")
END_S = 10.0
"""Seconds between the request to end and the kill."""


@dataclass(frozen=True, slots=True)
class Work:
    """An entry of the queue."""

    name: str
    what: str
    asked: str
    """The option that a user gives, or the reason why it is the default."""
    wrong: str
    """The consequence if it were wrong."""
    shown: str
    """The evidence from a processor."""
    commands: tuple[str, ...]
    """From the root of the repository, one after another, each whether the one before succeeded or not; ``$OUT`` is a
    folder for results."""
    seconds: float
    gpus: int = 1


def queue(path: Path = QUEUE) -> list[Work]:
    """Read the entries, by descending priority.

    Raises:
        ValueError: two have one name, or one has unknown or missing keys.
    """
    found = []
    for each in tomllib.loads(path.read_text())["work"]:
        try:
            found.append(Work(**{**each, "commands": tuple(each["commands"])}))
        except (TypeError, KeyError) as error:
            raise ValueError(f"{path.name}, {each.get('name', 'an entry without a name')}: {error}") from None
    names = [work.name for work in found]
    if len(set(names)) < len(names):
        raise ValueError(f"{path.name}: two entries have one name")
    return found


def table(works: Iterable[Work]) -> str:
    """Format the table of the page."""
    lines = ["| name | work | option | failure, if wrong | CPU evidence | GPUs |", "|---" * 6 + "|"]
    for work in works:
        lines.append(f"| `{work.name}` | {work.what} | {work.asked} | {work.wrong} | {work.shown} | {work.gpus} |")
    return "\n".join(lines) + "\n"


class Queue:
    """Runs work on GPUs until the time is over."""

    def __init__(self, out: Path, gpus: Sequence[str], seconds: float) -> None:
        """Set up. ``gpus``: their names for ``CUDA_VISIBLE_DEVICES``; ``seconds``: from now."""
        self._out, self._free, self._count = out, sorted(gpus), len(gpus)
        self._until = time.monotonic() + seconds
        self._changed = threading.Condition()
        self._starting = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self.ended: dict[str, dict[str, Any]] = {}

    def run(self, works: Sequence[Work]) -> None:
        """Run all work, in this order where GPUs are free for it; returns when the last has ended. An interrupt ends
        the running work."""
        left = list(works)
        try:
            with self._changed:
                while left or len(self._free) < self._count:
                    work = next((each for each in left if self._verdict(each) or each.gpus <= len(self._free)), None)
                    if work is None:
                        self._changed.wait(1.0)
                        continue
                    left.remove(work)
                    if verdict := self._verdict(work):
                        self._end(work, {"ended": verdict})
                        continue
                    mine, self._free = self._free[: work.gpus], self._free[work.gpus :]
                    threading.Thread(target=self._work, args=(work, mine)).start()
        except BaseException:
            with self._starting:
                self._until = -math.inf  # no further command begins
            for process in list(self._running):
                end(process)
            raise

    def _verdict(self, work: Work) -> str | None:
        """Return the reason why it cannot run any more; None if it can."""
        if work.gpus > self._count:
            return f"needs {work.gpus} GPUs"
        return "no time was left" if time.monotonic() + work.seconds > self._until else None

    def _work(self, work: Work, gpus: list[str]) -> None:
        began, codes = time.monotonic(), []
        try:
            folder = self._out / work.name
            folder.mkdir(parents=True, exist_ok=True)
            for command in work.commands:
                codes.append(self._command(command, folder, gpus, began + work.seconds))
        finally:
            with self._changed:
                self._free = sorted(self._free + gpus)
                ended = outcome(codes) if len(codes) == len(work.commands) else "failed"
                self._end(work, {"ended": ended, "codes": codes, "seconds": round(time.monotonic() - began, 1)})
                self._changed.notify()

    def _command(self, command: str, folder: Path, gpus: list[str], until: float) -> int | None:
        """Run a command and return its exit code; None if it was ended for its time."""
        source = str(record.ROOT / "src")
        known = os.environ.get("PYTHONPATH")
        settings = {
            "OUT": str(folder),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            "PYTHONPATH": source + os.pathsep + known if known else source,  # beside what the machine needs to import
            "PYTHONUNBUFFERED": "1",
            "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", ""),
        }
        with (folder / "log.txt").open("a") as log:
            with self._starting:
                if time.monotonic() > min(until, self._until):
                    return None
                print(f"$ {command}", file=log, flush=True)
                process = subprocess.Popen(
                    command, shell=True, executable="/bin/bash", cwd=record.ROOT, env=os.environ | settings, stdout=log,
                    stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
                self._running.add(process)
            try:
                return process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                print("ended: its time is over", file=log, flush=True)
                return None
            finally:
                end(process)
                self._running.discard(process)

    def _end(self, work: Work, how: dict[str, Any]) -> None:
        self.ended[work.name] = how
        record.write(
            self._out / "queue.json", {"environment": record.environment(("torch", "triton")), "work": self.ended}
        )
        print(f"{work.name}: {how}", flush=True)


def outcome(codes: Sequence[int | None]) -> str:
    """Describe the end of commands by their exit codes."""
    if None in codes:
        return "cut off"
    return "failed" if any(codes) else "done"


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process and those that it started, which are one group: asked first, killed after ``END_S``."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            break
        limit = time.monotonic() + END_S
        while time.monotonic() < limit:
            process.poll()  # a process that has ended is of the group until somebody asks for its exit code
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)
    process.wait()


def visible() -> list[str]:
    """List the GPUs that this process may use, by their names in ``CUDA_VISIBLE_DEVICES``."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="a folder for results")
    parser.add_argument("--seconds", type=float, default=560.0, help="for all of it")
    parser.add_argument("--only", default="", help="names, with commas between them: these, in this order")
    parser.add_argument("--list", action="store_true", help="show names, seconds and commands")
    options = parser.parse_args()
    works = queue()
    if options.only:
        known = {work.name: work for work in works}
        unknown = set(options.only.split(",")) - known.keys()
        if unknown:
            parser.error(f"no entry {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
        works = [known[name] for name in options.only.split(",")]
    if options.list:
        for work in works:
            print(f"{work.name}, {work.gpus} GPU, {work.seconds:.0f} s: {'; '.join(work.commands)}")
        return 0
    if options.out is None:
        parser.error("OUT is missing: where results go")
    gpus = visible()
    if not gpus:
        parser.error("this work needs a CUDA GPU, and torch sees none; --list shows what would run")
    started = Queue(options.out.resolve(), gpus, options.seconds)
    started.run(works)
    return int(any(each["ended"] != "done" for each in started.ended.values()))


if __name__ == "__main__":
    sys.exit(main())
