"""A rank of the engine is killed at random moments under load: every client gets one clean end, nothing is left."""

import concurrent.futures
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest
from tiny_llm import save_tiny_llm

PATIENCE_S = 200
BODY = {"model": "m", "prompt": "hello", "max_tokens": 240, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def serving(model):
    """A server on two ranks: its process and its address."""
    arguments = ["serve", model, "--port", "0", "--served-model-name", "m", "--tensor-parallel-size", "2"]
    arguments += ["--dtype", "float32", "--no-native", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "transect", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        ready = process.stdout.readline()
        assert " ready on " in ready, process.stderr.read()
        yield process, ready.split(" ready on ")[1].split()[0]
    finally:
        process.kill()
        process.wait()


def end_of(url, stream):
    """How a request ends for its client: ``done``, or the code of its one error."""
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": stream}, timeout=PATIENCE_S) as response:
        if not stream or response.status_code != 200:
            body = json.loads(response.read())
            return body["error"]["code"] if "error" in body else "done"
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    values = [json.loads(event) for event in events if event != "[DONE]"]
    errors = [value["error"]["code"] for value in values if "error" in value]
    finished = [choice["finish_reason"] for value in values for choice in value.get("choices", ())]
    assert len(errors) <= 1, errors
    if errors:
        assert "error" in values[-1]  # nothing comes after it
        return errors[0]
    assert finished[-1] == "length"
    return "done"


@pytest.mark.prove
def test_ten_kills_under_load(tmp_path):
    save_tiny_llm(tmp_path)
    moments = random.Random(20)
    killed = 0
    for _ in range(10):
        with serving(str(tmp_path)) as (process, url), concurrent.futures.ThreadPoolExecutor(6) as clients:
            family = psutil.Process(process.pid).children(recursive=True)
            ranks = [each for each in family if "transect.parallel.rank" in " ".join(each.cmdline())]
            assert len(ranks) == 1
            begun = time.monotonic()
            threading.Timer(moments.uniform(0.0, 1.5), os.kill, (ranks[0].pid, signal.SIGKILL)).start()
            ends = [clients.submit(end_of, url, stream=bool(i % 2)) for i in range(6)]
            said = [end.result(PATIENCE_S) for end in ends]
            assert set(said) <= {"done", "engine_dead"}, said
            killed += "engine_dead" in said
            health = httpx.get(f"{url}/health", timeout=PATIENCE_S) if "engine_dead" in said else None
            assert health is None or (health.status_code == 503 and "was killed by signal 9" in health.text)
            assert process.wait(PATIENCE_S) == 1, time.monotonic() - begun
            errors = process.stderr.read()
            assert errors.count("transect: error:") == 1 and "was killed by signal 9" in errors
            assert "Traceback" not in errors
            psutil.wait_procs(family, PATIENCE_S)
            assert not [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert killed >= 5  # most moments are under load
