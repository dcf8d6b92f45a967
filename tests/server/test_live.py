"""The real server process, the real engine, the real model, the real ``openai`` client."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from undisturbed import undisturbed
from warm_processes import cold

HELLO = [{"role": "user", "content": "Count from one to ten in words."}]
LONG = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}, "temperature": 0}
PATIENCE_S = 200
PAGE = Path(__file__).resolve().parents[2] / "docs" / "serve" / "serving.md"


def wait_for(condition, what):
    """Poll until ``condition()`` is true; generous, because machines differ."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.05)


class Server:
    """A ``transect serve`` process."""

    def __init__(self, model, *options):
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [os.sys.executable, "-m", "transect", "serve", model, "--port", "0", "--served-model-name", "m", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.loading = self.process.stderr.readline()
        self.ready = self.process.stdout.readline()
        if " ready on " not in self.ready:
            self.stop()
            raise AssertionError(f"no ready line: {self.ready!r} {self.loading}{self.process.stderr.read()}")
        self.url = self.ready.split(" ready on ")[1].split()[0]
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    def metric(self, name):
        for line in httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text.splitlines():
            if re.match(rf"{name}(\{{|\s)", line):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name}")

    def health(self):
        response = httpx.get(f"{self.url}/health", timeout=PATIENCE_S)
        return response.status_code, response.json()

    def kv_is_free(self):
        return self.metric("transect_kv_blocks_used") == 0

    def end(self):
        """The exit code, within reason, and everything that went to stderr after the line that says what is loaded."""
        code = self.process.wait(PATIENCE_S)
        return code, self.process.stderr.read()

    def stop(self):
        """End it in good order if it will, else by force."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def model(smollm2):
    return str(smollm2.path)


@pytest.fixture(scope="module")
def servers():
    """Servers that the tests of this file share, the newest last."""
    started = []
    yield started
    for server in started:
        server.stop()


@pytest.fixture
def server(model, servers):
    """The shared server; another one if a test has ended it, as the last of this file does."""
    if not servers or servers[-1].process.poll() is not None:
        with cold():
            servers.append(Server(model, "--max-model-len", "2048", "--max-body-bytes", "100000", "--grace", "0.2"))
    return servers[-1]


@pytest.fixture
def own_server(model):
    """Starts servers of one's own, which are gone after the test."""
    started = []

    def start(*options):
        started.append(Server(model, *options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def test_ready_line_says_what_runs(server):
    assert server.ready.count("\n") == 1
    for word in ("http://127.0.0.1:", "model m", "KV cache", "tokens"):
        assert word in server.ready


def test_the_client_of_the_page_on_serving(server):
    program, *_ = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    here = program.replace("http://127.0.0.1:8000", server.url).replace('"smollm2-135m"', '"m"')
    here = here.replace('"top_k": 20', '"top_k": 1')  # a draw may end after a word
    assert here != program
    done = subprocess.run([os.sys.executable, "-c", here], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and len(done.stdout) > 20, done


def test_streamed_and_whole_answers_agree(server):
    arguments = {"model": "m", "messages": HELLO, "temperature": 0, "max_tokens": 40}
    whole = server.client.chat.completions.create(**arguments)
    text, reasons, usage = "", [], None
    for chunk in server.client.chat.completions.create(
        **arguments, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content and text
    assert reasons == [whole.choices[0].finish_reason]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_stop_string_across_token_borders(server):
    arguments = {"model": "m", "messages": HELLO, "temperature": 0, "max_tokens": 60}
    full = server.client.chat.completions.create(**arguments).choices[0].message.content
    # From the middle of one word into the middle of the next: no token begins or ends there.
    start = full.index(" ", len(full) // 2) - 1
    stop = full[start : start + 4]
    for stream in (False, True):
        answer = server.client.chat.completions.create(**arguments, stop=[stop], stream=stream)
        if stream:
            choices = [choice for chunk in answer for choice in chunk.choices]
            text, end = "".join(choice.delta.content or "" for choice in choices), choices[-1]
        else:
            (end,) = answer.choices
            text = end.message.content
        assert text == full[: full.index(stop)]
        assert end.finish_reason == "stop" and end.model_extra["stop_reason"] == stop


def test_three_choices_with_one_seed_each(server):
    arguments = {"model": "m", "messages": HELLO, "temperature": 1.5, "seed": 7, "max_tokens": 12, "n": 3}
    first, again = (server.client.chat.completions.create(**arguments) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert [choice.message.content for choice in again.choices] == texts
    streamed = ["", "", ""]
    for chunk in server.client.chat.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_any_choice_continues_from_any_of_its_tokens(server):
    extra = {"return_token_ids": True, "presence_penalty": 0.5}
    ask = {
        "model": "m",
        "messages": HELLO,
        "seed": 3,
        "temperature": 1.0,
        "max_tokens": 24,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = server.client.chat.completions.create(**ask, n=2, extra_body=extra)
    for choice, count in ((0, 1), (1, 11)):
        expected = whole.choices[choice]
        given = {"continue_token_ids": expected.token_ids[:count], "continue_choice": choice}
        (found,) = server.client.chat.completions.create(**ask, extra_body=extra | given).choices
        assert found.token_ids == expected.token_ids and found.message.content == expected.message.content
        assert found.logprobs.content == expected.logprobs.content[count:]
        other = expected.logprobs.content[count].top_logprobs[1].token_id
        given["continue_token_ids"] = [*expected.token_ids[:count], other]
        (branch,) = server.client.chat.completions.create(**ask, extra_body=extra | given).choices
        assert branch.token_ids[: count + 1] == given["continue_token_ids"]


def test_logprobs(server):
    answer = server.client.chat.completions.create(
        model="m", messages=HELLO, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == answer.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token
        assert entry.logprob == entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    echoed = server.client.completions.create(
        model="m", prompt="The sky is", max_tokens=2, temperature=0, echo=True, logprobs=0
    )
    logprobs = echoed.choices[0].logprobs
    assert "".join(logprobs.tokens) == echoed.choices[0].text and echoed.choices[0].text.startswith("The sky is")
    assert logprobs.token_logprobs[0] is None and all(value < 0 for value in logprobs.token_logprobs[1:])


def test_completions_of_text_and_token_ids_agree(server):
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "The sky is"}).json()["tokens"]
    texts = {
        server.client.completions.create(model="m", prompt=prompt, max_tokens=8, temperature=0).choices[0].text
        for prompt in ("The sky is", ids, ["The sky is"], [ids])
    }
    assert len(texts) == 1
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": ids}).json()["prompt"] == "The sky is"


def test_second_turn_finds_the_first_in_the_prefix_cache(server):
    messages = [{"role": "user", "content": "Tell me about the moon. " * 10}]
    first = server.client.chat.completions.create(model="m", messages=messages, max_tokens=30, temperature=0)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]
    second = server.client.chat.completions.create(model="m", messages=messages, max_tokens=2)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 16


def test_scores_of_a_second_query_find_the_document_in_the_prefix_cache(server):
    document = "The harbour was rebuilt by the guild of the bakers after the flood. " * 12
    queries = ["Who rebuilt the harbour?", "What came before the guild?"]
    read = "transect_prefix_cache_hit_tokens_total"
    before = server.metric(read)

    def scores(*asked):
        body = {"model": "m", "text_1": list(asked), "text_2": [document] * len(asked)}
        answer = httpx.post(f"{server.url}/v1/score", json=body, timeout=PATIENCE_S).json()
        return [each["score"] for each in answer["data"]], answer["usage"]["prompt_tokens"]

    first, tokens = zip(*map(scores, queries), strict=True)
    assert server.metric(read) - before > tokens[1] - 32
    assert scores(*queries)[0] == [score for each in first for score in each], "the cache does not change a bit"


def test_the_bill_of_an_answer_adds_up(server):
    """The parts of its time, from the engine's own log; the header says the same in three parts."""

    def asked():
        answer = server.client.chat.completions.with_raw_response.create(
            model="m", messages=HELLO, max_tokens=5, extra_body={"ignore_eos": True}
        )
        timing = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
        url = f"{server.url}/v1/requests/{answer.parse().id}/bill"
        return timing, httpx.get(url, timeout=PATIENCE_S).json()

    def agree(found):
        timing, bill = found
        return bill["decode"]["ms"] == pytest.approx(float(timing["decode"]), rel=0.2, abs=5)

    timing, bill = found = undisturbed(asked, agree)
    assert list(timing) == ["queue", "prefill", "decode"] and all(float(each) >= 0 for each in timing.values())
    assert bill["output_tokens"] == 5 and bill["text"].startswith("request ")
    for span in (bill["ttft"], bill["decode"]):
        assert sum(span["parts_ms"].values()) == pytest.approx(span["ms"])
    assert bill["ttft"]["parts_ms"]["compute"] > 0
    assert agree(found)
    missing = httpx.get(f"{server.url}/v1/requests/cmpl-none/bill", timeout=PATIENCE_S)
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "request_not_found"


def test_the_openai_client_reads_a_search_as_an_answer_and_the_bill_has_all_branches(server):
    """It skips the progress; usage, tree and bill count the same tokens."""
    search = {"method": "adaptive", "n": 6, "wave": 3, "extract": "text", "budget": 60}
    stream = server.client.chat.completions.create(
        model="m", messages=HELLO, max_tokens=12, seed=1, stream=True, stream_options={"include_usage": True},
        extra_body={"search": search},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    trees = [chunk.search for chunk in chunks if "branches" in (getattr(chunk, "search", None) or {})]
    assert text and len(trees) == 1 and chunks[-1].usage.completion_tokens == trees[0]["tokens"] > 12
    bill = httpx.get(f"{server.url}/v1/requests/{chunks[0].id}/bill", timeout=PATIENCE_S).json()
    begun = [branch for branch in trees[0]["branches"] if branch["tokens"]]  # the budget may end before the last
    assert len(bill["parts"]) == len(begun) > 3 and bill["output_tokens"] >= trees[0]["tokens"]


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_gets_nothing_more_and_its_blocks_come_back(server, stream):
    wait_for(server.kv_is_free, "an idle server")

    async def ask_and_leave():
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        request = client.chat.completions.create(model="m", messages=HELLO, stream=stream, **LONG)
        if stream:
            chunks = await request
            async for chunk in chunks:
                if chunk.choices[0].delta.content:
                    break
            assert server.metric("transect_kv_blocks_used") > 0
            await chunks.close()
        else:
            task = asyncio.create_task(request)
            while server.metric("transect_kv_blocks_used") == 0:
                await asyncio.sleep(0.02)
            task.cancel()
        await client.close()

    asyncio.run(ask_and_leave())
    wait_for(server.kv_is_free, "the blocks of the client that left")
    assert server.health()[1]["in_flight"] == 0


def test_bad_bodies_disturb_nobody(server):
    good = server.client.chat.completions.create(model="m", messages=HELLO, stream=True, max_tokens=60, temperature=0)
    next(iter(good))
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'"):
        server.client.chat.completions.create(model="m", messages=HELLO, extra_body={"temprature": 1})
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as caught:
        server.client.completions.create(model="m", prompt="word " * 3000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        server.client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.APIStatusError, match="100000 bytes") as caught:
        server.client.completions.create(model="m", prompt="x" * 300_000)
    assert caught.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        server.client.completions.create(model="m", prompt="x", logit_bias={"999999": 1})
    for content in (b"{", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 50_000):
        headers = {"content-type": "application/json"}
        assert (
            httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=PATIENCE_S).status_code
            == 400
        )
    assert [choice.finish_reason for chunk in good for choice in chunk.choices][-1] in ("stop", "length")
    assert server.health()[0] == 200


def test_body_that_never_says_how_long_it_is(server):
    """Chunked transfer, no Content-Length: the limit holds while reading."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(15):
            connection.sendall(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


@pytest.mark.prove  # test_schema.py sends more of them, without the processes
def test_generated_requests_find_no_5xx(own_server):
    server = own_server("--max-model-len", "64")
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")

    def explore(operation, mode):
        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=15, suppress_health_check=list(HealthCheck), derandomize=True)
        def run(case):
            if mode == GenerationMode.POSITIVE:
                case.body.pop("model", None)  # nearly every made-up name would be a 404 and end there
                case.body.setdefault("max_tokens", 2)
            case.call_and_validate(checks=[not_a_server_error])

        run()

    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            explore(schema[path]["POST"], mode)
    assert server.health()[0] == 200
    wait_for(server.kv_is_free, "an idle server")


def test_overload_is_refused_with_retry_after_and_sigterm_drains(own_server):
    patient = ("--grace", "300", "--keep-alive", "300", "--hung-after", "300")
    server = own_server("--max-num-seqs", "1", "--max-queue", "1", "--api-key", "k", *patient)
    server.client.api_key = "k"
    with pytest.raises(openai.AuthenticationError):
        server.client.with_options(api_key="wrong").models.list()
    running = server.client.chat.completions.create(model="m", messages=HELLO, stream=True, **LONG)
    next(iter(running))
    waiting = threading.Thread(
        target=server.client.chat.completions.create, kwargs={"model": "m", "messages": HELLO, "max_tokens": 2}
    )
    waiting.start()
    wait_for(lambda: server.metric("transect_requests_waiting") == 1, "a full queue")
    with pytest.raises(openai.InternalServerError) as caught:
        server.client.chat.completions.create(model="m", messages=HELLO)
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1
    with pytest.raises(openai.BadRequestError, match="send at most 1 in one request"):
        server.client.completions.create(model="m", prompt=["a", "b"])  # which the queue can never take
    running.close()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    key = {"Authorization": "Bearer k"}
    keep_alive = httpx.Client(base_url=server.url, timeout=PATIENCE_S, headers=key)
    assert keep_alive.get("/v1/models").status_code == 200
    running = server.client.chat.completions.create(
        model="m", messages=HELLO, stream=True, max_tokens=400, extra_body={"ignore_eos": True}
    )
    chunks = iter(running)
    next(chunks)
    engine = psutil.Process(server.health()[1]["engine_pids"][0])
    engine.suspend()  # or the answer, and with it the server, may end before the next lines run
    try:
        server.process.send_signal(signal.SIGTERM)
        # On a connection that is open already: the server closes a new one whose request it has not read yet.
        wait_for(lambda: keep_alive.get("/health").json()["state"] == "draining", "draining")
        refused = keep_alive.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and refused.headers["connection"] == "close"
    finally:
        engine.resume()
    tail = [choice for chunk in chunks for choice in chunk.choices]
    assert tail[-1].finish_reason == "length"
    code, errors = server.end()
    assert code == 0 and not errors.strip(), errors
    wait_for(lambda: not engine.is_running(), "the engine's end")


def test_a_hung_engine_turns_health_red_and_a_dead_one_is_an_error_each_and_the_end_of_the_server(own_server):
    server = own_server("--hung-after", "1")
    engine = psutil.Process(server.health()[1]["engine_pids"][0])
    engine.suspend()
    try:
        wait_for(lambda: server.health()[1]["state"] == "hung", "a red light")
        assert server.health()[0] == 503 and server.metric("transect_engine_up") == 0
    finally:
        engine.resume()
    wait_for(lambda: server.health()[0] == 200, "a green light")
    streams = [
        httpx.Client(timeout=PATIENCE_S).stream(
            "POST",
            f"{server.url}/v1/chat/completions",
            json={"messages": HELLO, "stream": True, "max_tokens": 1500, "ignore_eos": True},
        )
        for _ in range(3)
    ]
    responses = [stream.__enter__() for stream in streams]
    iterators = [response.iter_lines() for response in responses]
    for lines in iterators:
        assert next(lines).startswith("data: {")
    whole = []
    body = {"messages": HELLO, "max_tokens": 1500, "ignore_eos": True}
    thread = threading.Thread(
        target=lambda: whole.append(httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S))
    )
    thread.start()
    wait_for(lambda: server.health()[1]["in_flight"] == 4, "four requests in flight")
    engine.kill()
    for lines in iterators:
        events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
        assert sum('"error"' in event for event in events) == 1
        assert json.loads(events[-2])["error"]["code"] == "engine_dead"
    thread.join(PATIENCE_S)
    assert whole[0].status_code == 503 and whole[0].json()["error"]["code"] == "engine_dead"
    status, health = server.health()
    assert status == 503 and health["state"] == "dead"
    code, errors = server.end()
    assert code == 1 and errors.startswith("transect: error: the engine has stopped") and errors.count("\n") == 1


def test_port_in_use_is_one_line(server, model):
    port = server.url.rsplit(":", 1)[1]
    command = [os.sys.executable, "-m", "transect", "serve", model, "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert done.stderr.startswith(f"transect: error: port {port}") and done.stderr.count("\n") == 1


def test_what_outlives_the_grace_period_after_ctrl_c_gets_one_clean_error(server):
    body = {"messages": HELLO, "stream": True, "max_tokens": 1800, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGINT)
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]" and sum('"error"' in event for event in events) == 1
    code, errors = server.end()
    assert code == 130 and "Traceback" not in errors
