"""Kill and stop replicas of a server at random tokens of requests of all kinds, and compare every byte.

    python benchmarks/checks/fail_over.py [--kills 1000] [--model smollm2-135m] [--minutes 30] [--each 2] [--out FILE]

One server with three replicas runs all the time. Every round sends requests of five kinds at once, drawn from those of
``transect/bench/same_answers.py``; when one of them has a random number of its tokens, one of the living replicas is
killed (``kill -9``) or, a third of the time, stopped (SIGSTOP), so that it lives and does nothing. A second one is hit
at a random token of another request, unless ``--each 1``. All answers are compared with those of an undisturbed round.
Writes benchmarks/results/cpu/fail_over.json after every round, and continues the count of a file that is there: run it
as often as it takes.

The longest gap between two events of a stream stands beside its prediction: the time until a signal is noticed, and the
prefill of the longest prompt and answer at the measured rate. Gaps are counted of rounds in which other programs had
less than a tenth of the machine, apart for rounds with a stop and without one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

import _paths  # noqa: F401
from benchmarks import record
from transect.bench.same_answers import KINDS, Answer, ask

HUNG_AFTER_S, NOTICED_S, WATCHED_S = 2.0, 0.05, 0.3
"""When a silent replica is replaced; how long an ended one and a silent one take beyond that, by the code."""
REPLICAS = 3
AT_ONCE = 5
"""Requests of a round, each of another kind."""
BACK_WAIT_S = 600.0
MOST_OTHERS = 0.1
"""Share of the machine that other programs have at the most in a round whose gaps count."""


class Others:
    """Share of the machine that other programs use, from /proc/stat and the times of this process and its children."""

    def __init__(self) -> None:
        self.before = self._read()

    def share(self) -> float:
        """Return the share since the last call, between 0 and 1."""
        before, self.before = self.before, self._read()
        total, foreign = (now - then for now, then in zip(self.before, before, strict=True))
        return max(0.0, foreign / total) if total else 0.0

    def _read(self) -> tuple[int, int]:
        """Read the ticks of all cores so far, and those used by programs outside this one's session."""
        ticks = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        busy, session = sum(ticks) - ticks[3] - ticks[4], os.getsid(0)
        for each in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = each.read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[3]) == session:
                busy -= sum(map(int, fields[11:15]))
        return sum(ticks), busy


async def living(client: httpx.AsyncClient) -> list[int]:
    """Process ids of the replicas that live."""
    found: list[int] = (await client.get("/health")).json()["engine_pids"]
    return found


async def calm_round(client: httpx.AsyncClient) -> dict[str, Answer]:
    """Collect undisturbed answers."""
    answers = await asyncio.gather(*(ask(client, *request) for request in KINDS.values()))
    return dict(zip(KINDS, answers, strict=True))


async def hit_round(
    client: httpx.AsyncClient, rng: random.Random, calm: dict[str, Answer], most: int
) -> dict[str, Any]:
    """Send the requests of a round, and at the most ``most`` signals; what came of it."""
    kinds = rng.sample(list(KINDS), AT_ONCE)
    pids = await living(client)
    rng.shuffle(pids)
    sent: dict[str, str] = {}
    hit: set[int] = set()

    def hit_at(kind: str, pid: int) -> Callable[[Answer], None]:
        at = rng.randint(1, max(1, calm[kind].pieces - 1))
        how = signal.SIGSTOP if rng.random() < 1 / 3 else signal.SIGKILL

        def seen(answer: Answer) -> None:
            if answer.pieces >= at and kind not in sent:
                sent[kind] = how.name
                hit.add(pid)
                os.kill(pid, how)

        return seen

    hitting = {kind: hit_at(kind, pid) for kind, pid in zip(kinds, pids[1 : 1 + most], strict=False)}
    requests = [ask(client, *KINDS[kind], hitting.get(kind, lambda answer: None)) for kind in kinds]
    found = await asyncio.gather(*requests, return_exceptions=True)
    answers = dict(zip(kinds, found, strict=True))
    broken = [kind for kind, each in answers.items() if isinstance(each, BaseException) or not each.clean]
    differing = [kind for kind, each in answers.items() if kind not in broken and not each.same_as(calm[kind])]
    errors = [repr(each) for each in found if isinstance(each, BaseException)]
    gaps = [each.longest_gap_s for each in found if isinstance(each, Answer) and each.pieces > 1]
    await until_replaced(client, hit)
    return {
        "signals": list(sent.values()),
        "answers": len(answers),
        "broken": broken,
        "differing": differing,
        **({"errors": errors} if errors else {}),
        "longest_gap_s": round(max(gaps, default=0.0), 3),
    }


