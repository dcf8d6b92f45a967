"""A slip: the content of one request and its answers, from the request's arrival to the recorder's thread.

A slip holds references while the request runs. Everything that costs time (splitting answers into thoughts, text and
calls, redaction, JSON) happens in ``record``, which the recorder's thread calls.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..sender import Sender

if TYPE_CHECKING:
    from ...engine.scheduling.sampling_params import SamplingParams
    from ...text.outputs import CompletionOutput, RequestOutput

CALL_FIELDS = ("name", "arguments")
JSON_KINDS = ("json", "json_object")


@dataclass(frozen=True, slots=True)
class RequestContent:
    """A request, as the route that serves it knows it.

    Attributes:
        api: ``chat``, ``completions``, ``responses``, ``messages`` or ``embeddings``.
        params: sampling parameters as the client asked for them, without grammars of tools.
        messages: conversation in the form of the chat API; None if the request has prompts.
        prompts: prompts, each with ``text`` or ``token_ids``.
        tools: tools that may be called, in the form of the chat API.
        reader: makes an ``AnswerReader`` for one answer; None if answers are text alone.
        streamed: the answer is a stream.
    """

    api: str
    params: SamplingParams
    messages: Sequence[Any] | None = None
    prompts: Sequence[Any] = ()
    tools: Sequence[dict[str, Any]] = ()
    reader: Callable[[], Any] | None = None
    streamed: bool = False


@dataclass(slots=True)
class CaptureSlip:
    """A request that is to be captured.

    Attributes:
        id: id of its answer, without the API's prefix.
        asked: the request.
        sender: its user.
        client: name of its API key; empty without keys.
        model: version that answers: the model's name, or an adapter's.
        release: released name that the request gave; empty if it gave the version's own.
        created: seconds since 1970.
        adapter: content id of the adapter.
        prompt_tokens: tokens of all prompts.
        answers: complete answers, each with the place of its prompt.
    """

    id: str
    asked: RequestContent
    sender: Sender
    client: str
    model: str
    release: str
    created: float
    adapter: str = ""
    prompt_tokens: int = 0
    answers: list[tuple[int, CompletionOutput]] = field(default_factory=list)
    seconds: float = 0.0
    first_token_s: float | None = None

    @property
    def size(self) -> int:
        """Estimate of the slip's memory in bytes, without work on its texts."""
        return 1024 + 16 * (self.prompt_tokens + sum(len(output.token_ids) for _, output in self.answers))

    def take(self, place: int, result: RequestOutput) -> None:
        """Take the complete answers to the prompt of this place, without their log-probabilities."""
        self.prompt_tokens += len(result.prompt_token_ids)
        self.answers += [(place, dataclasses.replace(output, logprobs=None)) for output in result.outputs]

    def record(self, redact: Callable[[Any], Any], decode: Callable[[list[int]], str], user: str) -> dict[str, Any]:
        """Build the record.

        Args:
            redact: redacts the texts in plain data.
            decode: returns the text of token ids.
            user: hash of the user's id; empty if there is none.
        """
        asked, params = self.asked, self.asked.params
        record: dict[str, Any] = {
            "kind": "request",
            "id": self.id,
            "time": round(self.created, 3),
            "api": asked.api,
            "model": self.model,
            "release": self.release,
            "adapter": self.adapter,
            "client": self.client,
            "user": user,
            "stream": asked.streamed,
        }
        if asked.messages is not None:
            record["messages"] = redact([_message(each) for each in asked.messages])
        else:
            texts = [decode(each.token_ids) if each.text is None else each.text for each in asked.prompts]
            record["inputs" if asked.api == "embeddings" else "prompts"] = redact(texts)
        if asked.tools:
            record["tools"] = redact(list(asked.tools))
        record["prompt_tokens"] = self.prompt_tokens
        record["seconds"] = round(self.seconds, 4)
        if asked.api == "embeddings":
            return record
        form = form_of(params)
        record |= {"temperature": params.temperature, "first_token_seconds": self.first_token_s, "form": form}
        record["answers"] = [
            {"prompt": place, **self._answer(output, form, redact)}
            for place, output in sorted(self.answers, key=lambda each: (each[0], each[1].index))
        ]
        return record

    def _answer(self, output: CompletionOutput, form: str, redact: Callable[[Any], Any]) -> dict[str, Any]:
        thoughts, text, calls = split_answer(output, self.asked.reader)
        answer = {
            "choice": output.index,
            "text": redact(text),
            "finish_reason": output.finish_reason or "",
            "tokens": len(output.token_ids),
        }
        if thoughts:
            answer["thoughts"] = redact(thoughts)
        if calls:
            answer["calls"] = redact(calls)
        if form:
            answer["valid"] = fits_form(form, text, bool(calls), output.finish_reason)
        return answer


def split_answer(output: CompletionOutput, reader: Callable[[], Any] | None) -> tuple[str, str, list[dict[str, str]]]:
    """Split an answer into thoughts, text and calls."""
    if reader is None:
        return "", output.text, []
    whole = reader().whole(output)
    calls = [{name: getattr(call, name) for name in CALL_FIELDS} for call in whole.calls]
    return whole.thoughts or "", whole.text or "", calls


def form_of(params: SamplingParams) -> str:
    """Return the kind of form that a client asked for, such as ``json``; empty for free text."""
    asked = params.structured_outputs
    kinds = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
    return "" if asked is None else next((kind for kind in kinds if getattr(asked, kind) is not None), "")


def fits_form(form: str, text: str, called: bool, finish_reason: str | None) -> bool:
    """Return False if an answer does not have the form that was asked for: it was cut off, or is not JSON. A grammar
    enforces the rest while the answer is drawn."""
    if called:
        return True
    if form in JSON_KINDS:
        try:
            json.loads(text)
        except ValueError:
            return False
        return True
    return finish_reason != "length"


def _message(message: Any) -> dict[str, Any]:
    return message if isinstance(message, dict) else message.plain()
