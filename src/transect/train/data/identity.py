"""Identity of a run: digests of its data, its mask of trained tokens, the base of its adapters or its reference, and
its teacher.

A checkpoint keeps a digest of each. A resumed run compares them and names what has changed, so that a replaced file
does not change a run unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...checkpoints.resolve import ModelSource
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
    """Compute digests of all tokens with their documents' ends, and of the mask."""
    data = hashlib.sha256(np.ascontiguousarray(stream.ends, dtype="<u8").tobytes())
    for first in range(0, len(stream.tokens), PIECE):
        data.update(np.ascontiguousarray(stream.tokens[first : first + PIECE], dtype="<u4").tobytes())
    masks = hashlib.sha256()
    if stream.trained is not None:
        for first in range(0, len(stream.trained), PIECE):
            masks.update(np.packbits(stream.trained[first : first + PIECE]).tobytes())
    return {"data": data.hexdigest(), "masks": masks.hexdigest()}


def base_identity(source: ModelSource) -> str:
    """Compute a digest of a model's weight files; empty for a model that is only a shape."""
    if source.kind == "shape":
        return ""
    path = Path(source.path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else source.gguf_files
    made = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            made.update(hashlib.file_digest(opened, "sha256").digest())
    return made.hexdigest()


FIXED = ("task", "objective", "precision", "new_tokens", "optimizer.name", "lora")
"""Settings that determine the contents of a checkpoint; others may change when a run is resumed."""
FREE = ("dropout", "start")
"""Settings of adapters that may change."""
BASE = ("group", "base_format")
"""Settings of adapters that determine the rounding of the frozen base of ``qlora``."""


def check_settings(kept: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    """Check that a resumed run still trains the parameters of its checkpoint.

    Args:
        kept: the configuration in the checkpoint at ``where``; what it does not have is not compared.
        now: that of the run.

    Raises:
        ValueError: it does not; the message names the setting.
    """
    for name in FIXED:
        old, new = (_at(values, name) for values in (kept, now))
        if name == "lora":
            if now["task"] not in ("lora", "qlora") or not isinstance(old, Mapping):
                continue
            free = FREE if now["task"] == "qlora" else FREE + BASE
            changed = [key for key in new if key in old and key not in free and _plain(old[key]) != _plain(new[key])]
            if not changed:
                continue
            name, old, new = f"lora.{changed[0]}", old[changed[0]], new[changed[0]]
        if old is not None and _plain(old) != _plain(new):
            raise ValueError(
                f"{where} is of a run with {name} = {_plain(old)!r}, and this asks for {_plain(new)!r}: leave it as it "
                "was, or start another run from that checkpoint"
            )


def _at(values: Mapping[str, Any], name: str) -> Any:
    found: Any = values
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def compare(kept: Mapping[str, str], now: Mapping[str, str], allowed: Collection[str], where: Path) -> None:
    """Check that a run may resume from a checkpoint.

    Args:
        kept: identity of the checkpoint at ``where``; missing parts are not compared.
        now: present identity.
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
            f"of that run back, or resume all the same with --allow-changed {','.join(refused)}"
        )
