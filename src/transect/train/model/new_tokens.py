"""New tokens of a vocabulary: the tokenizer's files with them, and their rows in embedding and head."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
import torch
from tokenizers import AddedToken
from torch import Tensor

from ...models.staging import dense_values
from ...models.stored import Stored, StoredWeights
from ...text.export import export_tokenizer

if TYPE_CHECKING:
    from ...checkpoints.resolve import ModelSource


def write_with_tokens(source: ModelSource, tokens: Sequence[str], folder: Path) -> int:
    """Write the tokenizer of a model with further tokens into ``folder``, which must contain nothing else. Existing
    tokens are unchanged. Tokens written ``<|like this|>`` become special: the text of a chat cannot spell them.

    Several processes may write the same into one folder: each file is always a whole one.

    Returns:
        The highest token id plus one.

    Raises:
        ValueError: the model has no tokenizer, or a token is empty.
    """
    if not all(tokens):
        raise ValueError("new_tokens holds an empty one: leave it out")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as part:
        size = _write(source, tokens, Path(part))
        names = os.listdir(part)
        for name in names:
            (Path(part) / name).replace(folder / name)
    for path in folder.iterdir():  # of a run before
        if path.name not in names:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return size


def _write(source: ModelSource, tokens: Sequence[str], folder: Path) -> int:
    export_tokenizer(source, folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError("new_tokens need a tokenizer, and this model has none")
    backend = tokenizers.Tokenizer.from_file(str(path))
    special = [token for token in tokens if token.startswith("<|") and token.endswith("|>")]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in tokens if token not in special])
    backend.save(str(path))
    return max(backend.get_vocab(with_added_tokens=True).values()) + 1


def grown_tables(weights: StoredWeights, rows: int) -> StoredWeights:
    """Yield the weights with an embedding and a head of ``rows`` rows.

    A new row is the mean of those that are there.
    """
    for name, stored in weights:
        if name in ("embed.weight", "head.weight") and stored.shape[0] < rows:
            yield name, Stored((rows, *stored.shape[1:]), partial(_read, stored, rows))
        else:
            yield name, stored


def _read(stored: Stored, wanted: int, rows: slice, columns: slice) -> Tensor:
    table = dense_values(stored.read())
    mean = table.float().mean(0, keepdim=True).to(table.dtype)
    return torch.cat([table, mean.expand(wanted - table.shape[0], -1)])[rows, columns]
