"""``POST /v1/chat/completions``: the next message of a conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

from ...engine.scheduling.sampling_params import MAX_CHOICES
from ...text.tools.spec import tool_use
from ..answers import AnswerPiece, AnswerReader, Answers
from ..beams import Beams, beam_params
from ..capture.slips import RequestContent
from ..generation import Event, Generation, Prompt
from ..http.body import aside
from ..http.errors import ApiError, bad_value
from ..http.lifetime import Deadline
from ..http.sse import CONTINUED, PLACE, TextEvents, event
from ..prompts import chat_prompt, effort_kwargs
from ..searches import requested_search
from ..searching import Searching, SearchProgress
from ..serving import Serving
from .logprobs import chat_logprobs, prompt_logprobs
from .long_replies import all_chat_logprobs
from .protocol import FIELDS, ChatCompletionRequest, TokenizeRequest, opens_a_turn
from .replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatResponse,
    ChunkChoice,
    CompletionDetails,
    Delta,
    FunctionCall,
    SearchChunk,
    SearchedChat,
    ToolCall,
    Usage,
    finish_reason,
)

if TYPE_CHECKING:
    from ...text.output_processor import Given
    from ...text.outputs import CompletionOutput, PositionLogprobs, RequestOutput
    from ...text.tools.parser import CallDelta


def chat_opens_a_turn(body: ChatCompletionRequest | TokenizeRequest) -> bool:
    """Return ``opens_a_turn`` of the body's fields.

    Raises:
        ApiError: 400 where the fields contradict each other.
    """
    try:
        return opens_a_turn(body.add_generation_prompt, body.continue_final_message)
    except ValueError as error:
        raise bad_value(str(error), FIELDS) from None


class Chat:
    """One chat request."""

    def __init__(self, serving: Serving, body: ChatCompletionRequest, deadline: Deadline) -> None:
        self.serving, self.body, self.deadline = serving, body, deadline
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        self.top = body.top_logprobs or 0
        self.search = requested_search(body.search, body)
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        defaults = serving.engine.sampling_defaults
        limit = defaults.limit(limit)
        try:
            self.params = body.sampling_params(
                defaults,
                max_tokens=limit,
                logprobs=self.top if body.logprobs else None,
                prompt_logprobs=body.prompt_logprobs,
            )
            self.given = self._given()
            self.use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
        except ValueError as error:
            raise bad_value(self._renamed(str(error)), FIELDS) from None

    def _given(self) -> Given | None:
        """Return the tokens that the answer begins with, by choice, and make its index one of the request's choices.

        Raises:
            ValueError: other fields contradict them.
        """
        tokens, choice, params = self.body.continue_token_ids, self.body.continue_choice or 0, self.params
        if tokens is None:
            if self.body.continue_choice is not None:
                raise ValueError("continue_choice needs continue_token_ids, the tokens of that choice")
            return None
        if params.n != 1 or self.body.use_beam_search or params.prompt_logprobs is not None:
            raise ValueError(
                "continue_token_ids continues one answer: leave n, use_beam_search and prompt_logprobs out"
            )
        if params.seed is None and params.temperature:
            raise ValueError("continue_token_ids needs seed, that of the answer to continue, or temperature 0")
        if params.max_tokens is not None and len(tokens) >= params.max_tokens:
            message = f"continue_token_ids holds {len(tokens)} tokens, and max_tokens counts them: give more than that"
            raise ValueError(message)
        if not 0 <= choice < MAX_CHOICES:
            raise ValueError(f"continue_choice must be 0 to {MAX_CHOICES - 1}, got {choice}")
        limit = self.serving.engine.vocab_size
        if tokens and max(tokens) >= limit:
            raise ValueError(f"continue_token_ids holds id {max(tokens)}; this model has ids 0 to {limit - 1}")
        self.params = params.with_(n=choice + 1)
        return (*[None] * choice, tuple(tokens))

    def _renamed(self, message: str) -> str:
        """Rename the field in an error message to the name that the client used."""
        if message.startswith("logprobs"):
            return f"top_{message}"
        if message.startswith("max_tokens") and self.body.max_completion_tokens is not None:
            return message.replace("max_tokens", "max_completion_tokens", 1)
        return message

    def _template_kwargs(self) -> dict[str, Any]:
        effort = effort_kwargs(self.serving, self.body.reasoning_effort)
        return {**effort, **(self.body.chat_template_kwargs or {})}

    async def _prompt(self) -> Prompt:
        prompt = await chat_prompt(
            self.serving,
            self.body.messages,
            add_generation_prompt=chat_opens_a_turn(self.body),
            continue_final_message=bool(self.body.continue_final_message),
            truncate=self.body.truncate_prompt_tokens,
            room=self.params.max_tokens or 1,
            add_special=self.body.add_special_tokens is True,
            template_kwargs=self._template_kwargs(),
            use=self.use,
        )
        said = self.body.messages[-1].text if self.body.continue_final_message else ""
        self.answers = Answers(self.serving, self.use, prompt.text or "", said)
        self._asked = self.params
        try:
            self.params = await aside(self.answers.params, self.params)
        except ValueError as error:
            raise bad_value(str(error), FIELDS) from None
        return prompt

    async def _prepare(self) -> Generation | Beams | Searching:
        prompt = await self._prompt()
        priority = self.body.priority or 0
        reader = None if self.answers.plain else self.answers.reader
        content = RequestContent(
            "chat", self._asked, self.body.messages, (), self.body.tools or (), reader, bool(self.body.stream)
        )
        if self.body.use_beam_search:
            width, room = self.params.n, self.serving.engine.max_model_len - len(prompt.token_ids)
            beams = beam_params(self.body, self.params, width, room)
            return Beams(self.serving, [prompt], beams, width, priority, self.deadline).describe(content)
        if self.search is None:
            generation = Generation(self.serving, [prompt], self.params, priority, self.deadline, given=self.given)
            return generation.describe(content)
        kwargs, messages = self._template_kwargs(), self.body.messages
        more = (self.answers, priority, self.deadline, kwargs)
        return Searching(self.serving, self.search, prompt, messages, self.params, *more).describe(content)

    async def whole(self) -> ChatResponse:
        """Return the answer in one piece."""
        async with self.deadline:
            generation = await self._prepare()
        (result,) = await generation.whole()
        outputs = result.outputs if self.given is None else result.outputs[-1:]
        readers = [self.answers.reader() for _ in outputs]
        choices = [await self._choice(*each) for each in zip(outputs, readers, strict=True)]
        response = ChatResponse(
            id=f"chatcmpl-{generation.id}",
            created=generation.created,
            model=self.serving.model_name,
            choices=choices,
            usage=self._usage(generation, zip(readers, outputs, strict=True)),
            prompt_logprobs=prompt_logprobs(result.prompt_logprobs),
            prompt_token_ids=result.prompt_token_ids if self.body.return_token_ids else None,
        )
        if isinstance(generation, Searching):
            return SearchedChat(**dict(response), search=generation.report)
        return response

    def _usage(
        self, generation: Generation | Beams | Searching, read: Iterable[tuple[AnswerReader, CompletionOutput]]
    ) -> Usage:
        """Return the token counts; ``read``: each answer with its reader."""
        usage = generation.usage()
        if self.answers.thinks:
            count = sum(self.answers.thought_tokens(reader, output.token_ids) for reader, output in read)
            usage.completion_tokens_details = CompletionDetails(reasoning_tokens=count)
        return usage

    async def _choice(self, output: CompletionOutput, reader: AnswerReader) -> ChatChoice:
        answer = reader.whole(output)
        calls = [
            ToolCall(id=call.id, type="function", function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in answer.calls
        ]
        logprobs: ChatLogprobs | None = None
        if output.logprobs is not None and self.body.logprobs:
            tokenizer = self.serving.engine.tokenizer
            drawn = output.token_ids[-len(output.logprobs) :]  # there are none of tokens that were given
            with_ids = bool(self.body.return_token_ids)
            logprobs = await all_chat_logprobs(output.logprobs, drawn, self.top, tokenizer, with_ids)
        return ChatChoice(
            index=output.index,
            message=AssistantMessage(
                content=answer.text,
                reasoning_content=answer.thoughts,
                reasoning=answer.thoughts,
                tool_calls=calls if calls else None,
            ),
            logprobs=logprobs,
            finish_reason=finish_reason(self.answers.finish_reason(output.finish_reason or "", reader)),
            stop_reason=output.stop_reason,
            token_ids=list(output.token_ids) if self.body.return_token_ids else None,
        )

    async def begin(self) -> AsyncIterator[bytes]:
        """Submit the request, and return the stream of chunks. A refusal is raised here, before anything has been
        sent."""
        async with self.deadline:
            generation = await self._prepare()
        assert not isinstance(generation, Beams), "beams are not streamed"
        await generation.start()
        return self._chunks(generation)

    async def _chunks(self, generation: Generation | Searching) -> AsyncIterator[bytes]:
        texts: dict[int, TextEvents] = {}
        readers: dict[int, AnswerReader] = {}
        final: RequestOutput | None = None
        async with generation:
            async for news in generation:
                body = b""
                index = 0 if isinstance(news, SearchProgress) else news.choice
                if index not in texts:
                    first = ChunkChoice(index=index, delta=Delta(role="assistant", content=""))
                    chunk = self._chunk(generation, [first])
                    if self.body.return_token_ids:
                        chunk.prompt_token_ids = generation.prompts[0].token_ids
                    body = event(chunk)
                    choice = ChunkChoice(index=index, delta=Delta(content=PLACE))
                    texts[index] = TextEvents(self._chunk(generation, [choice]))
                    readers[index] = self.answers.reader()
                if isinstance(news, SearchProgress):
                    yield body + event(self._progress(generation, news))
                    continue
                if news.update.approximate:
                    yield CONTINUED
                update, reader = news.update, readers[news.choice]
                final = update.final or final
                piece = reader.feed(update.text, update.finish_reason, update.stop_reason)
                plain = not (self.body.logprobs or self.body.continuous_usage or self.body.return_token_ids)
                if plain and not (piece.calls or piece.thoughts or update.finish_reason):
                    yield body + (texts[news.choice].event(piece.text) if piece.text else b"")
                else:
                    chunks = self._pieces(news, piece, reader)
                    yield body + b"".join(event(self._chunk(generation, [chunk])) for chunk in chunks)
            if self.body.include_usage:
                read = (
                    []
                    if final is None
                    else [(readers[each.index], each) for each in final.outputs if each.index in readers]
                )
                yield event(self._chunk(generation, [], self._usage(generation, read)))

    def _progress(self, generation: Generation | Searching, news: SearchProgress) -> SearchChunk:
        """Build a chunk that ordinary clients read as an empty piece of the answer."""
        return SearchChunk(**dict(self._chunk(generation, [ChunkChoice(index=0, delta=Delta())])), search=news.state)

    def _pieces(self, news: Event, piece: AnswerPiece, reader: AnswerReader) -> list[ChunkChoice]:
        """Split an update into chunks: the new parts, then the end by itself."""
        update, index = news.update, news.choice
        ids = update.token_ids if self.body.return_token_ids else None
        thoughts = piece.thoughts
        deltas = [Delta(reasoning_content=thoughts, reasoning=thoughts)] if thoughts else []
        if piece.text or ((update.logprobs or ids) and not (deltas or piece.calls)):
            deltas.append(Delta(content=piece.text))
        deltas += [Delta(tool_calls=[_call(call)]) for call in piece.calls]
        pieces = [ChunkChoice(index=index, delta=delta) for delta in deltas]
        if pieces:
            pieces[0].logprobs = self._logprobs(update.logprobs, update.token_ids)
            pieces[0].token_ids = ids
        if update.finish_reason is not None:
            reason = finish_reason(self.answers.finish_reason(update.finish_reason, reader))
            end = ChunkChoice(index=index, delta=Delta(), finish_reason=reason, stop_reason=update.stop_reason)
            pieces.append(end)
        return pieces

    def _logprobs(self, positions: list[PositionLogprobs] | None, token_ids: list[int]) -> ChatLogprobs | None:
        if positions is None or not self.body.logprobs:
            return None
        tokenizer, with_ids = self.serving.engine.tokenizer, bool(self.body.return_token_ids)
        return chat_logprobs(positions, token_ids, self.top, tokenizer, with_ids)

    def _chunk(
        self, generation: Generation | Searching, choices: list[ChunkChoice], usage: Usage | None = None
    ) -> ChatChunk:
        return ChatChunk(
            id=f"chatcmpl-{generation.id}",
            created=generation.created,
            model=self.serving.model_name,
            choices=choices,
            usage=generation.usage() if usage is None and self.body.continuous_usage else usage,
        )


def _call(news: CallDelta) -> ToolCall:
    """Convert an update of a call to the form of chunks: the beginning with ``id``, later pieces with the index
    alone."""
    function = FunctionCall(name=news.name, arguments=news.arguments)
    kind = None if news.id is None else "function"
    return ToolCall(index=news.index, id=news.id, type=kind, function=function)  # type: ignore[arg-type]
