"""A whole flow with a tiny model: trained, measured by the engine, released on a real server, watched, promoted."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from commands import run_here
from tiny_llm import save_tiny_llm

import transect

FLOW = """
name = "tiny"
[data]
files = ["rows.jsonl"]
test_share = 0.2
[train]
run = "run.toml"
[gate]
engine = {threads = 1}
[gate.perplexity]
gain = 0.0
[gate.exam]
measure = "task"
file = "exam.jsonl"
check = "contains"
max_tokens = 4
worse = 0.9
[gate.size]
most = "1MB"
[release]
server = "SERVER"
share = 0.5
[watch]
requests = 8
looks = 2
every_s = 0.1
errors = 0.9
refusals = 0.9
disliked = 0.9
"""
RUN = """
model = "../model"
task = "lora"
steps = 8
device = "cpu"
threads = 1
eval_every = 4
save_every = 1
log_to = []
[data]
seq_len = 128
micro_batch = 512
[optimizer]
learning_rate = 3e-3
[lora]
rank = 4
"""


def write_flow(folder, server: str) -> None:
    folder.mkdir()
    draw = random.Random(1)
    rows = [{"question": f"{draw.random()} and {number}?", "answer": f"{number}!"} for number in range(50)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "exam.jsonl").write_text(
        "".join(json.dumps({"question": f"{draw.random()}", "answer": "!"}) + "\n" for _ in rows[:6])
    )
    (folder / "flow.toml").write_text(FLOW.replace("SERVER", server))
    (folder / "run.toml").write_text(RUN)


class Serving:
    """A server in a process of its own, and users who like every answer."""

    def __init__(self, folder) -> None:
        log = (folder / "server.log").open("w")
        command = [sys.executable, "-m", "transect", "serve", str(folder / "model"), "--port", "0", "--enable-lora"]
        command += ["--allowed-lora-dir", str(folder), "--capture-dir", str(folder / "captures")]
        command += ["--max-num-seqs", "4", "--threads", "1"]
        self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.address = ""
        while not self.address:
            assert self.process.poll() is None, (folder / "server.log").read_text()
            words = (folder / "server.log").read_text().split()
            found = [word for word in words if word.startswith("http://127.0.0.1:")]
            self.address = found[0].rstrip(",;/") if found else ""
            time.sleep(0.05)
        while httpx.get(f"{self.address}/health").status_code != 200:
            time.sleep(0.05)
        self._ended = threading.Event()
        self._users = threading.Thread(target=self._ask)
        self._users.start()

    def _ask(self) -> None:
        number = 0
        with httpx.Client(base_url=self.address, timeout=60) as client:
            while not self._ended.wait(0.01):
                number += 1
                message = {"role": "user", "content": f"hi {number}"}
                body = {"model": "tiny", "user": f"u{number}", "max_tokens": 2, "messages": [message]}
                answer = client.post("/v1/chat/completions", json=body)
                if answer.is_success:
                    client.post("/v1/feedback", json={"id": answer.json()["id"], "thumb": "up"}).raise_for_status()
                else:
                    self._ended.wait(0.2)  # nothing is released yet

    def close(self) -> None:
        self._ended.set()
        self._users.join()
        self.process.terminate()
        self.process.wait()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flow")
    (folder / "model").mkdir()
    save_tiny_llm(folder / "model")
    return folder


@pytest.fixture(scope="module")
def serving(place):
    found = Serving(place)
    yield found
    found.close()


def test_a_model_is_made_judged_released_watched_and_promoted(place, serving, monkeypatch) -> None:
    monkeypatch.chdir(place / "model")  # names of models in a run are relative to where the command runs
    write_flow(place / "first", serving.address)
    file = str(place / "first" / "flow.toml")
    planned = json.loads(run_here("flow", "run", file, "--plan", "--json").stdout)
    assert [each["action"] for each in planned] == ["run"] * 7
    done = run_here("flow", "run", file)
    assert done.returncode == 0, done.stderr
    assert "tiny-v1 is the current version" in done.stdout
    state = json.loads(run_here("flow", "show", file, "--json").stdout)
    assert [step["state"] for step in state["steps"]] == ["done"] * 7 and not state["running"]
    gate = state["steps"][2]["outcome"]["figures"]
    assert gate["perplexity"]["candidate"] < gate["perplexity"]["current"]
    released = httpx.get(f"{serving.address}/v1/releases/tiny").json()
    assert [(each["model"], each["share"]) for each in released["versions"]] == [("tiny-v1", 1.0)]
    lineage = json.loads((place / "first" / "registry" / "tiny-v1" / "lineage.json").read_text())
    assert lineage["data"]["version"] == state["steps"][0]["outcome"]["outputs"]["version"]
    assert lineage["settings"]["lora"]["rank"] == 4 and lineage["code"]["transect"]
    again = json.loads(run_here("flow", "run", file, "--json").stdout)
    assert all(step["kept"] for step in again["steps"])
    assert all(
        each["action"] == "skip" for each in json.loads(run_here("flow", "run", file, "--plan", "--json").stdout)
    )

    options = ["dir=flows/grid", "train.continue_current=true", 'train.grid={"optimizer.learning_rate" = [1e-3, 3e-3]}']
    grid = run_here("flow", "run", file, "--json", *(word for option in options for word in ("--set", option)))
    train = json.loads(grid.stdout)["steps"][1]["outcome"]
    assert train["figures"]["runs"] == 2 and "optimizer.learning_rate" not in train["reason"]
    assert train["outputs"]["start"] == "tiny-v1" and train["reason"].startswith("learning_rate=")

    worse = run_here("flow", "run", file, "--set", "gate.exam.least=0.99")
    assert worse.returncode == 1
    assert "1 of 3 checks against ../model failed: exam: 0% right of 6" in worse.stdout.replace("\n", " ")


@pytest.mark.prove
def test_a_kill_in_any_step_changes_no_result(place, serving, monkeypatch) -> None:
    """In a process of its own, which is killed some time after each step has begun."""
    environment = {**os.environ, "PYTHONPATH": str(Path(transect.__file__).parents[1])}
    monkeypatch.chdir(place / "model")
    results = []
    for name in ("calm", "killed"):
        folder = place / name
        write_flow(folder, serving.address)
        killed = set() if name == "killed" else {"data", "train", "gate", "register", "release", "watch", "promote"}
        code = None
        while code is None:
            command = [sys.executable, "-m", "transect", "flow", "run", str(folder / "flow.toml")]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
            while (code := process.poll()) is None:
                running = begun(folder / "flows" / "tiny" / "events.jsonl") - killed
                if running:
                    killed |= running
                    time.sleep(0.3 if running & {"train", "watch"} else 0)
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    code = process.returncode
                    break
                time.sleep(0.005)
            code = None if code == -signal.SIGKILL else code
            assert code in (None, 0), process.stderr.read()
        lineage = json.loads((folder / "registry" / "tiny-v1" / "lineage.json").read_text())
        states = json.loads((folder / "registry" / "tiny.json").read_text())
        versions = [path.name for path in (folder / "registry").iterdir() if path.is_dir()]
        del lineage["data"]["files"]  # paths
        results.append((lineage["digest"], lineage["data"], states["current"], versions))
    assert results[0] == results[1]


def begun(events) -> set[str]:
    """The steps that have started, by the events."""
    if not events.exists():
        return set()
    lines = [json.loads(line) for line in events.read_text().splitlines() if line.endswith("}")]
    return {line["step"] for line in lines if line["event"] == "start"}
