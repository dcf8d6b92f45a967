"""Captures over HTTP: consent, redaction, all APIs, deletion, feedback, and a disk that is full."""

import asyncio
import dataclasses
import json
import stat
from contextlib import asynccontextmanager

import httpx
import pytest

from transect.flow.watch import captures
from transect.flow.watch.models import embed_at, judge_at
from transect.flow.watch.records import Observation
from transect.flow.watch.report import DriftReport, DriftTest, write_report
from transect.server.app import create_app
from transect.server.options import ServerOptions

from ..conftest import running

CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Write to ann@example.com"}]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "captures"


@asynccontextmanager
async def serving(engine, folder, **settings):
    """A client of a server that captures; when the block ends, everything is written."""
    options = ServerOptions(model_names=("fake-model",), capture_dir=str(folder), **settings)
    app = create_app(engine, options)
    try:
        yield httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")
    finally:
        app.state.serving.captures.close()


def kept(folder, kind="request"):
    return [record for record in captures.read(folder) if record["kind"] == kind]


async def metric(client, name):
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def chat(client, headers=None, **more):
    reply = await client.post("/v1/chat/completions", json={"messages": CHAT, **more}, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply


async def settle(client):
    """Wait until the recorder has tried everything that came before."""
    assert (await client.post("/v1/feedback", json={"id": "0" * 32, "thumb": "up"})).status_code == 404


async def test_every_api_is_captured_whole_and_streamed(engine, folder):
    engine.reply = "Call +49 170 1234567 or bob@example.org."
    asked = {
        "chat": ("/v1/chat/completions", {"messages": CHAT, "n": 2}),
        "completions": ("/v1/completions", {"prompt": ["Mail ann@example.com", "Hi"], "max_tokens": 50}),
        "responses": ("/v1/responses", {"input": "Mail ann@example.com", "instructions": "Be kind."}),
        "messages": ("/v1/messages", {"messages": CHAT[1:], "max_tokens": 50, "metadata": {"user_id": "u1"}}),
        "embeddings": ("/v1/embeddings", {"input": ["Mail ann@example.com", "Hi"], "user": "u1"}),
    }
    ids = {}
    async with serving(engine, folder, capture_inputs=True) as client:
        for api, (path, body) in asked.items():
            for stream in [False] if api == "embeddings" else [False, True]:
                reply = await client.post(path, json=body | ({"stream": True} if stream else {}))
                assert reply.status_code == 200 and reply.headers.get("x-transect-captured") == "yes", reply.text
                ids[api, stream] = reply.text
    found = kept(folder)
    assert [(each["api"], each["stream"]) for each in found] == list(ids)
    for each in found:
        whole = json.dumps(each)
        assert "example" not in whole and "1234567" not in whole and "[email]" in whole, each
        assert each["model"] == "fake-model" and each["adapter"] == "" and each["prompt_tokens"] > 0
        if each["api"] == "embeddings":
            assert each["inputs"] == ["Mail [email]", "Hi"] and each["user"]
            continue
        assert each["id"] in ids[each["api"], each["stream"]]
        assert [answer["text"] for answer in each["answers"]] == ["Call [phone] or [email]."] * len(each["answers"])
        if each["api"] == "completions":
            assert each["prompts"] == ["Mail [email]", "Hi"] and [a["prompt"] for a in each["answers"]] == [0, 1]
        else:
            assert each["messages"][-1] == {"role": "user", "content": each["messages"][-1]["content"]}
            assert "[email]" in each["messages"][-1]["content"]
    assert len({each["user"] for each in found}) == 2  # none, and u1 as a hash
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize(
    ("consent", "headers", "body", "captured"),
    [
        ("opt-out", {}, {}, True),
        ("opt-out", {"X-Transect-Capture": "no"}, {}, False),
        ("opt-out", {"X-Transect-Capture": "yes"}, {"store": False}, False),
        ("opt-out", {"Sec-GPC": "1"}, {}, False),
        ("opt-in", {}, {}, False),
        ("opt-in", {"X-Transect-Capture": "yes"}, {}, True),
        ("opt-in", {}, {"store": True}, True),
    ],
)
async def test_consent(engine, folder, consent, headers, body, captured):
    async with serving(engine, folder, capture_consent=consent) as client:
        reply = await chat(client, headers, **body)
        assert ("x-transect-captured" in reply.headers) == captured
        assert await metric(client, "transect_capture_without_consent_total") == (not captured)
    assert len(kept(folder)) == captured


async def test_nothing_is_captured_unless_a_directory_is_named(client):
    reply = await client.post("/v1/completions", json={"prompt": "Hi"})
    assert "x-transect-captured" not in reply.headers
    assert (await client.post("/v1/feedback", json={"id": "a" * 32, "thumb": "up"})).status_code == 404
    assert (await client.get("/v1/captures")).status_code == 404


async def test_a_share_is_sampled_and_unfinished_answers_are_not_kept(engine, folder):
    async with serving(engine, folder, capture_rate=0.5) as client:
        replies = [await client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}) for _ in range(64)]
        marked = [reply.json()["id"][5:] for reply in replies if "x-transect-captured" in reply.headers]
    assert [each["id"] for each in kept(folder)] == marked and 10 < len(marked) < 54
    async with serving(engine, folder) as client:
        assert (await client.post("/v1/completions", json={"prompt": "NAN"})).status_code == 500
        assert await metric(client, 'transect_capture_dropped_total{model_name="fake-model",reason="unfinished"}') == 1
    assert len(kept(folder)) == len(marked)


