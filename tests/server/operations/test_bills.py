"""The bill of a request from the logs of several engines, one of which dies."""

import contextlib
import json
import os
import signal

import httpx
import pytest
from stub_server import PATIENCE_S, StubServer
from tiny_llm import save_tiny_llm

TOKENS = 80


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(folder)
    found = StubServer(folder, "--data-parallel-size", "2")
    yield found
    found.stop()


def bill_of(server, name):
    return httpx.get(f"{server.url}/v1/requests/{name}/bill", timeout=PATIENCE_S).json()


def check_sums(bill):
    for span in (bill["ttft"], bill["decode"]):
        assert sum(span["parts_ms"].values()) == pytest.approx(span["ms"])


def test_a_request_that_another_engine_continued_has_one_bill(server):
    """Each engine has a stream. One engine dies, the other continues its stream, and the bill has both engines."""
    body = {"model": "m", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as stack:
        streams = []
        for number in range(2):
            request = {**body, "prompt": f"{number} of two"}
            answer = httpx.stream("POST", f"{server.url}/v1/completions", json=request, timeout=PATIENCE_S)
            lines = (line for line in stack.enter_context(answer).iter_lines() if line.startswith("data: {"))
            begun = [json.loads(next(lines)[6:])["id"] for _ in range(5)]
            streams.append((begun[0], lines))
        os.kill(httpx.get(f"{server.url}/health").json()["engine_pids"][0], signal.SIGKILL)
        for _, lines in streams:
            assert all("error" not in json.loads(line[6:]) for line in lines)
    bills = [bill_of(server, name) for name, _ in streams]
    assert sorted(bill["engines"] for bill in bills) == [1, 2]
    for bill in bills:
        assert bill["output_tokens"] == TOKENS and bill["finish_reason"] == "length"
        check_sums(bill)


def test_prompts_of_one_request_on_several_engines_have_a_bill_each(server):
    answer = server.complete([f"{number} of six" for number in range(6)], max_tokens=9).json()
    bill = bill_of(server, answer["id"])
    assert len(bill["parts"]) == 6 and bill["output_tokens"] == answer["usage"]["completion_tokens"] == 54
    assert bill["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    for part in bill["parts"]:
        check_sums(part)
