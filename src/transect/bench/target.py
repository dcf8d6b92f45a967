"""The server to measure, and the form of a request to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from .http_stream import HttpClient, RequestFailed
from .workload import Work

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """An OpenAI-compatible server.

    Attributes:
        url: ``http://host:port``; without ``/v1``.
        model: name sent with every request.
        api_key: sent as a bearer token.
        endpoint: ``completions`` takes token ids and text, ``chat`` text only, as one user message.
        temperature: sent with every request.
        ignore_eos: ask for exactly as many tokens as the work says; a field that not every server knows.
        extra: more fields for every body.
        timeout_s: for one request; None for no limit.
    """

    url: str
    model: str
    api_key: str | None = None
    endpoint: Literal["completions", "chat"] = "completions"
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = 600.0

    def client(self) -> HttpClient:
        """Return a client for this server.

        Raises:
            ValueError: the URL is none.
        """
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return HttpClient(self.url.removesuffix("/").removesuffix("/v1"), headers, self.timeout_s)

    @property
    def path(self) -> str:
        """The path of requests."""
        return PATHS[self.endpoint]

    def body(self, work: Work) -> bytes:
        """Return the JSON of one request.

        Raises:
            ValueError: token ids for chat.
        """
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": work.output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.endpoint == "completions":
            fields["prompt"] = work.prompt
        elif isinstance(work.prompt, str):
            fields["messages"] = [{"role": "user", "content": work.prompt}]
        else:
            raise ValueError("chat takes text and this work is token ids: use the completions endpoint")
        return msgspec.json.encode({**fields, **self.extra})


async def served_model(url: str, api_key: str | None = None) -> str:
    """Return the first model that a server names.

    Raises:
        ValueError: the server does not answer, or names none; the message says what to change.
    """
    client = Target(url, "", api_key, timeout_s=30.0).client()
    try:
        reply = await client.get("/v1/models")
    except RequestFailed as error:
        raise ValueError(f"{url} does not answer ({error}): start the server, or give --url") from None
    finally:
        client.close()
    try:
        return msgspec.json.decode(reply.body)["data"][0]["id"]
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        raise ValueError(
            f"{url} does not name its models (status {reply.status}): give --model, and --api-key if it wants one"
        ) from None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


_decode = msgspec.json.Decoder(_Event).decode


class Stream:
    """The outcome of one request. Moments are seconds of ``time.perf_counter``.

    ``moments`` has one entry for each event that carried text (or, for completions, any event before the finish): the
    arrivals of tokens, where the server sends each by itself.
    """

    __slots__ = ("_chat", "error", "finish_reason", "moments", "usage")

    def __init__(self, endpoint: str) -> None:
        self._chat = endpoint == "chat"
        self.moments: list[float] = []
        self.usage: _Usage | None = None
        self.finish_reason: str | None = None
        self.error: RequestFailed | None = None

    def take(self, data: bytes, now: float) -> None:
        """Add one event of the stream."""
        if data == b"[DONE]":
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            self.error = RequestFailed("bad reply", f"an event is not JSON in OpenAI's format ({error})")
            return
        if event.error:
            self.error = RequestFailed("error in stream", bytes(event.error).decode(errors="replace")[:200])
            return
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices:
            if self._has_token(choice):
                self.moments.append(now)
            self.finish_reason = choice.finish_reason or self.finish_reason

    def _has_token(self, choice: _Choice) -> bool:
        if choice.delta is not None:
            return bool(choice.delta.content or choice.delta.reasoning_content)
        return bool(choice.text) or (not self._chat and choice.finish_reason is None)
