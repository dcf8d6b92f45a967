"""What a run is of: its data, which tokens of it are trained on, the base under its adapters or behind its reference,
and its teacher.

A checkpoint keeps a digest of each. A run that goes on compares them and names what has changed, so that a file that
was replaced meanwhile does not change a run in silence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from ..models.resolve import ModelSource
from .tokens import TokenStream

PIECE = 2**24
"""Numbers that are hashed at a time, so that mapped files are never read whole."""
WORDS = {
    "data": "the tokens of the data",
    "masks": "which tokens are trained on",
    "base": "the weights of the base model",
    "teacher": "the weights of the teacher",
    "sizes": "data.seq_len, data.micro_batch or seed",
}


def stream_identity(stream: TokenStream) -> dict[str, str]:
    """Digests of all tokens with their documents' ends, and of the mask."""
    data = hashlib.sha256(np.ascontiguousarray(stream.ends, dtype="<u8").tobytes())
    for first in range(0, len(stream.tokens), PIECE):
        data.update(np.ascontiguousarray(stream.tokens[first : first + PIECE], dtype="<u4").tobytes())
    masks = hashlib.sha256()
    if stream.trained is not None:
        for first in range(0, len(stream.trained), PIECE):
            masks.update(np.packbits(stream.trained[first : first + PIECE]).tobytes())
    return {"data": data.hexdigest(), "masks": masks.hexdigest()}


def base_identity(source: ModelSource) -> str:
    """A digest of the files that hold a model's weights; empty for a model that is only a shape."""
    if source.kind == "shape":
        return ""
    path = Path(source.path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    made = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            made.update(hashlib.file_digest(opened, "sha256").digest())
    return made.hexdigest()


def compare(kept: Mapping[str, str], now: Mapping[str, str], allowed: Collection[str], where: Path) -> None:
    """Whether a run may go on.

    Args:
        kept: what the checkpoint at ``where`` was made of; a part that it does not know is not compared.
        now: what is there.
        allowed: parts that may have changed.

    Raises:
        ValueError: a part has changed that is not in ``allowed``; the message names it.
    """
    if unknown := sorted(set(allowed) - set(WORDS)):
        raise ValueError(f"--allow-changed knows {', '.join(WORDS)}, not {', '.join(unknown)}")
    changed = [part for part in WORDS if part in kept and part in now and kept[part] != now[part]]
    if refused := [part for part in changed if part not in allowed]:
        words = " and ".join(WORDS[part] for part in refused)
        raise ValueError(
            f"{where} is of a run with other data or another base: {words} changed since. Put the files and settings "
            f"of that run back, or go on all the same with --allow-changed {','.join(refused)}"
        )
