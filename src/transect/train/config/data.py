"""What a run trains on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .parse import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The training data.

    Attributes:
        train, validation: files, by their endings: text, rows (JSON, JSON lines, CSV, parquet), directories of Hugging
            Face ``datasets``, or a ``.tokens`` directory that ``transect data tokenize`` wrote (``files.py``). Rows may
            be in any layout of ``layouts.py``; of a chat the assistant's tokens are trained on.
        on_bad_row: what a row does that cannot be used: ``stop`` the run before its first step, or be left out
            (``skip``) and counted.
        seq_len: longest document, in tokens; longer ones are cut (text) or left out with a count (chats).
        micro_batch: tokens of one forward pass; documents are packed into it and never see each other.
    """

    train: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    on_bad_row: Literal["stop", "skip"] = "stop"
    seq_len: int = 1024
    micro_batch: int = 4096

    def __post_init__(self) -> None:
        positive(self, "seq_len", "micro_batch")
        if self.micro_batch < self.seq_len:
            raise ValueError(
                f"data.micro_batch ({self.micro_batch} tokens) is smaller than data.seq_len ({self.seq_len}): raise it "
                "to at least that"
            )
