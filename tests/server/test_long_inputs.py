"""Long texts and lists: refused before work, given up early, and never in the way of other requests."""

import asyncio
import threading

import httpx
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from transect.server.app import create_app
from transect.server.encoding import PIECE, Encoder, TooManyTokens
from transect.server.http.errors import ApiError
from transect.server.http.lifetime import Deadline
from transect.server.options import ServerOptions
from transect.text.tokenizer import Tokenizer

CHAT = {"model": "fake-model", "messages": [{"role": "user", "content": "Hi"}]}


def error(response, status=400):
    assert response.status_code == status, response.text[:500]
    return response.json()["error"]


def byte_tokenizer(longest="x" * 10):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_tokens([longest])
    return Tokenizer(backend)


class Recording:
    """A tokenizer of one token for each character that notes which texts it was given."""

    longest_token = 100
    special_texts = ()

    def __init__(self):
        self.texts = []
        self.go = threading.Event()
        self.go.set()
        self.started = threading.Event()

    def encode(self, text, add_special_tokens=False, parse_special=False):
        self.texts.append((len(text), add_special_tokens, parse_special, threading.current_thread()))
        self.started.set()
        assert self.go.wait(200)
        return [1] * (len(text) + add_special_tokens)


async def test_a_text_that_cannot_fit_is_refused_before_any_work():
    tokenizer = Recording()
    with pytest.raises(TooManyTokens) as refused:
        await Encoder().encode(tokenizer, "7" * 10_001, 100, add_special=True, parse_special=False)
    assert refused.value.at_least == 101 and not tokenizer.texts


async def test_a_text_of_too_many_tokens_is_given_up_at_the_piece_that_says_so():
    tokenizer = Recording()
    with pytest.raises(TooManyTokens) as refused:
        await Encoder().encode(tokenizer, "7" * (10 * PIECE), PIECE + 10_000, add_special=True, parse_special=False)
    assert [length for length, *_ in tokenizer.texts] == [PIECE, PIECE]
    assert PIECE + 10_000 < refused.value.at_least <= 2 * PIECE


async def test_a_long_text_that_fits_is_encoded_in_one_and_elsewhere():
    tokenizer = Recording()
    ids = await Encoder().encode(tokenizer, "7" * 9000, 9500, add_special=True, parse_special=True)
    ((length, special, parsed, thread),) = tokenizer.texts
    assert (len(ids), length, special, parsed) == (9001, 9000, True, True)
    assert thread is not threading.main_thread()
    await Encoder().encode(tokenizer, "7" * 500, 6000, add_special=True, parse_special=True)
    assert tokenizer.texts[-1][3] is threading.main_thread()


async def test_a_request_that_ends_gives_its_text_up():
    tokenizer = Recording()
    tokenizer.go.clear()
    encoder = Encoder()
    task = asyncio.create_task(
        encoder.encode(tokenizer, "7" * (10 * PIECE), 20 * PIECE, add_special=False, parse_special=False)
    )
    await asyncio.to_thread(tokenizer.started.wait, 20)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    tokenizer.go.set()
    encoder._pool.close()
    for thread in encoder._pool._threads:
        await asyncio.to_thread(thread.join)
    assert len(tokenizer.texts) == 1


def test_the_longest_token_bounds_what_a_text_needs():
    assert byte_tokenizer().longest_token == 10
    assert byte_tokenizer("<a>").longest_token == 3


def test_other_threads_run_while_a_long_text_is_encoded(monkeypatch):
    """The call that holds Python's lock for seconds is not made."""
    tokenizer = byte_tokenizer()

    class Backend:
        def encode(self, *args, **kwargs):
            pytest.fail("this call lets nobody else run")

        def encode_batch_fast(self, texts, **options):
            return backend.encode_batch_fast(texts, **options)

    backend = tokenizer._plain
    short = [tokenizer.encode("ab" * n) for n in (1, 100)]
    monkeypatch.setattr(tokenizer, "_plain", Backend())
    assert tokenizer.encode("ab" * 10_000) == short[0] * 10_000
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("\ud800" * 10_000)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "7" * 15_000}),
        ("/v1/completions", {"prompt": ["a", "7" * 15_000]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "7" * 15_000}]}),
    ],
)
async def test_over_long_prompts_are_not_encoded(client, engine, monkeypatch, path, body):
    longest = []
    encode = engine.tokenizer.encode
    monkeypatch.setattr(
        engine.tokenizer, "encode", lambda text, **more: longest.append(len(text)) or encode(text, **more)
    )
    found = error(await client.post(path, json=body))
    assert found["code"] == "context_length_exceeded" and "at least 15" in found["message"]
    assert max(longest, default=0) <= 1


async def test_tokenize_counts_further_than_the_context_but_not_for_ever(client, engine, monkeypatch):
    answer = (await client.post("/tokenize", json={"prompt": "7" * 15_000})).json()
    assert answer["count"] == 15_000 > answer["max_model_len"]
    monkeypatch.setattr("transect.server.prompts.LEAST_COUNTED", 1000)
    found = error(await client.post("/tokenize", json={"prompt": "7" * 15_000}))
    assert found["code"] == "context_length_exceeded" and "at least 15000" in found["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_the_deadline_counts_from_arrival(engine, monkeypatch, path):
    """The time is over while the text is encoded: the engine never hears of it."""
    tokenizer = Recording()
    tokenizer.go.clear()
    engine.tokenizer, engine.max_model_len = tokenizer, 10_000
    app = create_app(engine, ServerOptions(model_names=("fake-model",), request_timeout_s=0.3))
    text = "7" * 9000  # so long that it is encoded elsewhere
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as client:
        found = error(await client.post(path, json=body), 504)
    tokenizer.go.set()
    assert found["code"] == "request_timeout" and not engine.seen


async def test_deadlines():
    now = asyncio.get_running_loop().time()
    late = Deadline(5.0, now - 6.0)
    for _ in range(2):
        with pytest.raises(ApiError, match="limit of 5 s"):
            async with late:
                await asyncio.sleep(10)
    async with Deadline(None, now - 6.0), Deadline(100.0):
        await asyncio.sleep(0)
    with pytest.raises(KeyError):
        async with late:
            raise KeyError
