"""Latencies of ordinary users beside attackers, and memory of the server, for minutes or hours.

Users ask short questions one after another, in a stream. In every second window of time attackers join, in a process of
their own: large bodies, crowds that leave at once, requests of many long answers, long prompts, schemas that are
refused late, paths that do not exist. The users' times to the first token and between tokens are compared with and
without attackers. Windows are short and alternate, so other work on the machine affects both alike; the beginning of
each is left out. The memory of the server's processes in attacked windows at the beginning is compared with that at the
end. The file is written after each pair of windows, and says what has been run so far.

    python benchmarks/server/soak.py [--minutes 60] [--users 4] [--out benchmarks/results/cpu/soak.json]

The server has the first half of this process's cores if there are four or more, and users and attackers have the
others. ``--server-cores N`` gives it N; 0 lets all share all.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.server.clients import BUILTIN, server
from benchmarks.server.fair_sharing import HOSTILE, WORDS, of
from transect.engine.frontends.async_engine import AsyncEngine

PATIENCE_S = 300
WINDOW_S = 60.0
"""Time with attackers, and as much without."""
SETTLE = 0.25
"""Share of a window, at its beginning, which is left out: the requests of the one before end."""
SAMPLE_S = 5.0
"""Between two looks at memory."""
SETTLED = 0.2
"""Memory is compared from this share of the time on: before, caches fill."""
KV_BYTES = 2**29
"""Size of the KV cache. Its memory is taken when a block is first used; a small cache is full within minutes, and later
growth is a leak."""
POLITENESS = 10
"""Attackers leave the processor to server and users: it is not their machine."""


class Times:
    """Seconds that users felt, with and without attackers."""

    def __init__(self) -> None:
        self.attacked: bool | None = None
        """Attackers are there, or None where that has just changed."""
        self.first: dict[bool, list[float]] = {False: [], True: []}
        self.between: dict[bool, list[float]] = {False: [], True: []}
        self.refused: dict[str, int] = {}
        """Answers to users that were errors or broke off, by status or error."""


def user(url: str, key: str, times: Times, over: threading.Event) -> None:
    """Ask until the end."""
    chance = random.Random(key)
    with httpx.Client(timeout=PATIENCE_S) as client:
        while not over.is_set():
            body = {"model": BUILTIN, "prompt": f"User {chance.random()} asks", "max_tokens": 24, "stream": True}
            attacked, began, last, failed = times.attacked, time.perf_counter(), None, ""
            try:
                with client.stream("POST", f"{url}/v1/completions", json=body, headers=of(key)) as answer:
                    failed = "" if answer.status_code == 200 else str(answer.status_code)
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            now = time.perf_counter()
                            if attacked is not None and attacked == times.attacked:
                                (times.first if last is None else times.between)[attacked].append(now - (last or began))
                            last = now
            except httpx.HTTPError as error:
                failed = type(error).__name__
            if failed:
                times.refused[failed] = times.refused.get(failed, 0) + 1
            time.sleep(0.2)


def attacks(url: str) -> dict[str, Callable[[httpx.Client, int], None]]:
    """Return functions that each make one attack, by name; all are of one client with a key of its own."""
    host, port = url.removeprefix("http://").split(":")

    def post(client: httpx.Client, path: str, **fields: Any) -> None:
        client.post(f"{url}{path}", json={"model": BUILTIN, **fields}, headers=of("attacker"))

    def leave(client: httpx.Client, number: int) -> None:
        body = json.dumps({"prompt": f"{number}", "max_tokens": 500, "stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer attacker\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        with contextlib.ExitStack() as stack:
            for _ in range(50):
                stack.enter_context(socket.create_connection((host, int(port)))).sendall(head + body)
            time.sleep(1.0)

    return {
        "leave": leave,
        "words": lambda client, number: post(
            client, "/v1/completions", prompt="a", bad_words=[f"w{n}" for n in range(100_000)]
        ),
        "messages": lambda client, number: post(
            client, "/v1/chat/completions", messages=[{"role": "user", "content": f"{number} hi"}] * 5000
        ),
        "many": lambda client, number: post(
            client, "/v1/completions", prompt=[f"{number} {n}" for n in range(64)], max_tokens=30, ignore_eos=True
        ),
        "long": lambda client, number: post(client, "/v1/completions", prompt=f"{number} " + WORDS * 100, max_tokens=1),
        "schema": lambda client, number: post(
            client, "/v1/completions", prompt="x", guided_json={**HOSTILE, "title": str(number)}, max_tokens=4
        ),
        "embeddings": lambda client, number: post(
            client, "/v1/embeddings", input=[f"{number} {n} " + WORDS for n in range(64)]
        ),
        "nowhere": lambda client, number: post(client, f"/nowhere/{number}%0aforged"),
    }


def attacker(attack: Callable[[httpx.Client, int], None], on: Any, over: Any, counts: Any, place: int) -> None:
    """Attack until the end, while attacks are on, and count attacks in ``counts[place]``."""
    with httpx.Client(timeout=PATIENCE_S) as client:
        for number in itertools.count():
            while not on.wait(1.0) and not over.is_set():
                pass
            if over.is_set():
                return
            with contextlib.suppress(httpx.HTTPError, OSError):
                attack(client, number)
            counts[place] += 1
            time.sleep(0.2)


def all_attackers(url: str, names: list[str], on: Any, over: Any, counts: Any) -> None:
    """Attack in these ways, in a separate process, so that users do not wait for the attackers' computations."""
    os.nice(POLITENESS)
    found = attacks(url)
    for place, name in enumerate(names):
        threading.Thread(target=attacker, args=(found[name], on, over, counts, place), daemon=True).start()
    over.wait()


