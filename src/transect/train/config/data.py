"""Configure the training data of a run."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass, field
from typing import Literal

from .parse import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The training data.

    Attributes:
        train, validation: files, by their endings: text, rows (JSON, JSON lines, CSV, parquet), directories of Hugging
            Face ``datasets``, or ``.tokens`` directories of ``transect data tokenize`` (``train/data/files.py``).
            ``train/data/layouts.py`` lists the layouts of rows; in a chat the assistant's tokens are trained on.
        columns: the files' own names of columns of ``train/data/layouts.py``, such as ``{question = "Frage"}``.
        on_bad_row: action for an unusable row: ``stop`` the run before its first step, or ``skip`` and count the row.
        chat_template: ``auto``: the model's own, or, if that template changes earlier turns with every answer, a
            version that keeps every turn (``train/data/chat.py``); ``model``: the model's own; else a file with a Jinja
            template, or the template itself.
        turns: documents of a chat with several answers: ``together``, one; ``apart``, one per answer, after the prompt
            that a server would give the model at that turn; ``auto``, one if the template renders a conversation as the
            continuation of its beginning, else one per answer.
        date: today's date for chat templates, such as ``2026-01-31``; empty: the day on which the run starts. A resumed
            run keeps it.
        weights: share of each entry of ``train`` in the tokens of an epoch; empty: each document once. A small file is
            repeated, and of a large one a different part is used in every epoch.
        streaming: read and tokenize ``train`` during the run, for data larger than memory; needs ``steps``. Token files
            are mapped and need no streaming.
        buffer_mib: MiB of files whose documents are shuffled together when they are streamed. A single text, a
            compressed file and a row group of parquet are read whole.
        seq_len: longest document, in tokens. Text is cut into pieces of that length.
        too_long: action for longer chats: ``drop`` leaves them out, ``cut`` keeps their first tokens (pairs and
            judged answers are left out), ``stop`` is an error; the run reports their number.
        micro_batch: tokens of one forward pass; documents are packed into it and do not attend to each other.
    """

    train: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    columns: dict[str, str] = field(default_factory=dict, hash=False)
    on_bad_row: Literal["stop", "skip"] = "stop"
    chat_template: str = "auto"
    turns: Literal["auto", "together", "apart"] = "auto"
    date: str = ""
    weights: tuple[float, ...] = ()
    streaming: bool = False
    buffer_mib: float = 32
    seq_len: int = 1024
    too_long: Literal["drop", "cut", "stop"] = "drop"
    micro_batch: int = 4096

    def __post_init__(self) -> None:
        positive(self, "seq_len", "micro_batch")
        if not self.buffer_mib > 0:
            raise ValueError(f"data.buffer_mib must be greater than 0, not {self.buffer_mib}")
        if self.streaming and self.weights:
            raise ValueError("data.weights needs all the data before the first step: leave out data.streaming")
        if self.weights and (
            len(self.weights) != len(self.train) or not all(0 < share < math.inf for share in self.weights)
        ):
            raise ValueError(
                f"data.weights needs a number greater than 0 for each of the {len(self.train)} entries of data.train"
            )
        if self.date:
            try:
                datetime.date.fromisoformat(self.date)
            except ValueError:
                raise ValueError(f"data.date must be a day such as 2026-01-31, not {self.date!r}") from None
        if self.micro_batch < self.seq_len:
            raise ValueError(
                f"data.micro_batch ({self.micro_batch} tokens) is smaller than data.seq_len ({self.seq_len}): raise it "
                "to at least that"
            )
