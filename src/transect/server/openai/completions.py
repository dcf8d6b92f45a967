"""``POST /v1/completions``: continue prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from ...engine.frontends.beam_search import BeamSearchParams
from ...engine.scheduling.sampling_params import MAX_CHOICES
from ...text.fill_in import Gap, gap_of
from ..beams import Beams, beam_params
from ..capture.slips import RequestContent
from ..generation import Event, Generation, Prompt
from ..http.errors import ApiError, bad_value
from ..http.lifetime import Deadline
from ..http.sse import CONTINUED, PLACE, TextEvents, event
from ..prompts import completion_prompts, gap_prompts
from ..serving import Serving
from .logprobs import completion_logprobs, prompt_logprobs
from .long_replies import all_completion_logprobs
from .protocol import FIELDS, CompletionRequest
from .replies import CompletionChoice, CompletionLogprobs, CompletionResponse, Usage, finish_reason

if TYPE_CHECKING:
    from ...text.outputs import CompletionOutput, RequestOutput

COMPLETION_TOKENS = 16
"""Default of ``max_tokens``, as in OpenAI's API."""


class Completion:
    """One completions request.

    ``max_tokens=0`` with ``echo`` scores the prompt: one token is drawn, because the engine always draws one, and is
    neither shown nor counted.
    """

    def __init__(self, serving: Serving, body: CompletionRequest, deadline: Deadline) -> None:
        self.serving, self.body, self.deadline = serving, body, deadline
        self.echo = bool(body.echo)
        self.top = body.logprobs
        self.scoring = self.echo and body.max_tokens == 0
        if self.echo and self.top is not None and body.stream:
            raise ApiError(400, "echo with logprobs needs stream=false", param="echo", code="unsupported_parameter")
        defaults = serving.engine.sampling_defaults
        limit = defaults.limit(COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens)
        more: dict[str, Any] = {"max_tokens": 1, "min_tokens": 0} if self.scoring else {"max_tokens": limit}
        wanted = [count for count in (self.top if self.echo else None, body.prompt_logprobs) if count is not None]
        if self._draws() is not None:
            more |= {"n": self._draws(), "logprobs": self.top or 0}
        try:
            self.params = body.sampling_params(
                defaults, **{"logprobs": self.top, "prompt_logprobs": max(wanted, default=None), **more}
            )
        except ValueError as error:
            raise bad_value(str(error), FIELDS) from None
        self.gap = self._gap() if body.suffix else None
        if self.gap is not None:
            stops = dict.fromkeys([*(self.params.stop_token_ids or ()), *self.gap.ends])
            try:
                self.params = self.params.with_(stop_token_ids=list(stops))
            except ValueError as error:  # with those that end a gap there are too many
                raise bad_value(str(error), FIELDS) from None
        width = max(body.best_of or 1, body.n or 1)
        self.beams = beam_params(body, self.params, width, COMPLETION_TOKENS) if body.use_beam_search else None

    def _gap(self) -> Gap:
        """Return the model's tokens for filling in text before ``suffix``.

        Raises:
            ApiError: 400 if the model has none, or ``suffix`` does not work with the rest of the request.
        """
        for name in ("echo", "truncate_prompt_tokens"):
            if getattr(self.body, name):
                raise ApiError(400, f"suffix and {name} cannot be combined", param=name, code="unsupported_parameter")
        gap = gap_of(self.serving.engine.tokenizer, add_special=self.body.add_special_tokens is not False)
        if gap is None:
            message = "this model has no tokens for filling in text before a suffix: leave suffix out"
            raise ApiError(400, message, param="suffix", code="unsupported_parameter")
        return gap

    def _draws(self) -> int | None:
        """Return the number of answers to draw and choose the ``n`` best from; None if all drawn answers are returned.

        Raises:
            ApiError: 400 if ``best_of`` does not work with the rest of the request.
        """
        best_of, n = self.body.best_of, self.body.n or 1
        if best_of is None or best_of == n:
            return None
        if not n <= best_of <= MAX_CHOICES:
            message = f"best_of must be at least n ({n}) and at most {MAX_CHOICES}, got {best_of}"
            raise ApiError(400, message, param="best_of", code="invalid_value")
        if self.body.stream:
            message = "best_of chooses when all answers are there: it needs stream=false"
            raise ApiError(400, message, param="best_of", code="unsupported_parameter")
        return best_of

    def _chosen(self, result: RequestOutput) -> list[CompletionOutput]:
        """Choose the answers to return: all, or the ``n`` with the highest mean log-probability of more."""
        if self._draws() is None or self.beams is not None:
            return result.outputs

        def by_token(each: CompletionOutput) -> float:
            return (each.cumulative_logprob or 0.0) / max(len(each.token_ids), 1)

        return sorted(result.outputs, key=by_token, reverse=True)[: self.body.n or 1]

    async def _prompts(self) -> list[Prompt]:
        parse = self.body.parse_special is not False
        if self.gap is not None:
            return await gap_prompts(
                self.serving, self.body.prompt, self.body.suffix or "", self.gap, parse_special=parse
            )
        return await completion_prompts(
            self.serving,
            self.body.prompt,
            add_special=self.body.add_special_tokens is not False,
            parse_special=parse,
            truncate=self.body.truncate_prompt_tokens,
            room=self.params.max_tokens or 1,
        )

    async def _prepare(self) -> Generation:
        prompts = await self._prompts()
        asked = RequestContent("completions", self.params, None, prompts, streamed=bool(self.body.stream))
        return Generation(self.serving, prompts, self.params, self.body.priority or 0, self.deadline).describe(asked)

    async def _search(self, beams: BeamSearchParams) -> Beams:
        prompts = await self._prompts()
        priority, answers = self.body.priority or 0, self.body.n or 1
        asked = RequestContent("completions", self.params, None, prompts)
        return Beams(self.serving, prompts, beams, answers, priority, self.deadline).describe(asked)

    async def whole(self) -> CompletionResponse:
        """Return the answer in one piece."""
        generation: Generation | Beams
        async with self.deadline:
            generation = await (self._prepare() if self.beams is None else self._search(self.beams))
        results = await generation.whole()
        choices = [
            await self._choice(prompt, result, output)
            for prompt, result in zip(generation.prompts, results, strict=True)
            for output in self._chosen(result)
        ]
        usage = generation.usage()
        if self.scoring:
            usage = usage.model_copy(update={"completion_tokens": 0, "total_tokens": usage.prompt_tokens})
        for index, choice in enumerate(choices):
            choice.index = index
        return self._response(generation, choices, usage)

    async def _choice(self, prompt: Prompt, result: RequestOutput, output: CompletionOutput) -> CompletionChoice:
        """Build one choice of a whole answer; the caller sets its index."""
        tokenizer = self.serving.engine.tokenizer
        text, token_ids, positions = output.text, list(output.token_ids), list(output.logprobs or ())
        reason, stop_reason = output.finish_reason, output.stop_reason
        if self.scoring:
            text, token_ids, positions, reason, stop_reason = "", [], [], "length", None
        if self.echo:
            text = self._prompt_text(prompt) + text
            token_ids = [*prompt.token_ids, *token_ids]
        logprobs: CompletionLogprobs | None = None
        if self.top is not None:
            before = list(result.prompt_logprobs or ()) if self.echo else []
            logprobs = await all_completion_logprobs([*before, *positions], token_ids, self.top, tokenizer)
        return CompletionChoice(
            index=0,
            text=text,
            logprobs=logprobs,
            finish_reason=finish_reason(reason),
            stop_reason=stop_reason,
            token_ids=token_ids if self.body.return_token_ids else None,
            prompt_token_ids=prompt.token_ids if self.body.return_token_ids else None,
            prompt_logprobs=None if self.body.prompt_logprobs is None else prompt_logprobs(result.prompt_logprobs),
        )

    async def begin(self) -> AsyncIterator[bytes]:
        """Submit the request, and return the stream of chunks. A refusal is raised here, before anything has been
        sent."""
        async with self.deadline:
            generation = await self._prepare()
        await generation.start()
        return self._chunks(generation)

    async def _chunks(self, generation: Generation) -> AsyncIterator[bytes]:
        lengths: dict[int, int] = {}
        texts: dict[int, TextEvents] = {}
        begun: set[int] = set()
        async with generation:
            async for news in generation:
                if news.update.approximate:
                    yield CONTINUED
                if self.echo and news.choice not in lengths:
                    text = self._prompt_text(generation.prompts[news.prompt])
                    lengths[news.choice] = len(text)
                    yield event(self._chunk(generation, CompletionChoice(index=news.choice, text=text)))
                if self._is_text(news):
                    if news.choice not in texts:
                        choice = CompletionChoice(index=news.choice, text=PLACE)
                        texts[news.choice] = TextEvents(self._chunk(generation, choice))
                    yield texts[news.choice].event(news.update.text)
                else:
                    pieces = self._pieces(news, lengths)
                    if self.body.return_token_ids and news.choice not in begun:
                        begun.add(news.choice)
                        pieces[0].prompt_token_ids = generation.prompts[news.prompt].token_ids
                    yield b"".join(event(self._chunk(generation, piece)) for piece in pieces)
            if self.body.include_usage:
                yield event(self._response(generation, [], generation.usage()))

    def _is_text(self, news: Event) -> bool:
        """Return True if the update is nothing but more text."""
        update = news.update
        asked = self.top is not None or self.body.continuous_usage or self.body.return_token_ids
        plain = not asked and not self.scoring
        return bool(update.text) and update.finish_reason is None and plain

    def _pieces(self, news: Event, lengths: dict[int, int]) -> list[CompletionChoice]:
        """Split an update into chunks: the new parts, then the end by itself. ``lengths``: characters sent of each
        choice."""
        update, index = news.update, news.choice
        pieces = []
        ids = update.token_ids if self.body.return_token_ids else None
        if not self.scoring and (update.text or update.logprobs or ids):
            sent = lengths.get(index, 0)
            logprobs = None
            if update.logprobs is not None and self.top is not None:
                tokenizer = self.serving.engine.tokenizer
                logprobs = completion_logprobs(update.logprobs, update.token_ids, self.top, tokenizer, sent)
            lengths[index] = sent + len(update.text)
            pieces.append(CompletionChoice(index=index, text=update.text, logprobs=logprobs, token_ids=ids))
        if update.finish_reason is not None:
            reason = "length" if self.scoring else update.finish_reason
            end = CompletionChoice(index=index, text="", finish_reason=finish_reason(reason))
            end.stop_reason = None if self.scoring else update.stop_reason
            pieces.append(end)
        return pieces

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self.serving.engine.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def _chunk(self, generation: Generation, choice: CompletionChoice) -> CompletionResponse:
        return self._response(generation, [choice], generation.usage() if self.body.continuous_usage else None)

    def _response(
        self, generation: Generation | Beams, choices: list[CompletionChoice], usage: Usage | None
    ) -> CompletionResponse:
        return CompletionResponse(
            id=f"cmpl-{generation.id}",
            created=generation.created,
            model=self.serving.model_name,
            choices=choices,
            usage=usage,
        )
