"""Kill and stop replicas of a server at random tokens of requests of all kinds, and compare every byte.

    python benchmarks/checks/fail_over.py [--kills 1000] [--model smollm2-135m] [--seed 1] [--minutes 30] [--out FILE]

One server with three replicas runs all the time. Every round sends requests of five kinds at once, drawn from those of
``transect/bench/same_answers.py``; when one of them has a random number of its tokens, one of the replicas is killed
(``kill -9``) or, a third of the time, stopped (SIGSTOP), so that it lives and does nothing. All answers are compared
with those of an undisturbed round. Writes benchmarks/results/cpu/fail_over.json after every round, and
continues the count of a file that is there: run it as often as it takes.

The longest gap between two events of a stream stands beside its prediction: the time until a signal is noticed, and the
prefill of the longest prompt and answer at the measured rate, on the cores that the starting replica leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

import _paths  # noqa: F401
from benchmarks import record
from transect.bench.same_answers import KINDS, Answer, ask

HUNG_AFTER_S, NOTICED_S, WATCHED_S = 2.0, 0.05, 0.3
"""When a silent replica is replaced; how long an ended one and a silent one take beyond that, by the code."""
AT_ONCE = 5
"""Requests of a round, each of another kind."""
BACK_WAIT_S = 600.0


def engines(server: int) -> list[int]:
    """The living engine processes of a server."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    found = []
    for pid in map(int, children):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if "frontends.process" in command and state not in "ZTX":
            found.append(pid)
    return found


async def calm_round(client: httpx.AsyncClient) -> dict[str, Answer]:
    """Collect undisturbed answers."""
    answers = await asyncio.gather(*(ask(client, *request) for request in KINDS.values()))
    return dict(zip(KINDS, answers, strict=True))


async def hit_round(
    client: httpx.AsyncClient, server: int, rng: random.Random, calm: dict[str, Answer]
) -> dict[str, Any]:
    """A round with one signal; what came of it."""
    kinds = rng.sample(list(KINDS), AT_ONCE)
    victim = kinds[0]
    at = rng.randint(1, max(1, calm[victim].pieces - 1))
    how = signal.SIGSTOP if rng.random() < 1 / 3 else signal.SIGKILL
    hit: list[int] = []

    def seen(answer: Answer) -> None:
        if answer.pieces >= at and not hit:
            hit.append(rng.choice(engines(server)))
            os.kill(hit[0], how)

    requests = [ask(client, *KINDS[kind], seen if kind == victim else lambda answer: None) for kind in kinds]
    found = await asyncio.gather(*requests, return_exceptions=True)
    answers = dict(zip(kinds, found, strict=True))
    broken = [kind for kind, each in answers.items() if isinstance(each, BaseException) or not each.clean]
    differing = [kind for kind, each in answers.items() if kind not in broken and not each.same_as(calm[kind])]
    gaps = [each.longest_gap_s for each in found if isinstance(each, Answer) and each.pieces > 1]
    return {
        "signal": how.name,
        "hit": bool(hit),
        "answers": len(answers),
        "broken": broken,
        "differing": differing,
        "longest_gap_s": round(max(gaps, default=0.0), 3),
    }


async def until_back(client: httpx.AsyncClient, least: int) -> None:
    """Wait until at least ``least`` replicas make progress."""
    until = time.monotonic() + BACK_WAIT_S
    while time.monotonic() < until:
        detail = (await client.get("/health")).json()["detail"] or ""
        found = re.match(r"(?:all )?(\d+)", detail)
        if found is not None and int(found[1]) >= least:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"the replicas are not back after {BACK_WAIT_S:g} s")


async def prefill_rate(client: httpx.AsyncClient) -> float:
    """Tokens a second of a long prompt, whose answer is one token."""
    body = {"prompt": list(range(1000, 1800)), "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return 800 / (time.perf_counter() - began)


async def run(server: subprocess.Popen[str], url: str, arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    until = time.monotonic() + 60 * arguments.minutes
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:
        calm = await calm_round(client)
        again = await calm_round(client)
        assert all(again[kind].same_as(calm[kind]) for kind in KINDS), "calm rounds differ"
        assert all(each.status == 200 for each in calm.values()), {k: each.value for k, each in calm.items()}
        longest = max(each.longest_gap_s for each in calm.values() if each.pieces > 1)
        result["runs"].append(
            record.environment() | {"calm_longest_gap_s": longest, "prefill_tokens_per_s": await prefill_rate(client)}
        )
        while (count := sum(each["hit"] for each in result["each"])) < arguments.kills and time.monotonic() < until:
            rng = random.Random(f"{arguments.seed} {len(result['each'])}")
            found = await hit_round(client, server.pid, rng, calm)
            result["each"].append(found)
            summarize(result)
            record.write(arguments.out, result)
            print(f"{count + found['hit']:5d} {found['signal']:8s} gap {found['longest_gap_s']:6.2f} s", flush=True)
            assert not found["broken"] and not found["differing"], found
            await until_back(client, 2)


def summarize(result: dict[str, Any]) -> None:
    """The sums over all rounds."""
    each, runs = [round_ for round_ in result["each"] if round_["hit"]], result["runs"]
    result["signals"] = len(each)
    result["kills"] = sum(one["signal"] == "SIGKILL" for one in each)
    result["stops"] = sum(one["signal"] == "SIGSTOP" for one in each)
    result["answers"] = sum(one["answers"] for one in each)
    for name in ("broken", "differing"):
        result[name] = sum(len(one[name]) for one in each)
    slowest = min(run["prefill_tokens_per_s"] for run in runs)
    tokens = 400  # the longest prompt and answer of KINDS
    for name, noticed in (("SIGKILL", NOTICED_S), ("SIGSTOP", HUNG_AFTER_S + WATCHED_S)):
        gaps = [one["longest_gap_s"] for one in each if one["signal"] == name]
        if gaps:
            result[f"gap_{name}_s"] = record.summary(gaps) | {"predicted": round(noticed + tokens / slowest, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "fail_over.json")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python benchmarks/checks/fail_over.py",
        "model": arguments.model,
        "replicas": 3,
    }
    result |= {"model": arguments.model, "runs": [], "each": []}
    if arguments.out.exists():
        result = json.loads(arguments.out.read_text())
    command = [sys.executable, "-m", "transect", "serve", arguments.model, "--port", "0", "--data-parallel-size", "3"]
    command += ["--kv-cache-tokens", "8192", "--no-prefix-caching", "--hung-after", f"{HUNG_AFTER_S:g}"]
    paths = [str(record.ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    try:
        ready = server.stdout.readline()
        assert " ready on " in ready, "the server did not start"
        asyncio.run(run(server, ready.split(" ready on ")[1].split()[0], arguments, result))
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main()