def memory(process: psutil.Process) -> tuple[int, int]:
    """Return the resident bytes of a server's process and all its descendants, and those of its engine alone."""
    total = engine = 0
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            nbytes = each.memory_info().rss
            total += nbytes
            engine += nbytes if AsyncEngine.process_module in each.cmdline() else 0
    return total, engine


def percentiles(values: list[float]) -> dict[str, float | int]:
    """Return p50 and p99, in seconds, and the number of values."""
    ordered = sorted(values)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[len(ordered) * 99 // 100], "count": len(ordered)}


def soak(
    minutes: float,
    users: int,
    window_s: float,
    names: list[str],
    cores: int,
    serve: list[str],
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Run, and give ``keep`` the figures so far after each pair of windows.

    Args:
        names: attacks.
        cores: of the server; 0 for all.
        serve: further options of the server.
    """
    times, over, all_cores = Times(), threading.Event(), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, all_cores[:cores] or all_cores)  # the server inherits them
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("\n".join(["attacker", *(f"user-{number}" for number in range(users))]) + "\n")
        with server("--api-key-file", str(keys), "--kv-cache-bytes", str(KV_BYTES), *serve) as url:
            os.sched_setaffinity(0, all_cores[cores:])
            me = psutil.Process()
            process = next(each for each in me.children() if "serve" in each.cmdline())
            context = multiprocessing.get_context("spawn")
            active, ended, counts = context.Event(), context.Event(), context.Array("q", len(names))
            hostile = context.Process(target=all_attackers, args=(url, names, active, ended, counts), daemon=True)
            hostile.start()
            threads = [threading.Thread(target=user, args=(url, f"user-{n}", times, over)) for n in range(users)]
            for thread in threads:
                thread.daemon = True
                thread.start()
            began, seconds, samples = time.perf_counter(), 60 * minutes, list[tuple[float, int, int]]()
            pairs = 0

            def keep_all(passed: float) -> None:
                made = dict(zip(names, counts, strict=True))
                keep({"attacks": made, **figures(passed, users, window_s, times, samples)})

            while (passed := time.perf_counter() - began) < seconds:
                attacked, within = bool(int(passed / window_s) % 2), passed % window_s
                (active.set if attacked else active.clear)()
                times.attacked = attacked if within > SETTLE * window_s else None
                if times.attacked:
                    samples.append((passed, *memory(process)))
                felt = (*times.first.values(), *times.between.values())
                if passed >= (pairs + 1) * 2 * window_s and all(felt):
                    pairs += 1
                    keep_all(passed)
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    raise SystemExit(f"the server ended after {passed / 60:.1f} minutes; its last words are above")
                time.sleep(min(SAMPLE_S, SETTLE * window_s))
            times.attacked = None
            over.set()
            ended.set()
            for thread in threads:
                thread.join(PATIENCE_S)
            hostile.kill()
            hostile.join()
            keep_all(seconds)


def figures(
    seconds: float, users: int, window_s: float, times: Times, samples: list[tuple[float, int, int]]
) -> dict[str, Any]:
    """Sum up the first ``seconds``."""
    late = [nbytes for passed, *nbytes in samples if passed >= SETTLED * seconds]
    third = max(1, len(late) // 3)
    first, last = (map(max, zip(*part, strict=True)) for part in (late[:third], late[-third:]))
    total, engine = ({"first_third": one, "last_third": two} for one, two in zip(first, last, strict=True))
    return {
        "minutes": seconds / 60,
        "users": users,
        "window_s": window_s,
        "first_token_s": {name: percentiles(times.first[on]) for name, on in (("quiet", False), ("attacked", True))},
        "between_tokens_s": {
            name: percentiles(times.between[on]) for name, on in (("quiet", False), ("attacked", True))
        },
        "users_refused": times.refused,
        "memory_bytes": total,
        "engine_memory_bytes": engine,
    }


def table(result: dict[str, Any]) -> str:
    """Format the latencies of ordinary users with and without attackers."""
    lines = ["| | without attackers, p50 and p99 | with, p50 and p99 | p99, ratio |", "|---|---|---|---|"]
    for name, title in (("first_token_s", "first token"), ("between_tokens_s", "between tokens")):
        quiet, attacked = (result[name][each] for each in ("quiet", "attacked"))
        cells = [f"{1e3 * each['p50']:.0f} and {1e3 * each['p99']:.0f} ms" for each in (quiet, attacked)]
        lines.append(f"| {title} | {' | '.join(cells)} | {attacked['p99'] / quiet['p99']:.2f} |")
    machine = result["environment"]
    total, own = machine["cores"], result["server_cores"]
    memory = _thirds(result["memory_bytes"])
    if "engine_memory_bytes" in result:
        memory += f"; of its engine alone {_thirds(result['engine_memory_bytes'])}"
    made = result.get("attacks")
    who = f"{sum(made.values()):,} attacks ({', '.join(made)})" if made else "all attackers"
    cores = f"{own} cores for the server and {total - own} for users and attackers" if own else f"{total} cores for all"
    return "\n".join(lines) + (
        f"\n\n`{result['command']}`: {result['users']} users and {who} in {result['minutes']:.3g} minutes, in turns "
        f"of {result['window_s']:g} s. Largest memory of the server {memory}. {BUILTIN}, {machine['processor']}, "
        f"{cores}, {record.made_at([machine])}.\n"
    )


def _thirds(nbytes: dict[str, int]) -> str:
    return (
        f"{nbytes['first_third'] / 1e6:.0f} MB in the first third and {nbytes['last_third'] / 1e6:.0f} MB in the last"
    )


def main() -> None:
    """Soak, and record the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--window", type=float, default=WINDOW_S, help="seconds with attackers, and as many without")
    parser.add_argument("--attacks", nargs="*", default=[], help="these attacks alone: leave, words, many, long, ...")
    parser.add_argument("--server-cores", type=int, help="cores of the server alone; by default half; 0: all share all")
    parser.add_argument("--threads", type=int, help="threads of the engine; by default those of transect serve")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "soak.json")
    options = parser.parse_args()
    here = len(os.sched_getaffinity(0))
    cores = (here // 2 if here >= 4 else 0) if options.server_cores is None else options.server_cores
    if cores >= here:
        parser.error("--server-cores leaves no core for users and attackers")
    head = {
        "command": record.command("benchmarks/server/soak.py"),
        "environment": record.environment(("llguidance",)),
        "server_cores": cores,
        "threads": options.threads,
        "kv_cache_bytes": KV_BYTES,
    }
    names = options.attacks or list(attacks("http://host:0"))

    def keep(found: dict[str, Any]) -> None:
        record.write(options.out, {**head, **found})
        print(json.dumps(found), flush=True)

    serve = [] if options.threads is None else ["--threads", str(options.threads)]
    soak(options.minutes, options.users, options.window, names, cores, serve, keep)


if __name__ == "__main__":
    main()
