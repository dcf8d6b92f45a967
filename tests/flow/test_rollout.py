"""The canary: its rule, counts that survive restarts, and a server that is away, refuses or forgets."""

import json
import random
import threading
from http.server import HTTPServer

import pytest
from killed_flows import SmallServer, prepare, quick_steps

from transect.flow.chain import FlowChain
from transect.flow.rollout.drifted import DriftCondition
from transect.flow.rollout.remote import RemoteServer, ServerUnreachable
from transect.flow.rollout.rule import PROMOTE, ROLL_BACK, WAIT, CanaryBars, look
from transect.flow.rollout.tally import VersionTally
from transect.flow.settings import FlowConfig
from transect.flow.watch.captures import CaptureFiles


def counts(requests: int, **more: float) -> dict[str, float]:
    return {"requests": requests, "answers": requests, **more}


def test_a_candidate_that_is_as_good_is_promoted_at_the_last_look() -> None:
    one, other, bars = counts(200, refusals=2), counts(1800, refusals=20), CanaryBars(errors=0.05, refusals=0.05)
    assert look(one, other, bars, 0.95, last=False).action == WAIT
    found = look(one, other, bars, 0.95, last=True)
    assert found.action == PROMOTE and "refusals 1% of 200, current 1% of 1800" in found.reason


def test_a_candidate_that_is_surely_worse_is_rolled_back_at_once() -> None:
    found = look(counts(40, refusals=20), counts(400), CanaryBars(), 0.95, last=False)
    assert found.action == ROLL_BACK and found.reason.startswith("worse than the current version: refusals 50% of 40")
    assert found.rates["refusals"]["candidate"] == [20, 40]


def test_too_little_known_is_no_promotion() -> None:
    found = look(counts(10), counts(10), CanaryBars(), 0.95, last=True)
    assert found.action == ROLL_BACK and "not shown to be as good" in found.reason
    silent = look(counts(900), counts(900), CanaryBars(disliked=0.2), 0.95, last=True)
    assert silent.action == ROLL_BACK and "disliked unknown (none)" in silent.reason


def test_bars_for_feedback_form_and_time() -> None:
    bars = CanaryBars(errors=None, refusals=None, disliked=0.1)
    liked, not_liked = counts(90, judged=90, liked=80), counts(90, judged=90, liked=30.5)
    assert look(liked, liked, CanaryBars(errors=None, refusals=None, disliked=0.2), 0.95, last=True).action == PROMOTE
    assert look(not_liked, liked, bars, 0.95, last=False).action == ROLL_BACK
    slow = {"timed": 100.0, "within 0.5": 20.0, "within 1": 30.0}
    fast = {"timed": 100.0, "within 0.5": 95.0, "within 1": 100.0}
    timed = CanaryBars(errors=None, refusals=None, slow=0.1, slow_s=0.8)
    found = look(slow, fast, timed, 0.95, last=False)
    assert found.action == ROLL_BACK and found.rates["slow"]["candidate"] == [70, 100]
    broken = counts(90, formed=80, malformed=60)
    formed = CanaryBars(errors=None, refusals=None, malformed=0.1)
    assert look(broken, counts(90, formed=80, malformed=0), formed, 0.95, last=False).action == ROLL_BACK


def test_equal_versions_are_rolled_back_early_as_seldom_as_the_level_says() -> None:
    draw = random.Random(0)
    alarms = 0
    for _ in range(300):
        one, other, bars = counts(0, refusals=0), counts(0, refusals=0), CanaryBars(errors=0.0, refusals=0.0)
        for _ in range(4):
            for side in (one, other):
                side["requests"] += 50
                side["answers"] += 50
                side["refusals"] += sum(draw.random() < 0.2 for _ in range(50))
            if look(one, other, bars, 1 - 0.1 / 4, last=False).action == ROLL_BACK:
                alarms += 1
                break
    assert alarms < 30


def test_counts_survive_a_restart_of_the_server_and_a_kill_of_the_flow(tmp_path) -> None:
    tally = VersionTally(tmp_path / "counts.json")
    assert not tally.add({"new": {"requests": 500}}, 0)  # what was before does not count
    assert tally.add({"new": {"requests": 510}, "old": {"requests": 3}}, 2)
    tally.write()
    tally = VersionTally(tmp_path / "counts.json")
    assert tally.add({"new": {"requests": 4}, "old": {"requests": 5}}, 3)  # the server has started again
    assert tally.counts == {"new": {"requests": 14}, "old": {"requests": 5}} and tally.seconds == 5
    assert not tally.add({"new": {"requests": 4}, "old": {"requests": 5}}, 1)


