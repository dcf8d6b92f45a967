"""Two hosts on one machine: network namespaces joined by a link that is made slow, and cut.

    python benchmarks/cluster/two_hosts.py [--only collectives,serve,train,fleet] [--out FILE]

Each host is a network namespace with an address of its own; the link between them is a pair of virtual interfaces.
``tc`` limits it to 20 Mbit/s each way and, where the kernel has ``netem``, delays packets by 5 ms (slow), or drops all
packets (cut).

  collectives  `transect bench collectives` under torchrun --nnodes 2, on the fast and on the slow link
  serve        `transect serve --tensor-parallel-size 2` under torchrun --nnodes 2: one model over both hosts; after the
               link is cut, a request ends with an error and the server with exit code 1
  train        `transect train` under torchrun --nnodes 2: the losses are those of two ranks on one host
  fleet        a router with a replica beside it and one on the other host; the link is cut while streams run (no
               packet tells the router), every byte is compared, and the replica comes back with the link

Needs root, `ip` and `tc`, and exits with 0 and a reason without them. Writes
benchmarks/results/cpu/two_hosts.json. Takes about three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from fleet_load import HELPERS, STUB, prepare

import _paths  # noqa: F401
from benchmarks import record

sys.path.append(str(HELPERS))
from tiny_llm import save_tiny_llm
from training_runs import write_text

from transect.bench.same_answers import COMPLETIONS, ask

HOSTS = {"transect-a": "10.77.0.1", "transect-b": "10.77.0.2"}
LINK = "tsct0"
"""Name of the interface in both namespaces."""
SLOW, CUT = "slow", "cut"
WITH_NETEM = {SLOW: ("netem", "delay", "5ms", "rate", "20mbit"), CUT: ("netem", "loss", "100%")}
WITHOUT = {SLOW: ("tbf", "rate", "20mbit", "burst", "16kb", "latency", "100ms"),
           CUT: ("tbf", "rate", "8kbit", "burst", "20", "limit", "20")}  # fmt: skip
"""Queueing disciplines. Without netem a bucket that is smaller than any packet drops all of them."""
START_S = 120.0
TRAINING = """
model = "{model}"
run_dir = "{run}"
steps = 8
accumulate = 2
device = "cpu"
threads = 1
[data]
train = ["{text}"]
seq_len = 64
micro_batch = 128
[parallel]
data = 2
"""


def sh(*words: str, check: bool = True) -> None:
    """Run a short command."""
    subprocess.run(words, check=check, capture_output=True, timeout=30)


def refusal() -> str:
    """Return the reason why namespaces cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(missing)} (iproute2) are not installed" if missing else ""


@contextlib.contextmanager
def hosts() -> Iterator[None]:
    """Make both hosts and the link between them."""
    a, b = HOSTS
    try:
        for name in HOSTS:
            sh("ip", "netns", "add", name)
        sh("ip", "link", "add", LINK, "netns", a, "type", "veth", "peer", "name", LINK, "netns", b)
        for name, address in HOSTS.items():
            sh("ip", "-n", name, "addr", "add", f"{address}/24", "dev", LINK)
            for each in ("lo", LINK):
                sh("ip", "-n", name, "link", "set", each, "up")
        yield
    finally:
        for name in HOSTS:
            sh("ip", "netns", "del", name, check=False)


def shape(how: str | None = None) -> None:
    """Make the link slow, cut it, or, without an argument, make it fast again; in both directions."""
    for name in HOSTS:
        sh("ip", "netns", "exec", name, "tc", "qdisc", "del", "dev", LINK, "root", check=False)
        if how is not None:
            sh("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", LINK, "root", *kinds()[how])


@functools.cache
def kinds() -> dict[str, tuple[str, ...]]:
    """Return the disciplines that this kernel has."""
    name = next(iter(HOSTS))
    probe = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "loss", "0%"]
    there = subprocess.run(probe, capture_output=True).returncode == 0
    sh("ip", "netns", "exec", name, "tc", "qdisc", "del", "dev", "lo", "root", check=False)
    return WITH_NETEM if there else WITHOUT


