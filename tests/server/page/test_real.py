"""The page in front of real engines: a replica that is killed, exact branches, and the pictures of the pages."""

import os
import signal
import time

import httpx
import psutil
import pytest
from page_pictures import LARGEST, configure, make, model_server

pytestmark = pytest.mark.prove
QUESTION = "Tell me a long story about a lighthouse."


@pytest.fixture(scope="module")
def url():
    with model_server("--data-parallel-size", "2") as url:
        yield url


def busiest(pids):
    """The process that computes most of these, over a moment."""

    def used():
        return {pid: sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids}

    before = used()
    time.sleep(0.5)
    return max(pids, key=lambda pid: used()[pid] - before[pid])


def test_a_replica_is_killed_while_a_chat_streams(new_page, url, ask):
    body = {"messages": [{"role": "user", "content": QUESTION}], "seed": 11, "max_tokens": 600, "temperature": 0.8}
    whole = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).json()["choices"][0]["message"]["content"]
    page = new_page(url)
    configure(page, seed="11", max_tokens="600", temperature="0.8")
    answer = ask(page, QUESTION, wait=False)
    page.wait_for_function("() => document.querySelector('chat-answer').message.answer.tokenIds.length > 20")
    os.kill(busiest(httpx.get(f"{url}/health").json()["engine_pids"]), signal.SIGKILL)
    answer.locator(".answer-footer").wait_for(timeout=200_000)
    assert page.evaluate("document.querySelector('chat-answer').message.answer.text") == whole
    assert answer.locator(".failure, .mark.continued").count() == 0  # equal bits are promised: nothing to see


def test_a_branch_of_a_model_is_exact(new_page, url, ask):
    page = new_page(url)
    configure(page, seed="3", max_tokens="60", temperature="1", presence_penalty="0.5")
    answer = ask(page, QUESTION)
    find = "document.querySelector('chat-answer').message.answer"
    whole = page.evaluate(find)
    answer.get_by_label("Tokens and their probabilities").click()
    page.locator(".tokens").focus()
    for key in ["ArrowRight"] * 20 + ["ArrowDown"]:
        page.keyboard.press(key)
    while "drawn" not in page.locator(".candidate.selected").inner_text():
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.get_by_text("Continued from token 21").wait_for()
    page.locator("chat-answer .answer-footer").wait_for()
    again = page.evaluate(find)
    assert again["tokenIds"] == whole["tokenIds"] and again["text"] == whole["text"]
    assert again["tokens"] == whole["tokens"]  # the log-probabilities too, to the bit


def test_the_pictures_of_the_pages_can_be_made(browser, url, tmp_path):
    pictures = make(browser, url, tmp_path)
    assert len(pictures) == 4 and all(0 < path.stat().st_size < LARGEST for path in pictures)
