"""Read and tokenize data during the run, with only a section of it in memory.

The files are cut into chunks (``chunks.py``). In every epoch the chunks are shuffled and dealt into sections of about
``data.buffer_mib``. A section is tokenized in a thread while the one before it is trained on; then its documents are
shuffled and packed as those of a whole run are (``batches.py``). So order is mixed twice: chunks over all the data, and
documents within a section.

A section is a pure function of files, seed and its number. So a position is three numbers, and a resumed run
reads one section again and sees exactly the batches that it would have seen.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ...text.chat_template import ChatTemplate
from ...text.tokenizer import Tokenizer
from ..config import DataConfig
from .batches import Batch, DocumentPlan, EpochPlan, NothingFits, WindowPlan
from .chunks import CHUNK_BYTES, Chunk, cut
from .documents import Document, Reader, turns_key
from .files import find
from .loader import Position
from .tokens import TokenStream, collect

log = logging.getLogger(__name__)
SECTIONS = 2**32
"""Most sections of an epoch: epoch and section form one number, which seeds a section's shuffle."""


class StreamingLoader:
    """Endless sequence of micro-batches over files; see ``data.Loader``, which has all data in memory.

    Args:
        tell: receives messages about the files read, and documents left out or shortened.

    Raises:
        ValueError: no file, one that is missing or tokenized already, or no text in them.
    """

    def __init__(
        self,
        config: DataConfig,
        seed: int,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        *,
        tell: Callable[[str], None] = log.warning,
    ) -> None:
        if tokenizer is None:
            raise ValueError("the model brings no tokenizer to read data with: tokenize it with another, or name one")
        self.config, self.seed, self._vocab_size = config, seed, vocab_size
        self._tokenizer, self._template, self._tell = tokenizer, template, tell
        files = find(list(config.train))
        if done := [str(file.path) for file in files if file.kind == "tokens"]:
            raise ValueError(f"{done[0]} is tokenized already and mapped, not read: leave out data.streaming")
        self._files = [file.path for file in files]
        self._buffer = int(config.buffer_mib * 2**20)
        # Several chunks to a section, or it would be the same neighbours in every epoch.
        pieces = max(1, min(CHUNK_BYTES, self._buffer // 4))
        self._chunks = [chunk for file in files for chunk in cut(file, pieces)]
        if not self._chunks:
            raise ValueError(f"{', '.join(config.train)}: there is no text in these files")
        self.position = Position()
        self._thread = ThreadPoolExecutor(1, "section")
        self._ahead: tuple[tuple[int, int], Future[EpochPlan | None]] | None = None
        self._now: tuple[tuple[int, int], EpochPlan | None] | None = None
        self._dealt: tuple[int, list[list[Chunk]]] | None = None
        self._masked: bool | None = None
        self._ignored: set[str] = set()
        """Ignored keys that were reported."""
        size = sum(chunk.size for chunk in self._chunks) / 1e6
        tell(f"{len(files)} files, {size:,.1f} MB, are read as the run goes, in {len(self._sections(0))} sections")
        self._plan(0, 0)  # what cannot be read is said before the first step
        self._tell = log.warning

    def __next__(self) -> Batch:
        empty = 0
        while True:
            at = self.position
            plan = self._plan(at.epoch, at.section)
            if plan is not None and at.index < len(plan):
                self.position = Position(at.epoch, at.index + 1, at.section)
                return plan.batch(at.index)
            empty += plan is None
            if empty > len(self._sections(at.epoch)):
                raise ValueError(
                    f"{', '.join(self.config.train)}: no section has the {self.config.micro_batch} tokens of a "
                    "micro-batch: give more data, lower data.micro_batch or raise data.buffer_mib"
                )
            last = at.section + 1 >= len(self._sections(at.epoch))
            self.position = Position(at.epoch + 1) if last else Position(at.epoch, 0, at.section + 1)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def size(self, epoch: int) -> int:
        """Raise ValueError: the number is unknown before all data is read."""
        raise ValueError("epochs are not known of data that is read as the run goes: set steps, not epochs")

    def identity(self) -> dict[str, str]:
        """Compute digests of the files and of the settings for reading them; see ``identity.py``. Every file is read
        once."""
        data = hashlib.sha256(self._tokenizer.fingerprint.encode())
        for path in self._files:
            for inside in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if inside.is_file():
                    with inside.open("rb") as file:
                        data.update(hashlib.file_digest(file, "sha256").digest())
        config = self.config
        template = "" if self._template is None else self._template.sources
        masks = hashlib.sha256(repr((template, turns_key(config.turns), config.date, *config.columns.items())).encode())
        sizes = f"{config.seq_len} {config.micro_batch} {self.seed} {config.too_long} {config.buffer_mib}"
        return {"data": data.hexdigest(), "masks": masks.hexdigest(), "sizes": sizes}

    def _sections(self, epoch: int) -> list[list[Chunk]]:
        """Return the chunks of each section of an epoch."""
        if self._dealt is None or self._dealt[0] != epoch:
            order = np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(len(self._chunks))
            sections: list[list[Chunk]] = [[]]
            size = 0
            for chunk in (self._chunks[index] for index in order):
                if sections[-1] and size + chunk.size > self._buffer:
                    sections.append([])
                    size = 0
                sections[-1].append(chunk)
                size += chunk.size
            self._dealt = epoch, sections
        return self._dealt[1]

    def _plan(self, epoch: int, section: int) -> EpochPlan | None:
        """Plan the micro-batches of a section; None if it has too few tokens for one. Starts reading the next
        section."""
        if self._now is None or self._now[0] != (epoch, section):
            if self._ahead is None or self._ahead[0] != (epoch, section):
                self._begin(epoch, section)
            assert self._ahead is not None
            self._now = self._ahead[0], self._ahead[1].result()
            last = section + 1 >= len(self._sections(epoch))
            self._begin(*((epoch + 1, 0) if last else (epoch, section + 1)))
        return self._now[1]

    def _begin(self, epoch: int, section: int) -> None:
        chunks = self._sections(epoch)[section]
        self._ahead = (epoch, section), self._thread.submit(self._read, chunks, epoch, section)

    def _read(self, chunks: list[Chunk], epoch: int, section: int) -> EpochPlan | None:
        config = self.config
        skip = config.on_bad_row == "skip"
        reader = Reader(
            self._tokenizer, self._template, skip=skip, some=False, turns=config.turns, columns=config.columns
        )  # fmt: skip
        stream = collect(self._documents(chunks, reader), self._vocab_size, Path(chunks[0].path), allow_empty=True)
        for tally in reader.tallies:
            first = epoch == section == 0 and tally is reader.tallies[0]
            if tally.left_out or first or tally.ignored.keys() - self._ignored:
                self._tell(str(tally))
                self._ignored |= tally.ignored.keys()
        return self._planned(stream, epoch, section)

    @staticmethod
    def _documents(chunks: list[Chunk], reader: Reader) -> Iterator[Document]:
        for chunk in chunks:
            yield from chunk.documents(reader)

    def _planned(self, stream: TokenStream, epoch: int, section: int) -> EpochPlan | None:
        config = self.config
        if not stream.num_documents:
            return None
        masked = stream.trained is not None
        if self._masked not in (None, masked):
            raise ValueError("chats and text cannot be packed in one run: give either in data.train")
        self._masked = masked
        sizes = stream, config.seq_len, config.micro_batch, self.seed, epoch * SECTIONS + section
        if not masked:
            whole = config.micro_batch // config.seq_len * config.seq_len
            return WindowPlan(*sizes) if len(stream.tokens) >= whole else None
        try:
            plan = DocumentPlan(*sizes, too_long=config.too_long)
        except NothingFits as nothing:
            self._tell(f"a section of {stream.num_documents} documents is left out: {nothing}")
            return None
        for line in plan.told(" of a section"):
            self._tell(line)
        return plan