def on(host: str, *words: str, **options: Any) -> subprocess.Popen[str]:
    """Start a program on a host."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1"}
    command = ["ip", "netns", "exec", host, *words]
    return subprocess.Popen(command, text=True, env=environment, start_new_session=True, **options)


def torchrun(port: int, *words: str, **options: Any) -> list[subprocess.Popen[str]]:
    """Start one rank on each host."""
    address = next(iter(HOSTS.values()))
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    run += ["--master-addr", address, "--master-port", str(port)]
    return [on(host, *run, "--node-rank", str(rank), "-m", *words, **options) for rank, host in enumerate(HOSTS)]


def outputs(started: list[subprocess.Popen[str]], limit_s: float = 200.0) -> list[str]:
    """Wait for programs, and return what they printed."""
    found = [each.communicate(timeout=limit_s)[0] for each in started]
    assert all(each.returncode == 0 for each in started), found
    return found


PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


def collectives() -> dict[str, Any]:
    """Measure an all-reduce on the fast and on the slow link."""
    found = {}
    for number, (name, how) in enumerate({"fast": None, "slow": SLOW}.items()):
        shape(how)
        sizes = ("--min-bytes", "8", "--max-bytes", "1MiB", "--factor", "64", "--iterations", "5")
        words = ("transect", "bench", "collectives", "all_reduce", "--device", "cpu", "--json", *sizes)
        printed = outputs(torchrun(29610 + number, *words, **PIPES))[0]
        rows = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])["rows"]
        found[name] = {str(row["bytes"]): row["seconds"] for row in rows if row["in_place"]}
        assert not any(row["wrong"] for row in rows)
    shape()
    return {"all_reduce_s": found}


def train(folder: Path) -> dict[str, Any]:
    """Train two ranks on one host, on two hosts, and on two hosts with a slow link."""
    found: dict[str, Any] = {}
    for number, (name, how) in enumerate({"one host": None, "fast": None, "slow": SLOW}.items()):
        shape(how)
        run, file = folder / f"run-{number}", folder / f"{number}.toml"
        file.write_text(TRAINING.format(model=folder / "model", run=run, text=folder / "text.txt"))
        began = time.monotonic()
        if not number:
            outputs([on(next(iter(HOSTS)), sys.executable, "-m", "transect", "train", str(file), **PIPES)])
        else:
            outputs(torchrun(29630 + number, "transect", "train", str(file), **PIPES))
        lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
        losses = [line["loss"] for line in lines if line["kind"] == "step"]
        found[name] = {"seconds": time.monotonic() - began, "losses": losses}
    shape()
    assert found["one host"]["losses"] == found["fast"]["losses"] == found["slow"]["losses"], found
    return found


def serve(model: str) -> dict[str, Any]:
    """Serve one model over both hosts, on each link and on a cut one."""
    words = ("transect", "serve", model, "--tensor-parallel-size", "2", "--device", "cpu", "--host", "0.0.0.0")
    words += ("--port", "8470", "--hung-after", "10", "--dtype", "float32", "--no-native", "--threads", "1")
    started = torchrun(29620, *words, **PIPES)
    body = {"prompt": "hello", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    ask_it = "import httpx, json, sys; print(httpx.post(sys.argv[1], json=json.loads(sys.argv[2]), timeout=90).text)"

    def answer() -> tuple[float, Any]:
        began = time.monotonic()
        url = "http://127.0.0.1:8470/v1/completions"
        done = on(next(iter(HOSTS)), sys.executable, "-c", ask_it, url, json.dumps(body), **PIPES)
        printed = done.communicate(timeout=100)[0]
        return time.monotonic() - began, json.loads(printed.strip().splitlines()[-1]) if "{" in printed else printed

    try:
        assert started[0].stdout is not None
        lines = []
        for line in started[0].stdout:
            lines.append(line)
            if " ready on " in line:
                break
        else:
            raise AssertionError("".join(lines))
        fast_s, fast = answer()
        shape(SLOW)
        slow_s, slow = answer()
        assert slow["choices"] == fast["choices"], (fast, slow)
        shape(CUT)
        cut_s, cut = answer()
        error = cut.get("error", {}).get("message", str(cut)) if isinstance(cut, dict) else str(cut)[-300:]
        assert "choices" not in cut, cut
        return {"fast_s": fast_s, "slow_s": slow_s, "cut_s": cut_s, "cut": error, "text": fast["choices"][0]["text"]}
    finally:
        shape()
        for each in started:
            each.terminate()
        for each in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.communicate(timeout=30)
            each.kill()


def fleet(folder: Path, model: str) -> dict[str, Any]:
    """Cut the link to one of two replicas while streams run."""
    a, b = HOSTS
    file = folder / "fleet.toml"
    file.write_text(
        f'name = "two"\nfolder = "{folder}"\n[engine]\nmodel = "{model}"\n[server]\nport = 8480\n'
        f'[replicas]\nengine_module = "{STUB}"\n[links]\nhost = "{HOSTS[a]}"\nport = 8481\nlost_after_s = 2\n'
    )
    cluster = (sys.executable, "-m", "transect", "cluster")
    logs = [(folder / f"{name}.log").open("w") for name in ("router", "near", "far")]
    started = [on(a, *cluster, "router", str(file), stdout=logs[0], stderr=logs[0])]
    started += [
        on(host, *cluster, "replica", str(file), "--name", name, stdout=log, stderr=log)
        for host, name, log in ((a, "near", logs[1]), (b, "far", logs[2]))
    ]
    try:
        client = on(a, sys.executable, __file__, "--client", **PIPES, stdin=subprocess.PIPE)
        assert client.stdout is not None and client.stdin is not None
        for line in client.stdout:
            if line.startswith("cut"):
                shape(CUT)
            elif line.startswith("join"):
                shape()
            elif line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError("\n".join(each.read_text() for each in folder.glob("*.log")))
    finally:
        shape()
        for each in started:
            each.terminate()
        for each in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(30)
            each.kill()
        for log in logs:
            log.close()


async def client() -> None:
    """Act as the client on the router's host: stream, ask for the cut, compare, ask for the link, and report."""
    url = "http://127.0.0.1:8480"
    body = {"prompt": list(range(65, 90)), "max_tokens": 300, "ignore_eos": True, "stream": True}

    async def ready(count: int) -> float:
        began = time.monotonic()
        while time.monotonic() - began < START_S:
            with contextlib.suppress(httpx.HTTPError):
                replicas = (await http.get("/v1/fleet")).json()["replicas"]
                if sum(each["state"] == "ready" for each in replicas) == count:
                    return time.monotonic() - began
            await asyncio.sleep(0.1)
        raise AssertionError(f"no {count} replicas")

    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        await ready(2)
        calm = await asyncio.gather(*(ask(http, COMPLETIONS, body | {"seed": seed}) for seed in range(6)))

        async def cut() -> None:
            await asyncio.sleep(0.5)
            print("cut", flush=True)

        requests = (ask(http, COMPLETIONS, body | {"seed": seed}) for seed in range(6))
        found, _ = await asyncio.gather(asyncio.gather(*requests), cut())
        same = sum(each.same_as(before) for each, before in zip(found, calm, strict=True))
        moved = (await http.get("/v1/fleet")).json()["handed_over"]
        lost = await ready(1)
        print("join", flush=True)
        back = await ready(2)
    gap = max(each.longest_gap_s for each in found)
    print(
        json.dumps(
            {"same": same, "of": len(found), "moved": moved, "longest_gap_s": gap, "lost_s": lost, "back_s": back}
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["collectives", "serve", "train", "fleet"]
    parser.add_argument("--only", type=lambda text: text.split(","), default=names)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "two_hosts.json")
    arguments = parser.parse_args()
    if arguments.client:
        asyncio.run(client())
        return
    if reason := refusal():
        print(f"not run: {reason}")
        return
    prepare(0.01)
    load = os.getloadavg()[0]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, hosts():
        folder = Path(name)
        model = folder / "model"
        model.mkdir()
        save_tiny_llm(model)
        write_text(folder / "text.txt")
        steps = {
            "collectives": collectives,
            "serve": lambda: serve(str(model)),
            "train": lambda: train(folder),
            "fleet": lambda: fleet(folder, str(model)),
        }
        for each in arguments.only:
            print(each, flush=True)
            found[each] = steps[each]()
            print(f"  {found[each]}", flush=True)
        links = {name: " ".join(words) for name, words in kinds().items()}
    result = {"command": record.command("benchmarks/cluster/two_hosts.py"), "hosts": 2, "link": links}
    result["load_average"] = load
    record.write(arguments.out, result | record.environment() | found)


if __name__ == "__main__":
    main()
