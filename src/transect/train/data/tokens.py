"""Token streams: documents concatenated in one array, in memory or in mapped files that are never read whole.

A token file is a directory ``NAME.tokens``:

* ``tokens.bin``: every token, little-endian, uint16 where the vocabulary allows it and else uint32.
* ``ends.bin``: uint64, where each document ends: document i is the tokens from ``ends[i - 1]`` to before ``ends[i]``.
* ``trained.bin``, of chats alone: one byte for each token, 1 where the assistant said it.
* ``meta.json``: version, dtype, both counts, the vocabulary's size and the tokenizer's fingerprint. It is written last,
  so a directory without it is not finished.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 1
SUFFIX = ".tokens"


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Concatenated documents.

    ``tokens [N]`` unsigned, ``ends [documents]`` uint64 ascending, the last being N. ``trained [N]`` bool: which tokens
    the loss is taken on as targets; None for all.
    """

    tokens: np.ndarray
    ends: np.ndarray
    trained: np.ndarray | None = None
    sources: tuple[int, ...] = ()
    """Number of documents up to the end of each entry of ``data.train``, if needed; the last is the total."""

    @property
    def source_tokens(self) -> list[int]:
        """Tokens of each source."""
        ends = [int(self.ends[last - 1]) if last else 0 for last in self.sources]
        return [b - a for a, b in zip([0, *ends], ends, strict=False)]

    @property
    def num_documents(self) -> int:
        return len(self.ends)

    def bounds(self, document: int) -> tuple[int, int]:
        """Return the first token of a document and the one after its last."""
        return (int(self.ends[document - 1]) if document else 0), int(self.ends[document])

    def lengths(self) -> np.ndarray:
        """Return the tokens of each document, int64."""
        return np.diff(np.asarray(self.ends, dtype=np.int64), prepend=0)


def join(streams: list[TokenStream]) -> TokenStream:
    """Concatenate all documents of all streams, in order. A single stream is returned as it is (mapped files stay
    mapped)."""
    if len(streams) == 1:
        return streams[0]
    offsets = np.cumsum([0, *(len(stream.tokens) for stream in streams)])
    ends = [np.asarray(s.ends, dtype=np.uint64) + np.uint64(at) for s, at in zip(streams, offsets, strict=False)]
    trained = None
    if any(stream.trained is not None for stream in streams):
        trained = np.concatenate(
            [np.ones(len(s.tokens), dtype=bool) if s.trained is None else s.trained for s in streams]
        )
    kind = np.uint32 if any(stream.tokens.dtype.itemsize > 2 for stream in streams) else np.uint16
    return TokenStream(
        np.concatenate([stream.tokens.astype(kind, copy=False) for stream in streams]), np.concatenate(ends), trained
    )


def check_ids(highest: int, vocab_size: int, where: object) -> None:
    """Check that a model with ``vocab_size`` tokens knows the token ``highest``. Raises ValueError."""
    if highest >= vocab_size:
        raise ValueError(
            f"{where}: the tokenizer gives the token {highest}, and the model knows {vocab_size}: use the model's own "
            "tokenizer"
        )


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smaller of uint16 and uint32 that holds every token id."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def write_meta(
    directory: Path, tokens: int, documents: int, vocab_size: int, tokenizer: str, *, chats: bool = False
) -> None:
    """Declare a token file finished. ``tokenizer`` is ``Tokenizer.fingerprint`` or any name that tells them apart."""
    meta = {
        "version": VERSION,
        "dtype": token_dtype(vocab_size).str,
        "tokens": tokens,
        "documents": documents,
        "vocab_size": vocab_size,
        "tokenizer": tokenizer,
        "chats": chats,
    }
    part = directory / "meta.json.part"
    part.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    part.replace(directory / "meta.json")


def open_tokens(directory: str | Path, vocab_size: int, tokenizer: str | None = None) -> TokenStream:
    """Map a token file.

    Args:
        vocab_size: of the model that is to read it.
        tokenizer: fingerprint given to ``write_meta``, to refuse a file of another tokenizer; None for no check.

    Raises:
        ValueError: missing, unfinished or damaged, made by another tokenizer, or with ids beyond the model's.
    """
    directory = Path(directory)
    try:
        meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        count, documents = int(meta["tokens"]), int(meta["documents"])
        dtype, version, vocabulary, made_by = (
            np.dtype(meta["dtype"]),
            meta["version"],
            int(meta["vocab_size"]),
            meta["tokenizer"],
        )
    except FileNotFoundError:
        raise ValueError(
            f"{directory} is not a finished token file: run transect data tokenize again, which resumes "
            "where it stopped"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{directory}/meta.json is damaged ({error}): tokenize the data again") from None
    if version != VERSION:
        raise ValueError(
            f"{directory} is a token file of version {version}, this reads {VERSION}: tokenize the data again"
        )
    if tokenizer is not None and made_by != tokenizer:
        raise ValueError(f"{directory} was made by another tokenizer than this model's: tokenize the data again")
    if vocabulary > vocab_size:
        raise ValueError(
            f"{directory} has token ids up to {vocabulary}, the model only {vocab_size}: tokenize it again"
        )
    sizes = {"tokens.bin": count * dtype.itemsize, "ends.bin": documents * 8}
    if meta.get("chats"):
        sizes["trained.bin"] = count
    for name, size in sizes.items():
        found = (directory / name).stat().st_size if (directory / name).exists() else -1
        if found != size:
            raise ValueError(f"{directory}/{name} has {found} bytes and should have {size}: tokenize the data again")
    if not count or not documents:
        raise ValueError(f"{directory} holds no tokens: give it some text")
    tokens = np.memmap(directory / "tokens.bin", dtype=dtype, mode="r")
    ends = np.memmap(directory / "ends.bin", dtype="<u8", mode="r")
    if int(ends[-1]) != count:
        raise ValueError(f"{directory}/ends.bin does not fit tokens.bin: tokenize the data again")
    trained = np.memmap(directory / "trained.bin", dtype=np.bool_, mode="r") if meta.get("chats") else None
    return TokenStream(tokens, ends, trained)


def collect(
    documents: Iterable[tuple[list[int], list[bool] | None]], vocab_size: int, path: Path, *, allow_empty: bool = False
) -> TokenStream:
    """Collect documents (``documents.Document``) in one stream in memory.

    Raises:
        ValueError: there are none, unless ``allow_empty``, or chats and text are mixed.
    """
    tokens: list[np.ndarray] = []
    trained: list[np.ndarray] = []
    ends: list[int] = []
    total = 0
    for ids, said in documents:
        if not ids:
            continue
        check_ids(max(ids), vocab_size, path)
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