async def test_forms_and_their_failures_are_noted(engine, folder):
    engine.reply = '{"a": 1}'
    body = {"response_format": {"type": "json_object"}}
    async with serving(engine, folder) as client:
        await chat(client, **body)
        await chat(client, **body, max_tokens=4)
        await chat(client)
    answers = [(each["form"], each["answers"][0].get("valid")) for each in kept(folder)]
    assert answers == [("json_object", True), ("json_object", False), ("", None)]


async def test_a_search_and_a_beam_search_are_one_record_each(engine, folder, tmp_path):
    releases = tmp_path / "releases.json"
    releases.write_text('{"prod": {"versions": [{"model": "fake-model"}]}}')
    engine.script = lambda text, choice, seed: "4"
    async with serving(engine, folder, releases=str(releases)) as client:
        for stream in (False, True):
            await chat(client, model="prod", search={"method": "majority", "n": 3}, stream=stream)
        engine.script = None
        await chat(client, model="prod", use_beam_search=True, n=2, max_tokens=2)
        assert await metric(client, "transect_version_requests_total") == 3
        assert await metric(client, "transect_version_answers_total") == 4
    answers = [[answer["text"] for answer in each["answers"]] for each in kept(folder)]
    assert answers[:2] == [["4"], ["4"]] and len(answers) == 3 and len(answers[2]) == 2


async def test_a_user_is_deleted(engine, folder):
    async with serving(engine, folder) as client:
        for user in ("ann", "bob"):
            for _ in range(2):
                last = await chat(client, user=user)
            said = {"id": last.json()["id"], "thumb": "up", "comment": "from ann@example.com"}
            assert (await client.post("/v1/feedback", json=said)).status_code == 200
        assert kept(folder, "feedback")[0]["comment"] == "from [email]"
        gone = await client.delete("/v1/captures", params={"user": "ann"})
        assert gone.json() == {"object": "captures.deletion", "user": "ann", "deleted": 3}
        left = {each["user"] for each in captures.read(folder)}
        assert left == {captures.user_hash(folder, "bob")} and len(kept(folder)) == 2
        assert (await client.post("/v1/feedback", json=said)).status_code == 200
    assert captures.delete_user(folder, "bob") == 4 and not list(captures.read(folder))


async def test_a_request_that_runs_while_its_user_is_deleted_is_not_kept(engine, folder):
    async with serving(engine, folder) as client:
        body = {"messages": [{"role": "user", "content": "HANG"}], "user": "ann"}
        running = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        while not engine.running:
            await asyncio.sleep(0.001)
        await client.delete("/v1/captures", params={"user": "ann"})
        engine.go.set()
        assert (await running).status_code == 200
    assert not kept(folder)


async def test_feedback_is_kept_for_captured_answers_alone(engine, folder):
    async with serving(engine, folder) as client:
        answer = (await chat(client)).json()["id"]
        refused = (await chat(client, store=False)).json()["id"]

        async def say(**body):
            reply = await client.post("/v1/feedback", json=body)
            return reply.status_code, reply.json().get("error", {}).get("code")

        assert await say(id=answer, correction="Better: bob@example.org", score=0.25) == (200, None)
        assert await say(id=refused, thumb="up") == (404, "answer_not_captured")
        assert await say(id=answer, choice=1, thumb="up") == (400, "invalid_value")
        assert await say(id=answer) == (400, "empty_feedback")
        assert await say(id="chatcmpl-1", thumb="up") == (400, "invalid_value")
        assert (await say(id=answer, score=2.0))[0] == 400 and (await say(id=answer, thumb="sideways"))[0] == 400
        for _ in range(15):
            assert await say(id=answer, thumb="down") == (200, None)
        assert await say(id=answer, thumb="down") == (400, "too_much_feedback")
    (first, *_) = kept(folder, "feedback")
    assert (first["correction"], first["score"], first["model"]) == ("Better: [email]", 0.25, "fake-model")
    async with serving(engine, folder) as client:  # another process finds them in the files
        reply = await client.post("/v1/feedback", json={"id": answer, "thumb": "up"})
        assert reply.json()["error"]["code"] == "too_much_feedback"


