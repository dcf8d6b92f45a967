"""Runs numbered pieces of a long check in processes, in order, and records the sum after each. Resumes a record."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings

from benchmarks import record

Piece = Callable[[int], Counter[str]]
"""Runs the piece of a number and returns its counts. An exception ends the check."""


def examples(most: int) -> settings:
    """Return the settings of a piece: ``most`` drawn workloads, without shrinking, a database or a time limit."""
    return settings(
        max_examples=most, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), print_blob=True,
    )  # fmt: skip


def parser_of(description: str, out: Path, minutes: float) -> argparse.ArgumentParser:
    """Return a parser with the options of ``run_pieces``; ``out`` and ``minutes`` are defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=minutes, help="time for all pieces together")
    parser.add_argument("--processes", type=int, default=1, help="pieces that run at the same time")
    parser.add_argument("--piece", type=int, help="run the piece of this number alone, in this process, and no record")
    parser.add_argument("--out", type=Path, default=out)
    return parser


def run_pieces(piece: Piece, wanted: dict[str, int], options: argparse.Namespace) -> None:
    """Run pieces until there is enough of every count, or time is up. Pieces have equal counts wherever they run.

    Args:
        piece: a function of a module, since other processes import it.
        wanted: the least value of each count.
        options: of ``parser_of``. A record at ``out`` is written after each piece, and continued if one of the same
            commit exists. With one process pieces run in this one, where a debugger can follow.
    """
    if options.piece is not None:
        print(dict(piece(options.piece)))
        return
    piece, processes, out = functools.partial(_run, piece), options.processes, options.out
    here, command = record.environment(), record.command(f"benchmarks/checks/{Path(sys.argv[0]).name}")
    found: dict[str, Any] = {"command": command, "environment": here, "pieces": 0, "seconds": 0.0}
    if out.exists() and (kept := json.loads(out.read_text())).get("environment", {}).get("commit") == here["commit"]:
        found = kept
    counts = Counter({name: int(found.get(name, 0)) for name in wanted})
    began, before = time.perf_counter(), float(found["seconds"])
    numbers = itertools.count(found["pieces"])
    # Processes are started afresh: a copy of one with threads of torch could wait for a lock for ever.
    pool = multiprocessing.get_context("spawn").Pool(processes) if processes > 1 else None
    try:
        results = iter(_ordered(pool, piece, numbers, processes)) if pool else map(piece, numbers)
        while any(counts[name] < least for name, least in wanted.items()):
            if time.perf_counter() - began > 60 * options.minutes:
                break
            try:
                counts.update(next(results))
            except Exception:
                print(f"piece {found['pieces']} failed (the number is its seed)", flush=True)
                raise
            found |= {**counts, "pieces": found["pieces"] + 1, "processes": processes}
            found["seconds"] = round(before + time.perf_counter() - began, 1)
            record.write(out, found)
            print(", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items()), flush=True)
    finally:
        if pool:
            pool.terminate()


def _run(piece: Piece, number: int) -> Counter[str]:
    try:
        return piece(number)
    except BaseException as error:
        error.add_note(f"Piece {number} failed. Repeat it with --piece {number}")
        raise


def _ordered(pool: Any, piece: Piece, numbers: Any, processes: int) -> Any:
    """Yield the pieces' results in order, with a bounded number of pieces begun."""
    begun = [pool.apply_async(piece, (number,)) for number in itertools.islice(numbers, 2 * processes)]
    while True:
        yield begun.pop(0).get()
        begun.append(pool.apply_async(piece, (next(numbers),)))
