"""Turns the files of a run into micro-batches, with a position that a checkpoint keeps."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..text.chat_template import ChatTemplate
from ..text.tokenizer import Tokenizer
from .batches import Batch, DocumentPlan, EpochPlan, WindowPlan
from .config import DataConfig
from .tokens import SUFFIX, TokenStream, join, open_tokens, token_dtype

log = logging.getLogger(__name__)


def load_stream(
    paths: Sequence[str],
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    template: ChatTemplate | None = None,
) -> TokenStream:
    """Every document of the files; text and chats are tokenized in memory, token files are mapped.

    Args:
        tokenizer: needed for anything but token files.
        template: needed for chats.

    Raises:
        ValueError: no file, one that cannot be read, chats mixed with text, or something missing to read them with.
    """
    if not paths:
        raise ValueError("no data: name at least one file in data.train")
    streams = []
    for name in paths:
        path = Path(name)
        if path.suffix == SUFFIX or (path.is_dir() and (path / "meta.json").exists()):
            streams.append(open_tokens(path, vocab_size, None if tokenizer is None else tokenizer.fingerprint))
            continue
        if not path.is_file():
            raise ValueError(f"there is no file {path}: correct data.train or data.validation")
        if tokenizer is None:
            raise ValueError(f"the model brings no tokenizer to read {path} with: give a {SUFFIX} directory instead")
        documents = read_documents(path, tokenizer, template)
        streams.append(collect(documents, vocab_size, path))
    kinds = {stream.trained is not None for stream in streams}
    if len(kinds) == 2:
        raise ValueError("chats and text cannot be packed in one run: give either in data.train")
    return join(streams)


def read_documents(
    path: Path, tokenizer: Tokenizer, template: ChatTemplate | None
) -> Iterator[tuple[list[int], list[bool] | None]]:
    """Token ids of each document of a text or JSONL file, and for chats which of them are trained on.

    Raises:
        ValueError: not UTF-8, a line that is not what it should be (its number is named), or no chat template.
    """
    try:
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as file:
                yield from read_lines(file, path, tokenizer, template)
        else:
            yield text_tokens(path.read_text(encoding="utf-8"), tokenizer), None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): convert it") from None


def read_lines(
    lines: Iterable[str], path: Path, tokenizer: Tokenizer, template: ChatTemplate | None, first_line: int = 1
) -> Iterator[tuple[list[int], list[bool] | None]]:
    """``read_documents`` for lines of JSONL; ``path`` and ``first_line`` are for messages."""
    for number, line in enumerate(lines, first_line):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        record = _record(line, where)
        if "messages" in record:
            if template is None:
                raise ValueError(f"{where} is a chat and the model brings no chat template: use a model with one")
            try:
                yield chat_tokens(record["messages"], tokenizer, template)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        elif isinstance(record.get("text"), str):
            yield text_tokens(record["text"], tokenizer), None
        else:
            raise ValueError(f'{where} needs "messages" (a chat) or "text" (a string)')


def text_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    """A document as the model expects it, closed by the end-of-text token if there is one."""
    return [*tokenizer.encode(text, add_special_tokens=True), *tokenizer.eos_token_ids[:1]]


def chat_tokens(messages: Any, tokenizer: Tokenizer, template: ChatTemplate) -> tuple[list[int], list[bool]]:
    """A chat as the model will see it when it serves, and a mask of the tokens that the assistant said.

    Each answer is tokenized on its own after the text that opens it, as when a server renders the prompt and the model
    continues. The loss covers the answer, including the token that ends it.

    Raises:
        ValueError: malformed messages, none of the assistant's, or a template that does not render a conversation as a
            continuation of its beginning.
    """
    ids: list[int] = []
    trained: list[bool] = []
    done = ""
    for turn, message in enumerate(messages if isinstance(messages, list) else []):
        if not isinstance(message, Mapping) or message.get("role") != "assistant":
            continue
        opened = template.render(messages[:turn], add_generation_prompt=True) if turn else ""
        answered = template.render(messages[: turn + 1], add_generation_prompt=False)
        if not (opened.startswith(done) and answered.startswith(opened)):
            raise ValueError(
                "the chat template renders earlier turns anew with every answer, so answers cannot be told apart"
            )
        before = tokenizer.encode(opened[len(done) :], parse_special=True)
        answer = tokenizer.encode(answered[len(opened) :], parse_special=True)
        ids += before + answer
        trained += [False] * len(before) + said(answer, tokenizer)
        done = answered
    if not any(trained):
        template.render(messages)  # says what is wrong with them, if that is it
        raise ValueError("the chat has no message of the assistant to learn from")
    return ids, trained


def said(answer: Sequence[int], tokenizer: Tokenizer) -> list[bool]:
    """Which tokens of a rendered answer the assistant said: up to and with the last that ends one, or all."""
    ends = [i + 1 for i, token in enumerate(answer) if token in tokenizer.eos_token_ids]
    until = ends[-1] if ends else len(answer)
    return [i < until for i in range(len(answer))]


def collect(
    documents: Iterator[tuple[list[int], list[bool] | None]], vocab_size: int, path: Path, *, allow_empty: bool = False
) -> TokenStream:
    """Documents as one stream in memory. ValueError if there are none, unless that is allowed."""
    tokens: list[np.ndarray] = []
    trained: list[np.ndarray] = []
    ends: list[int] = []
    total = 0
    for ids, said in documents:
        if not ids:
            continue
        tokens.append(np.array(ids, dtype=token_dtype(vocab_size)))
        if said is not None:
            trained.append(np.array(said, dtype=bool))
        total += len(ids)
        ends.append(total)
    if not ends:
        if not allow_empty:
            raise ValueError(f"{path} holds no text")
        return TokenStream(np.empty(0, dtype=token_dtype(vocab_size)), np.empty(0, dtype=np.uint64))
    if trained and len(trained) != len(tokens):
        raise ValueError(f"{path} mixes chats and text: put them into files of their own")
    return TokenStream(
        np.concatenate(tokens), np.array(ends, dtype=np.uint64), np.concatenate(trained) if trained else None
    )


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} must be a JSON object")
    return record


@dataclass(slots=True)
class Position:
    """The next micro-batch of a run."""

    epoch: int = 0
    index: int = 0


class Loader:
    """An endless run of micro-batches over a stream, in epochs.

    ``position`` can be read at any time and set to what was read: batches go on as if nothing had happened.

    Args:
        ahead: make the next micro-batch in a thread while this one is in use, for a device that would wait for it.

    Raises:
        ValueError: the stream is too short for the sizes in ``config``.
    """

    def __init__(self, stream: TokenStream, config: DataConfig, seed: int, *, ahead: bool = False) -> None:
        self._thread = ThreadPoolExecutor(1, "loader") if ahead else None
        self._ahead: tuple[Position, Future[Batch]] | None = None
        self.stream = stream
        self.config = config
        self.seed = seed
        self.position = Position()
        self._plan_of: tuple[int, EpochPlan] | None = None
        plan = self._plan(0)
        left_out = getattr(plan, "left_out", 0)
        if left_out:
            log.warning(
                "%d of %d documents are longer than %d tokens and are left out; raise data.seq_len to use them",
                left_out, stream.num_documents, config.seq_len,
            )  # fmt: skip

    def fingerprint(self) -> str:
        """Changes when the same position would mean another batch."""
        key = f"{self.stream.fingerprint()} {self.config.seq_len} {self.config.micro_batch} {self.seed}"
        return hashlib.sha256(key.encode()).hexdigest()[:16]

    def __next__(self) -> Batch:
        plan = self._plan(self.position.epoch)
        if self.position.index >= len(plan):
            self.position = Position(self.position.epoch + 1, 0)
            plan = self._plan(self.position.epoch)
        if self._ahead is not None and self._ahead[0] == self.position:
            batch = self._ahead[1].result()
        else:
            batch = plan.batch(self.position.index)
        self.position = Position(self.position.epoch, self.position.index + 1)
        if self._thread is not None and self.position.index < len(plan):
            self._ahead = copy(self.position), self._thread.submit(plan.batch, self.position.index)
        return batch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def one_epoch(self) -> Iterator[Batch]:
        """Every token once, for validation: text in its order, the last micro-batch shorter. ``position`` stays."""
        plan = self._plan(0)
        if isinstance(plan, WindowPlan):
            return plan.in_order()
        return (plan.batch(index) for index in range(len(plan)))

    def _plan(self, epoch: int) -> EpochPlan:
        if self._plan_of is None or self._plan_of[0] != epoch:
            kind = WindowPlan if self.stream.trained is None else DocumentPlan
            config = self.config
            self._plan_of = epoch, kind(self.stream, config.seq_len, config.micro_batch, self.seed, epoch)
        return self._plan_of[1]
