"""The bill of a request from the logs of several engines, one of which dies."""

import contextlib
import json
import os
import signal
import time

import httpx
import pytest
from stub_server import PATIENCE_S
from undisturbed import undisturbed

TOKENS = 80
KEY = "key-of-alice"
HEADERS = {"Authorization": f"Bearer {KEY}"}


def bill_of(server, name):
    return httpx.get(f"{server.url}/v1/requests/{name}/bill", headers=HEADERS, timeout=PATIENCE_S).json()


def health(server):
    return httpx.get(f"{server.url}/health", timeout=PATIENCE_S).json()


def check_sums(bill):
    for span in (bill["ttft"], bill["decode"]):
        assert sum(span["parts_ms"].values()) == pytest.approx(span["ms"])


def test_a_request_that_another_engine_continued_has_one_bill(server):
    """Each engine has a stream. One engine dies, the other continues its stream, and the bill has both engines."""
    bills = undisturbed(lambda: bills_after_a_kill(server), lambda bills: any(bill["engines"] == 2 for bill in bills))
    assert sorted(bill["engines"] for bill in bills) == [1, 2]
    for bill in bills:
        assert bill["output_tokens"] == TOKENS and bill["finish_reason"] == "length"
        check_sums(bill)


def bills_after_a_kill(server):
    """Bills of two streams, one on each engine; the first engine is killed, unless its stream has ended before."""
    body = {"model": "m", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as stack:
        streams = []
        for number in range(2):
            request = {**body, "prompt": f"{number} of two"}
            path = f"{server.url}/v1/completions"
            answer = httpx.stream("POST", path, json=request, headers=HEADERS, timeout=PATIENCE_S)
            lines = (line for line in stack.enter_context(answer).iter_lines() if line.startswith("data: {"))
            begun = [json.loads(next(lines)[6:])["id"] for _ in range(5)]
            streams.append((begun[0], lines))
        os.kill(health(server)["engine_pids"][0], signal.SIGKILL)
        for _, lines in streams:
            assert all("error" not in json.loads(line[6:]) for line in lines)
    while len(health(server)["engine_pids"]) < 2:
        time.sleep(0.05)
    return [bill_of(server, name) for name, _ in streams]


def test_prompts_of_one_request_on_several_engines_have_a_bill_each(server):
    answer = server.complete([f"{number} of six" for number in range(6)], KEY, max_tokens=9).json()
    bill = bill_of(server, answer["id"])
    assert len(bill["parts"]) == 6 and bill["output_tokens"] == answer["usage"]["completion_tokens"] == 54
    assert bill["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    for part in bill["parts"]:
        check_sums(part)
