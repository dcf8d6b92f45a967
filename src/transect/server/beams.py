"""Beam search behind a completions or chat request: requests of one token each, step after step."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from ..engine.frontends.beam_search import BeamSearch, BeamSearchParams
from ..engine.scheduling.sampling_params import SamplingParams
from ..text.outputs import RequestMetrics, RequestOutput
from .generation import Prompt, whole_in_groups
from .http.errors import ApiError, bad_value
from .http.lifetime import Deadline
from .openai.protocol import FIELDS, SamplingBody
from .openai.replies import PromptDetails, Usage
from .operations import request_log
from .sender import note_request
from .serving import Serving
from .watching import RequestWatch

if TYPE_CHECKING:
    from ..text.outputs import PositionLogprobs
    from .capture.slips import RequestContent

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
}
"""Fields that beam search does not support, with the values at which each field has no effect."""


def beam_params(body: SamplingBody, params: SamplingParams, width: int, longest: int) -> BeamSearchParams:
    """Read the beam-search settings of a request with ``use_beam_search``.

    Args:
        params: of the request; form, stop strings and lengths have been checked.
        width: answers to search with.
        longest: tokens of an answer if the request sets no limit.

    Raises:
        ApiError: 400 if beam search does not work with the rest of the request.
    """
    if body.stream:
        message = "beam search has answers only at its end: set stream=false"
        raise ApiError(400, message, param="use_beam_search", code="unsupported_parameter")
    for name, nothings in NEUTRAL.items():
        value = getattr(body, name)
        if value is not None and value not in nothings:
            message = f"beam search compares answers by the model's own probabilities: leave {name} out"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    if params.structured_outputs is not None:
        message = "beam search cannot be combined with a response format or tools: leave one of them out"
        raise ApiError(400, message, param="use_beam_search", code="unsupported_parameter")
    try:
        return BeamSearchParams(
            beam_width=width,
            max_tokens=params.max_tokens or longest,
            ignore_eos=params.ignore_eos,
            temperature=0.0 if body.temperature is None else body.temperature,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            logprobs=params.logprobs or 0,
        )
    except ValueError as error:
        renamed = str(error).replace("beam_width", "n", 1)
        raise bad_value(renamed, FIELDS) from None


class Beams:
    """The searches of one request, with the interface of a ``Generation`` that returns its result in one piece."""

    def __init__(
        self,
        serving: Serving,
        prompts: Sequence[Prompt],
        params: BeamSearchParams,
        answers: int,
        priority: int,
        deadline: Deadline,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.created = int(time.time())
        self.prompts = prompts
        self._serving, self._params, self._answers = serving, params, answers
        self._priority, self._deadline = priority, deadline
        self._watch = RequestWatch(serving, self.id, len(prompts))
        note_request(version=None)  # the requests of the steps are parts
        self._usage = Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            completion_tokens=0,
            total_tokens=0,
            prompt_tokens_details=PromptDetails(cached_tokens=0),
        )

    def describe(self, content: RequestContent) -> Self:
        """Describe the request, for captures and for the metrics of released versions; returns this object."""
        self._watch.describe(content)
        return self

    def usage(self) -> Usage:
        """Count the tokens of the prompts, and of the answers that are returned."""
        return self._usage

    async def whole(self) -> list[RequestOutput]:
        """Return the answers of each prompt, best first.

        Raises:
            ApiError: see ``Generation``.
        """
        with self._watch:
            results = await self._whole()
            for place, result in enumerate(results):
                self._watch.answered(place, result)
        return results

    async def _whole(self) -> list[RequestOutput]:
        engine = self._serving.engine
        ends, tokenizer = engine.eos_token_ids, engine.tokenizer
        searches = [
            BeamSearch(self._params, engine.max_model_len - len(prompt.token_ids), ends, tokenizer)  # type: ignore[arg-type]
            for prompt in self.prompts
        ]
        while any(search.beams for search in searches):
            await self._step(searches)
        results = []
        for prompt, search in zip(self.prompts, searches, strict=True):
            outputs = [output for output, _ in search.outputs()[: self._answers]]
            self._usage.completion_tokens += sum(len(output.token_ids) for output in outputs)
            metrics = RequestMetrics(0.0)
            result = RequestOutput(self.id, prompt.text, prompt.token_ids, None, outputs, True, 0, metrics)
            results.append(result)
        self._usage.total_tokens = self._usage.prompt_tokens + self._usage.completion_tokens
        request_log.note(
            prompt_tokens=self._usage.prompt_tokens,
            completion_tokens=self._usage.completion_tokens,
            finish_reasons=[output.finish_reason for result in results for output in result.outputs],
        )
        return results

    async def _step(self, searches: Sequence[BeamSearch]) -> None:
        """Advance every beam of every search by one token."""
        longer = [
            Prompt(None, [*prompt.token_ids, *beam])
            for prompt, search in zip(self.prompts, searches, strict=True)
            for beam in search.beams
        ]
        params = self._params.step_params().with_(stop=None, stop_token_ids=None)
        results = iter(await whole_in_groups(self._serving, longer, params, self._priority, self._deadline))
        for search in searches:
            if search.beams:
                search.advance([_position(next(results)) for _ in search.beams])


def _position(result: RequestOutput) -> PositionLogprobs:
    (output,) = result.outputs
    assert output.logprobs, "an engine that fails has raised by now"
    return output.logprobs[0]