@pytest.fixture
def small(monkeypatch):
    for name, empty in (("adapters", set()), ("releases", {}), ("requests", type(SmallServer.requests)())):
        monkeypatch.setattr(SmallServer, name, empty)
    server = HTTPServer(("127.0.0.1", 0), SmallServer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def chain(folder, *settings: str) -> FlowChain:
    steps = quick_steps()
    return FlowChain(FlowConfig.from_toml(folder / "flow.toml", settings, steps), steps, tell=lambda line: None)


def test_a_server_that_forgot_the_current_version_gets_it_again(small, tmp_path) -> None:
    prepare(tmp_path / "flow", small.server_port)
    assert [state.state for state in chain(tmp_path / "flow").run()] == ["done"] * 7
    assert SmallServer.releases == {"m": {"m-v1": 1.0}}
    SmallServer.adapters.clear()
    SmallServer.releases.clear()
    assert chain(tmp_path / "flow").plan()[-1].action == "repeat"
    assert "does not answer" in chain(tmp_path / "flow", "release.server=http://127.0.0.1:1").plan()[-1].reason
    states = chain(tmp_path / "flow").run()
    assert [state.kept for state in states] == [True] * 6 + [False]
    assert SmallServer.releases == {"m": {"m-v1": 1.0}} and SmallServer.adapters == {"m-v1"}


def test_a_flow_that_is_done_stays_done_when_another_promotes_a_later_version(small, tmp_path) -> None:
    prepare(tmp_path / "flow", small.server_port)
    chain(tmp_path / "flow").run()
    (tmp_path / "flow" / "rows.jsonl").write_text(
        (tmp_path / "flow" / "rows.jsonl").read_text().replace("is what", "was")
    )
    chain(tmp_path / "flow", "dir=flows/later").run()
    assert SmallServer.releases == {"m": {"m-v2": 1.0}}
    before = json.loads((tmp_path / "flow" / "registry" / "m.json").read_text())
    prepare_rows = (tmp_path / "flow" / "rows.jsonl").read_text().replace("was", "is what")
    (tmp_path / "flow" / "rows.jsonl").write_text(prepare_rows)
    assert [state.kept for state in chain(tmp_path / "flow").run()] == [True] * 7
    assert json.loads((tmp_path / "flow" / "registry" / "m.json").read_text()) == before


def test_a_dead_server_is_said_and_nothing_is_lost(small, tmp_path) -> None:
    prepare(tmp_path / "flow", 1)
    with pytest.raises(
        ServerUnreachable, match=r"the server at http://127.0.0.1:1 does not answer .*run the flow again"
    ):
        chain(tmp_path / "flow").run()
    prepared = [each.action for each in chain(tmp_path / "flow").plan()]
    assert prepared == ["skip"] * 4 + ["resume"] + ["run"] * 2 or prepared == ["skip"] * 4 + ["run"] * 3
    states = chain(tmp_path / "flow", f"release.server=http://127.0.0.1:{small.server_port}").run()
    assert [state.kept for state in states] == [True] * 4 + [False] * 3
    assert json.loads((tmp_path / "flow" / "registry" / "m.json").read_text())["current"] == "m-v1"


def test_what_the_server_refuses_is_passed_on(small) -> None:
    server = RemoteServer(f"http://127.0.0.1:{small.server_port}")
    with pytest.raises(ValueError, match=r"refuses PUT /v1/releases/m: \{'x'\} are not served"):
        server.release("m", {"x": 1.0})
    assert server.weights("nothing") == {} and server.base() == "base"
    server.close()


def test_a_bad_canary_is_rolled_back_with_the_reason(small, tmp_path, monkeypatch) -> None:
    prepare(tmp_path / "flow", small.server_port)
    real = RemoteServer.counts

    def refusing(self, name):
        found = real(self, name)
        for version, each in found.items():
            each["refusals"] = each["answers"] if version == "m-v1" else 0.0
        return found

    monkeypatch.setattr(RemoteServer, "counts", refusing)
    states = chain(tmp_path / "flow", "watch.refusals=0.1", "watch.requests=90").run()
    assert (
        states[-1].state == "stopped" and "m-v1 was rolled back to the base: worse than" in states[-1].outcome["reason"]
    )
    assert SmallServer.releases == {"m": {"base": 1.0}}
    history = json.loads((tmp_path / "flow" / "registry" / "m.json").read_text())["history"]
    assert history[-1]["state"] == "rejected" and "refusals" in history[-1]["reason"]
    assert [state.kept for state in chain(tmp_path / "flow", "watch.refusals=0.1", "watch.requests=90").run()] == [
        True
    ] * 7


def captured(folder, model: str, words: str, refusing: float = 0.0, count: int = 60) -> None:
    """Capture answers of a version to prompts of these words."""
    draw, lines = random.Random(f"{model} {words}"), []
    for number in range(count):
        prompt = " ".join(draw.choices(words.split(), k=draw.randint(3, 9)))
        answer = "I'm sorry, but I can't help with that." if draw.random() < refusing else "It is " + prompt
        messages = [{"role": "user", "content": prompt}]
        record = {"kind": "request", "model": model, "time": 1e9 + number, "messages": messages}
        lines.append(json.dumps({**record, "answers": [{"text": answer}]}).encode())
    CaptureFiles(folder).append(lines)


def test_drift_forbids_a_promotion(small, tmp_path) -> None:
    prepare(tmp_path / "flow", small.server_port)
    folder = tmp_path / "flow" / "captures"
    watched = ("watch.captures=captures", "watch.drift_window=64")
    with pytest.raises(ValueError, match=r"watch\.captures: there is no directory"):
        chain(tmp_path / "flow", *watched).run()
    folder.mkdir(mode=0o700)
    few = chain(tmp_path / "flow", *watched).run()
    assert [state.state for state in few[-2:]] == ["done", "stopped"]
    assert "drift is not known: 0 captured requests of m-v1, 16 are needed" in few[-2].outcome["reason"]
    captured(folder, "base", "how do I pay this bill please")
    captured(folder, "m-v1", "how do I pay this bill please", refusing=0.7)
    found = chain(tmp_path / "flow", *watched, "watch.most_s=99").run()
    assert "drift in 60 requests: RefusalDrift (p = " in found[-2].outcome["reason"]
    assert SmallServer.releases == {"m": {"base": 1.0}}
    assert found[-2].outcome["figures"]["drift"]["RefusalDrift"] < 1e-6
    allowed = chain(tmp_path / "flow", *watched, 'watch.drift=["PromptDrift", "PromptLengthDrift"]').run()
    assert allowed[-1].state == "done" and "; no drift" in allowed[-2].outcome["reason"]
    assert SmallServer.releases == {"m": {"m-v1": 1.0}}


def test_a_reference_of_a_good_time_is_compared_with(tmp_path) -> None:
    captured(tmp_path / "good", "old", "one two three four five")
    captured(tmp_path / "now", "new", "one two three four five")
    captured(tmp_path / "now", "other", "considerably longer vocabulary everywhere nowadays")
    alarms = ("PromptDrift", "PromptLengthDrift")
    condition = DriftCondition(captures=tmp_path / "now", reference=tmp_path / "good", alarms=alarms)
    assert condition.check("new", "old")[0] == ""
    reason, tests = condition.check("other", "old")
    assert reason.startswith("drift in 60 requests: PromptLengthDrift (p = ") and " before and " in reason
    assert tests["RefusalDrift"] == 1.0


def test_settings_of_drift_are_checked(tmp_path) -> None:
    prepare(tmp_path / "flow", 1)
    for setting, message in (
        ('watch.drift=["PromptsDrift"]', "watch.drift has no alarm 'PromptsDrift': choose from AnswerDrift"),
        ("watch.reference=good", "set watch.captures"),
        ("watch.false_alarms=2", "must be between 0 and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            chain(tmp_path / "flow", setting)


def test_a_whole_model_is_no_version_of_a_release(tmp_path) -> None:
    """It is said before the training, not after it."""
    (tmp_path / "rows.jsonl").write_text('{"question": "a?", "answer": "b"}\n')
    (tmp_path / "run.toml").write_text('model = "../model"\ntask = "finetune"\nsteps = 1\n')
    table = 'name = "m"\n[data]\nfiles = ["rows.jsonl"]\n[train]\nrun = "run.toml"\n[gate.size]\nmost = "1MB"\n'
    (tmp_path / "flow.toml").write_text(table)
    assert FlowChain(FlowConfig.from_toml(tmp_path / "flow.toml")).plan()[1].work.startswith("train finetune")
    (tmp_path / "flow.toml").write_text(table + "[release]\n")
    with pytest.raises(
        ValueError, match=r"'finetune' trains a whole model, .* adapters .* set task to lora in run.toml"
    ):
        FlowChain(FlowConfig.from_toml(tmp_path / "flow.toml")).plan()
