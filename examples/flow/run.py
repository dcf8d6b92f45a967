r"""The whole life of a small model, on a CPU: made, judged, released, watched, corrected by its users, and made better.

A desk answers questions about capitals with a line of JSON. Its model is SmolLM2 with an adapter (``capitals.csv``):

1. ``first.toml``: a table becomes an adapter. It passes the gate, is a canary beside the base, and is promoted.
2. Users begin to ask about money. The watch notices that the questions have drifted from the training data.
3. Their corrections become preference pairs. ``second.toml`` trains on them, from the current adapter on, and is
   promoted.
4. ``broken.toml``: a table with answers of another form. The gate stops its model.
5. ``sneaky.toml``: a model that passes the gate, but refuses questions about money. The canary stops it.

The server is a real ``transect serve`` on this machine, and the users ask it by HTTP. All files are written below
``--dir``; run it again to continue where it was interrupted. Needs the built-in model (``transect pull smollm2-135m``).

    python examples/flow/run.py --dir runs/flow
"""

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from users import Users, questions

import transect
from transect.flow.picture import chain_state

HERE = Path(__file__).parent
ALARM = 3
"""Exit code of ``transect flow watch`` if it raises an alarm."""


def command(folder: Path, *arguments: str) -> int:
    """Run a command in a folder, and return its exit code."""
    print(f"\n$ transect {' '.join(arguments)}", flush=True)
    return subprocess.run([sys.executable, "-m", "transect", *arguments], cwd=folder, env=environment()).returncode


def environment() -> dict[str, str]:
    """Let children run this package with all cores, wherever they are started."""
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
    return {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(Path(transect.__file__).parents[1])}


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """Serve the base and all registered versions; yields the address."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    words = [sys.executable, "-m", "transect", "serve", "smollm2-135m", "--port", str(port), "--enable-lora"]
    words += ["--allowed-lora-dir", "registry", "--capture-dir", "captures", "--releases", "releases.json"]
    words += ["--max-model-len", "512", "--max-num-seqs", "16"]
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(words, cwd=folder, stderr=log, stdout=log, env=environment())
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, f"the server ended: see {folder / 'server.log'}"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{address}/health").is_success:
                    break
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait()


def run_flow(folder: Path, name: str, address: str, users: Users) -> int:
    """Run a flow, with users from the moment that its canary has traffic; returns the exit code."""
    words = ["flow", "run", f"{name}.toml", "--set", f"release.server={address}"]
    print(f"\n$ transect {' '.join(words)}", flush=True)
    process = subprocess.Popen([sys.executable, "-m", "transect", *words], cwd=folder, env=environment())
    while process.poll() is None:
        with contextlib.suppress(ValueError):  # it has written nothing yet
            states = {step["name"]: step["state"] for step in chain_state(folder / "flows" / name)["steps"]}
            if states["watch"] == "running":
                users.ask_until(lambda: process.poll() is not None)
        time.sleep(0.2)
    return process.wait()


def check(true: bool, what: str) -> None:
    print(f"{'ok' if true else 'NOT SO'}: {what}", flush=True)
    if not true:
        sys.exit(1)


def notice_the_drift(folder: Path, address: str, capitals: list[dict[str, str]], money: list[dict[str, str]]) -> None:
    """Ask what the model was trained on, then something else, and turn the corrections into pairs."""
    ours = ["captures", "--version", "capitals-v1"]
    watch = ["flow", "watch", *ours, "--reference", "capitals.csv", "--window", "40"]
    Users(address, "capitals", capitals, seed=1).ask(40)
    check(command(folder, *watch) == 0, "users ask what the model was trained on: no alarm")
    curious = Users(address, "capitals", money, seed=2)
    curious.ask(80)
    check(curious.disliked > 40, f"{curious.disliked} of 80 answers about money are disliked")
    check(command(folder, *watch) == ALARM, "the drift is noticed")
    check(command(folder, "flow", "feedback", *ours, "--out", "pairs.jsonl") == 0, "corrections become pairs")


def story(folder: Path) -> None:
    capitals, money = questions(folder / "capitals.csv"), questions(folder / "money.csv")
    with server(folder) as address:
        check(run_flow(folder, "first", address, Users(address, "capitals", capitals)) == 0, "the adapter is promoted")
        if not (folder / "pairs.jsonl").exists():
            notice_the_drift(folder, address, capitals, money)
        both = [*capitals, *money]
        code = run_flow(folder, "second", address, Users(address, "capitals", both, seed=3))
        check(code == 0, "the model that learned from its users is promoted")
        code = run_flow(folder, "broken", address, Users(address, "capitals", both, seed=4))
        check(code == 1, "the gate stops the model of a broken table")
        code = run_flow(folder, "sneaky", address, Users(address, "capitals", both, seed=5))
        check(code == 1, "the canary stops a model that refuses what the gate does not ask")

        happy = Users(address, "capitals", both, seed=6)
        happy.ask(40)
        check(happy.liked > 30, f"{happy.liked} of 40 answers of the current version are liked")


def main() -> None:
    parser = argparse.ArgumentParser(description="From a table to a model that its users have made better.")
    parser.add_argument("--dir", type=Path, default=Path("runs/flow"), help="where everything is written")
    options = parser.parse_args()
    began = time.monotonic()
    options.dir.mkdir(parents=True, exist_ok=True)
    for file in HERE.iterdir():
        if file.is_file():
            shutil.copy(file, options.dir / file.name)
    (options.dir / "registry").mkdir(exist_ok=True)
    story(options.dir.resolve())
    for name in ("first", "second", "broken", "sneaky"):
        command(options.dir, "flow", "show", f"flows/{name}")
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