async def until_replaced(client: httpx.AsyncClient, hit: set[int]) -> None:
    """Wait until all replicas live, and none of them is one that got a signal: a stopped one lives until it is
    noticed."""
    until = time.monotonic() + BACK_WAIT_S
    while time.monotonic() < until:
        pids = await living(client)
        if len(pids) == REPLICAS and hit.isdisjoint(pids):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"the replicas are not back after {BACK_WAIT_S:g} s")


async def prefill_rate(client: httpx.AsyncClient) -> float:
    """Measure tokens per second of a long prompt whose answer is one token."""
    body = {"prompt": list(range(1000, 1800)), "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return 800 / (time.perf_counter() - began)


async def run(url: str, arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    until = time.monotonic() + 60 * arguments.minutes
    # A connection that the server closes after five idle seconds must not be taken for the next request just then.
    limits = httpx.Limits(keepalive_expiry=1.0)
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False, limits=limits) as client:
        calm = await calm_round(client)
        again = await calm_round(client)
        assert all(again[kind].same_as(calm[kind]) for kind in KINDS), "calm rounds differ"
        assert all(each.status == 200 for each in calm.values()), {k: each.value for k, each in calm.items()}
        longest = max(each.longest_gap_s for each in calm.values() if each.pieces > 1)
        result["runs"].append(
            record.environment() | {"calm_longest_gap_s": longest, "prefill_tokens_per_s": await prefill_rate(client)}
        )
        others = Others()
        while result.get("signals", 0) < arguments.kills and time.monotonic() < until:
            rng = random.Random(f"{arguments.seed} {len(result['each'])}")
            others.share()
            found = await hit_round(client, rng, calm, arguments.each)
            found["others"] = round(others.share(), 3)
            result["each"].append(found)
            summarize(result)
            record.write(arguments.out, result)
            said = f"{time.strftime('%H:%M:%S')} {result['signals']:5d} {' '.join(found['signals']):16s}"
            print(f"{said} gap {found['longest_gap_s']:6.2f} s, others {found['others']:.0%}", flush=True)
            if found["broken"] or found["differing"]:
                print(found, flush=True)


def summarize(result: dict[str, Any]) -> None:
    """Add the sums over all rounds."""
    each, runs = [round_ for round_ in result["each"] if round_["signals"]], result["runs"]
    signals = [name for one in each for name in one["signals"]]
    result["signals"] = len(signals)
    result["kills"], result["stops"] = signals.count("SIGKILL"), signals.count("SIGSTOP")
    result["answers"] = sum(one["answers"] for one in each)
    for name in ("broken", "differing"):
        result[name] = sum(len(one[name]) for one in each)
    fastest = max(run["prefill_tokens_per_s"] for run in runs)
    tokens = 400  # the longest prompt and answer of KINDS
    for name, noticed in (("SIGKILL", NOTICED_S), ("SIGSTOP", HUNG_AFTER_S + WATCHED_S)):
        stopped = name == "SIGSTOP"
        quiet = [one for one in each if ("SIGSTOP" in one["signals"]) == stopped]
        quiet = [one for one in quiet if one.get("others", 1.0) < MOST_OTHERS]
        if quiet:
            gaps = record.summary([one["longest_gap_s"] for one in quiet])
            result[f"gap_{name}_s"] = gaps | {"predicted": round(noticed + tokens / fastest, 3)}
    result["longest_gap_s"] = max((one["longest_gap_s"] for one in each), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--each", type=int, default=2, help="signals of a round")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "fail_over.json")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python benchmarks/checks/fail_over.py",
        "model": arguments.model,
        "replicas": REPLICAS,
    }
    result |= {"model": arguments.model, "runs": [], "each": []}
    if arguments.out.exists():
        result = json.loads(arguments.out.read_text())
    command = [
        sys.executable,
        "-m",
        "transect",
        "serve",
        arguments.model,
        "--port",
        "0",
        "--data-parallel-size",
        str(REPLICAS),
    ]
    command += ["--kv-cache-tokens", "8192", "--no-prefix-caching", "--hung-after", f"{HUNG_AFTER_S:g}"]
    paths = [str(record.ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    try:
        ready = server.stdout.readline()
        assert " ready on " in ready, "the server did not start"
        asyncio.run(run(ready.split(" ready on ")[1].split()[0], arguments, result))
    finally:
        server.terminate()
        server.wait(30)
    if result["broken"] or result["differing"]:
        sys.exit(f"{result['broken']} answers were broken and {result['differing']} differed")


if __name__ == "__main__":
    main()
