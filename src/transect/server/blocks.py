"""An answer as a list of blocks: thoughts, text, calls. ``/v1/responses`` and ``/v1/messages`` show answers as blocks,
whole and in streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..engine.scheduling.sampling_params import SamplingParams
from ..search.settings import SearchSettings
from ..text.tools.spec import ToolUse
from .answers import AnswerPiece, AnswerReader, Answers
from .capture.slips import RequestContent
from .generation import Generation
from .http.body import aside
from .http.errors import bad_value
from .http.lifetime import Deadline
from .openai.logprobs import chat_logprobs
from .openai.protocol import FIELDS, ChatMessage
from .prompts import chat_prompt
from .searching import Searching, SearchProgress
from .serving import Serving

if TYPE_CHECKING:
    from ..text.output_processor import Update

Kind = Literal["thoughts", "text", "call"]


@dataclass(slots=True)
class Block:
    """A part of an answer. ``content`` is text, or the arguments of a call as JSON text; it grows during a stream."""

    kind: Kind
    index: int
    content: str = ""
    id: str = ""
    name: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Entries for the tokens of a text, in the form of OpenAI's API, if they were requested."""


@dataclass(frozen=True, slots=True)
class News:
    """Event of a block: it begins (``begin``), grows by ``text`` (``more``) or ends (``end``)."""

    what: Literal["begin", "more", "end"]
    block: Block
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class Blocks:
    """The blocks of one answer so far."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open = False
        self._logprobs: list[dict[str, Any]] = []

    def feed(self, piece: AnswerPiece, logprobs: Sequence[dict[str, Any]] = ()) -> list[News]:
        """Add a piece of the answer, and return the events that it causes.

        Args:
            logprobs: of the tokens that came with it. Those of tokens that are not text yet wait for it.
        """
        self._logprobs += logprobs
        news: list[News] = []
        if piece.thoughts:
            news += self._more("thoughts", piece.thoughts)
        if piece.text:
            news += self._more("text", piece.text)
            self.blocks[-1].logprobs += self._logprobs
            news[-1].logprobs.extend(self._logprobs)
        if piece.text or piece.thoughts or piece.calls:
            self._logprobs = []
        for call in piece.calls:
            if call.name is not None:
                news += [*self.close(), *self._begin(Block("call", len(self.blocks), "", call.id or "", call.name))]
            if call.arguments:
                self.blocks[-1].content += call.arguments
                news.append(News("more", self.blocks[-1], call.arguments))
        return news

    def close(self) -> list[News]:
        """Close the last block, and return its event."""
        was_open, self._open = self._open, False
        return [News("end", self.blocks[-1])] if was_open else []

    def _more(self, kind: Kind, text: str) -> list[News]:
        news: list[News] = []
        if not self._open or self.blocks[-1].kind != kind:
            news += [*self.close(), *self._begin(Block(kind, len(self.blocks)))]
        self.blocks[-1].content += text
        return [*news, News("more", self.blocks[-1], text)]

    def _begin(self, block: Block) -> list[News]:
        self.blocks.append(block)
        self._open = True
        return [News("begin", block)]


@dataclass(slots=True)
class Ending:
    """End of an answer: ``stop``, ``length`` or ``tool_calls``, and the stop string that ended it, if any."""

    reason: str
    stop_reason: int | str | None


class Conversation:
    """One answer to a conversation while it is generated.

    Args:
        messages: in the form of the chat API.
        params: for one choice.
        use: tools that may be called, or None.
        deadline: when the last token must have come.
        search: settings of a search for the answer, or None.
    """

    def __init__(
        self,
        serving: Serving,
        messages: list[ChatMessage],
        params: SamplingParams,
        use: ToolUse | None,
        deadline: Deadline,
        search: SearchSettings | None = None,
    ) -> None:
        self.serving, self.messages, self.params, self.use = serving, messages, params, use
        self.deadline, self.search = deadline, search
        self.progress: dict[str, Any] | None = None
        """State of the search, where the last news was nothing else."""
        self.blocks = Blocks()
        self.ending = Ending("stop", None)
        self._api, self._streamed = "chat", False
        self._tools: Sequence[Any] = ()
        self.thought_tokens = 0
        """Tokens of the answer that were thoughts; known when the answer has ended."""
        self.continued = False
        """True while updates are approximate (``Update.approximate``)."""

    def describe(self, api: str, tools: Sequence[Any] | None, streamed: bool) -> None:
        """Describe the request for captures and metrics (``RequestContent``)."""
        self._api, self._tools, self._streamed = api, tools or (), streamed

    async def start(
        self, template_kwargs: dict[str, Any] | None = None, *, goes_on: bool = False
    ) -> Generation | Searching:
        """Submit the request; a refusal is raised here. ``goes_on``: the answer continues the last message.

        Raises:
            ApiError: the conversation or the parameters are at fault, or the engine refuses.
        """
        await self.prepare(template_kwargs, goes_on=goes_on)
        return await self.submit(self.messages[-1].text if goes_on else "")

    async def prepare(self, template_kwargs: dict[str, Any] | None = None, *, goes_on: bool = False) -> None:
        """Make the prompt; arguments and errors as of ``start``."""
        async with self.deadline:
            room = self.params.max_tokens or 1
            self._template_kwargs = template_kwargs
            self.prompt = await chat_prompt(
                self.serving,
                self.messages,
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
                room=room,
                template_kwargs=template_kwargs,
                use=self.use,
            )

    async def submit(self, said: str = "") -> Generation | Searching:
        """Submit the prompt that ``prepare`` has made; ``said``: the beginning of the answer, if the prompt contains
        it."""
        self._answers = Answers(self.serving, self.use, self.prompt.text or "", said)
        try:
            params = await aside(self._answers.params, self.params)
        except ValueError as error:
            raise bad_value(str(error), FIELDS) from None
        self.generation: Generation | Searching
        if self.search is None:
            self.generation = Generation(self.serving, [self.prompt], params, 0, self.deadline)
        else:
            more = (self._answers, 0, self.deadline, self._template_kwargs)
            self.generation = Searching(self.serving, self.search, self.prompt, self.messages, params, *more)
        reader = None if self._answers.plain else self._answers.reader
        content = RequestContent(self._api, self.params, self.messages, (), self._tools, reader, self._streamed)
        self.generation.describe(content)
        await self.generation.start()
        return self.generation

    async def news(self) -> AsyncGenerator[list[News], None]:
        """Yield the events of each update, then set ``ending``. Closing the generator ends the request."""
        reader: AnswerReader = self._answers.reader()
        async with self.generation:
            async for event in self.generation:
                if isinstance(event, SearchProgress):
                    self.progress = event.state
                    yield []
                    continue
                self.progress = None
                update = event.update
                self.continued = update.approximate
                piece = reader.feed(update.text, update.finish_reason, update.stop_reason)
                news = self.blocks.feed(piece, self._logprobs(update))
                if update.finish_reason is not None:
                    news += self.blocks.close()
                    reason = self._answers.finish_reason(update.finish_reason, reader)
                    self.ending = Ending(reason, update.stop_reason)
                if update.final is not None:
                    self.thought_tokens = self._answers.thought_tokens(reader, update.final.outputs[0].token_ids)
                yield news

    def _logprobs(self, update: Update) -> list[dict[str, Any]]:
        if self.params.logprobs is None or not update.logprobs:
            return []
        tokenizer = self.serving.engine.tokenizer
        return chat_logprobs(update.logprobs, update.token_ids, self.params.logprobs, tokenizer).model_dump()["content"]

    @property
    def report(self) -> dict[str, Any] | None:
        """The tree of a search that has ended; None without a search."""
        return self.generation.report if isinstance(self.generation, Searching) else None

    async def whole(self) -> list[Block]:
        """Wait for the end of the answer, and return all blocks."""
        async for _ in self.news():
            pass
        return self.blocks.blocks
