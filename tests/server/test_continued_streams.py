"""Answers that another replica continues: what their clients are told, and that no byte is lost over HTTP."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def approximate(engine):
    """Mark the fourth update as one of an engine whose bits are not those of the first."""
    stream = type(engine).stream

    async def marked(*arguments, **options):
        count = 0
        async for update in stream(engine, *arguments, **options):
            count += 1
            update.approximate = count == 4
            yield update

    engine.stream = marked


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream_options": {"include_usage": True}}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 99}),
    ],
)
async def test_a_comment_and_a_field_say_that_bits_are_not_promised(client, approximate, path, body):
    response = await client.post(path, json=body | {"stream": True})
    assert response.status_code == 200
    comments = [line for line in response.text.splitlines() if line.startswith(":")]
    assert comments == [": continued by another replica, whose numbers may differ in the last bits"]
    assert response.text.count('"continued":"approximately"') == 1
    body.pop("stream_options", None)
    whole = (await client.post(path, json=body)).json()
    assert whole["usage"]["continued"] == "approximately"


async def test_other_answers_say_nothing_of_it(client):
    for stream in (True, False):
        response = await client.post("/v1/completions", json={"prompt": "hi", "stream": stream})
        assert response.status_code == 200 and "continued" not in response.text


@pytest.mark.prove
def test_fifty_signals_at_random_tokens_change_no_byte(tmp_path):
    """Three replicas of a real model over HTTP, with requests of all kinds."""
    out = tmp_path / "fail_over.json"
    command = [sys.executable, "benchmarks/checks/fail_over.py", "--kills", "50", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=3000)
    found = json.loads(out.read_text())
    assert found["signals"] == 50 and found["stops"] > 5
    assert found["broken"] == found["differing"] == 0


@pytest.mark.prove
def test_the_drill_and_a_reload_drop_nothing(tmp_path):
    drill = [sys.executable, "-m", "transect", "drill", "--svg", str(tmp_path / "drill.svg")]
    done = subprocess.run(drill, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "6 of 6 answers have the same bytes" in done.stdout, done.stdout + done.stderr
    settings = tmp_path / "settings.yaml"
    settings.write_text("max-num-seqs: 5\n")
    serve = [sys.executable, "-m", "transect", "serve", "--port", "0", "--config", str(settings)]
    server = subprocess.Popen(serve, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().split(" ready on ")[1].split()[0]
        before = httpx.get(f"{url}/health").json()["engine_pids"]
        body = {"prompt": "Once", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
            lines = response.iter_lines()
            next(lines)
            settings.write_text("max-num-seqs: 7\n")
            subprocess.run([sys.executable, "-m", "transect", "reload", url], check=True, timeout=300)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert httpx.get(f"{url}/health").json()["engine_pids"] != before
    finally:
        server.terminate()
        assert server.wait(60) == 0
