"""Converts the files of a run to micro-batches, with a position that a checkpoint keeps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace

from ...text.chat_template import ChatTemplate
from ...text.tokenizer import Tokenizer
from ..config import DataConfig
from .batches import Batch, DocumentPlan, EpochPlan, WindowPlan
from .documents import Reader
from .files import DataFile, find
from .identity import stream_identity
from .tokens import SUFFIX, TokenStream, collect, join, open_tokens

log = logging.getLogger(__name__)


def load_stream(
    paths: Sequence[str],
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    template: ChatTemplate | None = None,
    *,
    skip: bool = False,
    turns: str = "auto",
    columns: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = log.info,
) -> TokenStream:
    """Read every document of the files; text and rows are tokenized in memory, token files are mapped.

    Args:
        tokenizer: needed for anything but token files.
        template: needed for chats.
        skip: leave out rows that cannot be used.
        turns, columns: as in ``DataConfig``.
        tell: receives a summary of each file.

    Raises:
        ValueError: no file, one that cannot be read, chats mixed with text, or something missing to read them with.
    """
    if not paths:
        find([])
    streams: list[TokenStream] = []
    sources: list[int] = []
    for name in paths:
        for file in find([name]):
            streams.append(_read(file, vocab_size, tokenizer, template, skip, turns, columns, tell))
        sources.append(sum(stream.num_documents for stream in streams))
    kinds = {stream.trained is not None for stream in streams}
    if len(kinds) == 2:
        raise ValueError("chats and text cannot be packed in one run: give either in data.train")
    return replace(join(streams), sources=tuple(sources))


def _read(
    file: DataFile,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    skip: bool,
    turns: str,
    columns: Mapping[str, str] | None,
    tell: Callable[[str], None],
) -> TokenStream:
    if file.kind == "tokens":
        stream = open_tokens(file.path, vocab_size, None if tokenizer is None else tokenizer.fingerprint)
        tell(f"{file.path}: {stream.num_documents} documents, tokenized before")
        return stream
    if tokenizer is None:
        raise ValueError(f"the model brings no tokenizer to read {file.path} with: give a {SUFFIX} directory")
    reader = Reader(tokenizer, template, skip=skip, turns=turns, columns=columns)
    stream = collect(reader.file(file), vocab_size, file.path)
    for tally in reader.tallies:
        tell(str(tally))
    return stream


@dataclass(slots=True)
class Position:
    """The next micro-batch of a run."""

    epoch: int = 0
    index: int = 0
    section: int = 0
    """Section of an epoch that ``index`` counts in, for streamed data."""


class Loader:
    """Endless sequence of micro-batches over a stream, in epochs.

    ``position`` can be read at any time and set again later: batches then continue from there.

    Args:
        ahead: make the next micro-batch in a thread while this one is in use, for a device that would wait for it.
        held_out: the stream is for ``one_epoch``: ``config.weights`` are not of it, and it may be short.
        tell: receives messages about documents that are left out or shortened.

    Raises:
        ValueError: the stream is too short for the sizes in ``config``.
    """

    def __init__(
        self,
        stream: TokenStream,
        config: DataConfig,
        seed: int,
        *,
        ahead: bool = False,
        held_out: bool = False,
        tell: Callable[[str], None] = log.warning,
    ) -> None:
        self._thread = ThreadPoolExecutor(1, "loader") if ahead else None
        self._ahead: tuple[Position, Future[Batch]] | None = None
        self.stream = stream
        self.config = config
        self.seed = seed
        self.position = Position()
        self._plan_of: tuple[int, EpochPlan] | None = None
        self._held_out = held_out
        plan = self._plan(0)
        self._often = plan.often
        for number, name in enumerate(config.train if plan.often else ()):
            if number not in plan.sources:
                raise ValueError(
                    f"data.weights gives {name} a share, and it has nothing that fills or fits data.seq_len = "
                    f"{config.seq_len}: change that, or leave {name} out"
                )
        if isinstance(plan, DocumentPlan):
            for line in plan.told():
                tell(line)

    def identity(self) -> dict[str, str]:
        """Return digests of everything that maps a position to a batch; see ``identity.py``."""
        sizes = f"{self.config.seq_len} {self.config.micro_batch} {self.seed}"
        if self.config.too_long != "drop" or self._often:
            sizes += f" {self.config.too_long} {self._often}"
        return {**stream_identity(self.stream), "sizes": sizes}

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

    def size(self, epoch: int) -> int:
        """Count the micro-batches of an epoch."""
        return len(self._plan(epoch))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def one_epoch(self) -> Iterator[Batch]:
        """Yield every token once, for validation: text in order, the last micro-batch shorter. ``position`` is
        unchanged."""
        plan = self._plan(0)
        if isinstance(plan, WindowPlan):
            return plan.in_order()
        return (plan.batch(index) for index in range(len(plan)))

    def _plan(self, epoch: int) -> EpochPlan:
        if self._plan_of is None or self._plan_of[0] != epoch:
            config = self.config
            weights = () if self._held_out else config.weights
            sizes = self.stream, config.seq_len, config.micro_batch, self.seed, epoch, weights
            if self.stream.trained is not None:
                self._plan_of = epoch, DocumentPlan(*sizes, config.too_long)
            else:
                self._plan_of = epoch, WindowPlan(*sizes, short=self._held_out)
        return self._plan_of[1]
