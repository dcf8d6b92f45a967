"""The live view: its shares add up, and it says who waits and why."""

import json

import httpx
import pytest
from commands import run_here
from decision_logs import log_for
from small_engine import make, recorded_batches, request

from transect.engine.scheduling.decisions import Planned
from transect.explain.engine.live import view
from transect.explain.engine.log import build
from transect.explain.engine.sources import NoServer
from transect.explain.engine.work import StepWork


class Ticking:
    def __init__(self):
        self.time = 0.0

    def now(self):
        self.time += 0.01
        return self.time


@pytest.fixture
def core(tmp_path):
    core = make(max_num_seqs=2)
    core.scheduler.clock = Ticking()
    core.decisions = log_for(core, file=tmp_path / "log.bin")
    for name in "abcd":
        core.add(request(name, first=ord(name), max_tokens=12))
    return core


def test_who_waits_and_why(core):
    for _ in range(4):
        core.step()
    log = build(core.decisions.ring.records())
    found = view(log, StepWork.of(log.header, None))
    assert sum(found.parts.values()) == pytest.approx(1.0)
    assert (found.running, found.waiting) == (2, 2) and 0 < found.kv_used < 1
    assert [each.request_id for each in found.waiters] == ["c", "d"]
    assert "max_num_seqs" in found.waiters[0].reason and list(found.reasons) == ["places"]
    assert any("max_num_seqs" in line for line in found.lines())


def test_only_the_window_counts(core, tmp_path):
    recorded_batches(core)
    core.decisions.close()
    log = build(core.decisions.ring.records())
    work = StepWork.of(log.header, None)
    assert view(log, work, window=0.1).steps < view(log, work).steps == len(log.steps)
    idle = view(log, work, now=core.scheduler.clock.now() + 50)
    assert idle.steps == 0 and idle.parts["idle"] == 1.0 and not idle.waiters
    file = str(tmp_path / "log.bin")
    assert run_here("top", file, "--once").stdout.startswith("last ")
    assert json.loads(run_here("top", file, "--json").stdout)["waiting"] == 0
    assert "no server answers at http://127.0.0.1:9" in run_here("top", "http://127.0.0.1:9", "--once").stderr


def test_an_idle_server_is_idle(core):
    """The newest steps of one that has done its work lie in the past, and nothing runs."""
    recorded_batches(core)
    log = build(core.decisions.ring.records(), idle=60.0)
    found = view(log, StepWork.of(log.header, None))
    assert found.steps == 0 and found.parts["idle"] == 1.0
    assert (found.running, found.waiting, found.kv_used) == (0, 0, 0.0)


def test_a_step_that_has_not_ended_is_no_idle_time(core):
    for _ in range(3):
        core.step()
    records = core.decisions.ring.records()
    while not isinstance(records[-1], Planned):
        records.pop()
    log = build(records, idle=5.0)
    found = view(log, StepWork.of(log.header, None))
    assert found.parts["under way"] * found.seconds == pytest.approx(5.0, abs=0.1)
    assert sum(found.parts.values()) == pytest.approx(1.0)


def test_top_asks_again(core, monkeypatch):
    """A server that has run no step, is not there, and comes back; of its engines each is shown."""
    core.step()
    ring = bytes(core.decisions.ring)
    shown = {"x-decisions-complete": "true", "x-decisions-idle": "1.5", "x-decisions-engines": "2"}
    answers = [
        httpx.Response(404, json={"error": {"code": "no_decisions"}}),
        httpx.ConnectError("refused"),
        httpx.Response(200, content=ring, headers=shown),
        httpx.Response(200, content=ring, headers=shown),
        httpx.Response(401, text="no key"),
    ]
    asked = []

    def get(url, params, **options):
        asked.append((url, params["engine"]))
        if isinstance(answers[0], Exception):
            raise answers.pop(0)
        return answers.pop(0)

    monkeypatch.setattr(httpx, "get", get)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    done = run_here("top", "http://server/v1")
    assert done.returncode == 2 and "no key" in done.stderr, done.stderr  # another key is nothing to wait for
    assert done.stdout.count("asked again") == 2 and "no step has run yet" in done.stdout
    assert "engine 0\nlast" in done.stdout and "engine 1\nlast" in done.stdout
    assert [number for _, number in asked] == [0, 0, 0, 1, 0] and asked[0][0] == "http://server/v1/decisions"


def test_a_request_is_found_on_any_engine_of_a_server(core, monkeypatch):
    recorded_batches(core)
    ring = core.decisions.ring
    empty = {0: ring.header, 1: bytes(ring)}
    headers = {"x-decisions-complete": "true", "x-decisions-engines": "2"}
    monkeypatch.setattr(
        httpx, "get", lambda url, params, **rest: httpx.Response(200, content=empty[params["engine"]], headers=headers)
    )
    done = run_here("explain", "request", "http://server", "b")
    assert done.returncode == 0 and done.stdout.startswith("request b, choice 0"), done.stderr
    assert "decisions over" in run_here("explain", "replay", "http://server", "--engine", "1").stdout


@pytest.mark.parametrize("arguments", [("http://127.0.0.1:9",), ("127.0.0.1:9",), ("127.0.0.1:9", "--json")])
def test_a_dead_address_is_one_sentence_and_the_end(arguments):
    done = run_here("top", *arguments)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == (
        "transect: error: no server answers at http://127.0.0.1:9 (connection refused): start one with `transect "
        "serve`, or give the URL of one that runs\n"
    )


def test_a_silent_server_that_answered_before_is_asked_again(core, monkeypatch):
    recorded_batches(core)
    log = build(core.decisions.ring.records())
    looks = iter([[log], NoServer("gone"), ValueError("the end")])

    def open_logs(url, key):
        found = next(looks)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr("transect.explain.engine.sources.open_logs", open_logs)
    out = run_here("top", "http://127.0.0.1:9", "--every", "0.1", "--json").stdout
    assert [next(iter(json.loads(line))) for line in out.splitlines()] == ["seconds", "error"]


@pytest.mark.parametrize(
    ("key", "words"), [((), "asks for a key"), (("--api-key", "wrong"), "refuses this key")], ids=["none", "wrong"]
)
def test_a_server_with_a_key_says_how_to_give_it(key, words, monkeypatch):
    def get(url, *, headers, **_):
        assert headers == ({"Authorization": "Bearer wrong"} if key else {})
        return httpx.Response(401, json={"error": {"message": "a valid API key is needed"}})

    monkeypatch.delenv("TRANSECT_API_KEY", raising=False)
    monkeypatch.setattr(httpx, "get", get)
    for command in (("top", "http://host:1", "--once"), ("explain", "request", "http://host:1", "cmpl-1")):
        message = run_here(*command, *key).stderr
        assert (
            words in message and "(a valid API key is needed): give --api-key KEY, or set TRANSECT_API_KEY" in message
        )