async def test_feedback_is_for_the_key_that_asked(engine, folder):
    keys = {"api_keys": ("one", "two"), "admin_api_keys": ("boss",)}
    head = {key: {"Authorization": f"Bearer {key}"} for key in ("one", "two", "boss")}
    async with serving(engine, folder, **keys) as client:
        body = {"id": (await chat(client, head["one"])).json()["id"], "thumb": "up"}
        codes = [(await client.post("/v1/feedback", json=body, headers=each)).status_code for each in head.values()]
        assert codes == [200, 404, 200]
        for method, path in (("GET", "/v1/captures"), ("DELETE", "/v1/captures?user=x")):
            assert [(await client.request(method, path, headers=each)).status_code for each in head.values()] == [
                403,
                403,
                200,
            ]
        assert (await client.get("/v1/captures", headers=head["boss"])).json()["state"] == "on"


async def test_a_full_disk_stops_the_capture_and_nothing_else(engine, folder):
    async with serving(engine, folder) as client:
        recorder = client._transport.app.state.serving.captures.recorder
        await chat(client)
        await settle(client)
        recorder.files._reserve = 2**60  # more than any disk has free
        await chat(client)
        await settle(client)
        state = (await client.get("/v1/captures")).json()
        assert state["state"] == "stopped" and "MiB are free" in state["problem"]
        assert await metric(client, "transect_capture_up") == 0
        assert await metric(client, 'transect_alarm{model_name="fake-model",name="CaptureStopped"}') == 1
        for _ in range(3):
            await chat(client)
        await settle(client)
        assert await metric(client, 'transect_capture_dropped_total{model_name="fake-model",reason="stopped"}') == 4
        recorder.files._reserve, recorder._retry_at = 0, 0.0
        again = (await chat(client)).json()["id"]
        assert (await client.post("/v1/feedback", json={"id": again, "thumb": "up"})).status_code == 200
        assert await metric(client, "transect_capture_up") == 1
    assert len(kept(folder)) == 2


async def test_a_queue_that_is_full_drops_and_never_waits(engine, folder, monkeypatch):
    async with serving(engine, folder) as client:
        recorder = client._transport.app.state.serving.captures.recorder
        monkeypatch.setattr("transect.server.capture.recorder.MOST_WAITING_BYTES", 100)
        await chat(client)
        assert await metric(client, 'transect_capture_dropped_total{model_name="fake-model",reason="queue"}') == 1
        monkeypatch.undo()
        await chat(client)
        assert recorder._waiting_bytes >= 0
    assert len(kept(folder)) == 1


def test_directories_that_others_can_read_are_refused(folder):
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(ValueError, match="chmod 700"):
        ServerOptions(model_names=("m",), capture_dir=str(folder))


async def test_the_newest_report_on_drift_is_in_the_metrics(engine, folder):
    tests = [
        DriftTest("refusals", 0.3, 1e-6, 1e-4, True, 0.0, 0.3),
        DriftTest("judge", 0.0, 0.5, 1e-4, False, 0.9, 0.9),
    ]
    async with serving(engine, folder) as client:
        assert "transect_drift" not in (await client.get("/metrics")).text
        (folder / "drift.json").write_text('{"tests": [{"name": "x"}], "time": 1, "windows": 1}')
        assert "transect_drift" not in (await client.get("/metrics")).text  # damaged
        write_report(folder, DriftReport(1.0, 2.0, 256, 1e-3, tests), 3)
        shown = (await client.get("/metrics")).text
    for line in (
        'transect_alarm{model_name="fake-model",name="RefusalDrift"} 1.0',
        'transect_alarm{model_name="fake-model",name="JudgeScoreDrop"} 0.0',
        'transect_drift_p_value{model_name="fake-model",test="judge"} 0.5',
        'transect_drift_windows_total{model_name="fake-model"} 3.0',
    ):
        assert line in shown
    assert shown.count("# TYPE transect_alarm ") == 1


def test_vectors_and_grades_come_from_a_server_and_are_not_captured(engine, options, folder):
    engine.reply, engine.max_model_len = "Grade: 4", 300
    app = create_app(engine, dataclasses.replace(options, capture_dir=str(folder), capture_inputs=True))
    with running(app) as address:
        vectors = embed_at(address)(["one", "four"])
        grades = judge_at(address)([Observation("asked", "said"), Observation("a" * 999, "said")])
    app.state.serving.captures.close()
    assert vectors.shape == (2, 4) and grades == [0.75, None] and not kept(folder)
