"""``transect data tokenize``: turns text and chats into a token file, on all cores, and resumes where it stopped.

The input is cut into chunks (``chunks.py``). Workers tokenize a chunk each and put the result into
``NAME.tokens/parts/``; a part is renamed into place when it is whole. What one worker can do is done in this process.
When all parts are there they are joined in order. A run that was interrupted finds the parts that it had finished;
``parts/plan`` tells whether they are of the same input, cut the same way, by the same tokenizer.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from ...checkpoints.resolve import described
from ...text.chat_template import ChatTemplate
from ...text.tokenizer import Tokenizer
from ..config import DataConfig
from .chat import run_template
from .chunks import CHUNK_BYTES, Chunk, cut
from .documents import Reader, RowCounts, turns_key
from .files import find
from .tokens import SUFFIX, collect, token_dtype, write_meta

log = logging.getLogger(__name__)


def tokenize(
    inputs: Sequence[str | Path],
    output: str | Path,
    model: str,
    *,
    workers: int | None = None,
    chats: DataConfig | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
    tell: Callable[[str], None] = log.info,
) -> tuple[int, int]:
    """Write ``output`` (a ``.tokens`` directory) from the documents of ``inputs``.

    Args:
        model: whose tokenizer and chat template to use; what ``resolve`` takes.
        workers: processes; one for each core if None.
        chats: settings for reading and rendering rows: ``columns``, ``chat_template``, ``turns`` and ``date``.
        progress: called with the bytes done and the bytes in all.
        tell: receives one line about keys that are not read.

    Returns:
        Tokens and documents.

    Raises:
        ValueError: an input that cannot be read, chats mixed with text, a model without a tokenizer, or an output that
            cannot be written.
    """
    output = Path(output)
    if output.suffix != SUFFIX:
        raise ValueError(f"the output must end in {SUFFIX}, such as {output.with_suffix(SUFFIX)}")
    source = described(model, presets=False)
    tokenizer = Tokenizer.from_source(source)
    if not isinstance(tokenizer, Tokenizer):
        raise ValueError(f"{model} brings no tokenizer: give a model that does")
    vocab_size = source.config.vocab_size
    chunks = [chunk for file in find([str(p) for p in inputs], "the input") for chunk in cut(file, chunk_bytes)]
    if not chunks:
        raise ValueError("there is no text in the input: name files that hold some")
    parts = output / "parts"
    chats = chats or DataConfig()
    template = run_template(source, tokenizer, chats)
    made_by = [tokenizer.fingerprint, "" if template is None else template.sources]
    try:
        chats = _prepare(output, parts, chunks, made_by, chats)
        missing = [i for i in range(len(chunks)) if not (parts / f"{i:06}.npz").exists()]
        total = sum(chunk.size for chunk in chunks)
        done = total - sum(chunks[i].size for i in missing)
        progress(done, total)
        count = min(workers or len(os.sched_getaffinity(0)), len(missing))
        work = [(model, chats, chunks[i], str(parts / f"{i:06}.npz")) for i in missing]
        with closing(_by_workers(work, count) if count > 1 else _here(work)) as finished:
            for chunk in finished:
                done += chunk.size
                progress(done, total)
        return _join(output, parts, len(chunks), vocab_size, tokenizer.fingerprint, tell)
    except OSError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(output):
            raise
        raise ValueError(
            f"cannot write to {output} ({error.strerror}): free some space and run this again (it resumes where "
            "it stopped), or name another output"
        ) from None


def _prepare(output: Path, parts: Path, chunks: list[Chunk], made_by: list[str], chats: DataConfig) -> DataConfig:
    """Keep the existing parts if they belong to the same plan, else start again.

    Args:
        made_by: the tokenizer's fingerprint, and the chat template.

    Returns:
        ``chats`` with the date of the first part.
    """
    stamps = {chunk.path: os.stat(chunk.path) for chunk in chunks}
    files = {path: [stamp.st_size, stamp.st_mtime_ns] for path, stamp in stamps.items()}
    plan = {"made by": made_by, "files": files, "chunks": [asdict(chunk) for chunk in chunks]}
    plan["chats"] = [turns_key(chats.turns), chats.date] + ([chats.columns] if chats.columns else [])
    key = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
    saved, begun = parts / "plan", parts / "date"
    if not (saved.exists() and saved.read_text() == key):
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True)
        begun.write_text(chats.date or datetime.date.today().isoformat())
        saved.write_text(key)
    return replace(chats, date=begun.read_text())


_Work = tuple[str, DataConfig, Chunk, str]
"""(model, rendering settings of chats, chunk, output file)."""


def _here(work: Iterable[_Work]) -> Generator[Chunk]:
    """Tokenize chunks in this process; yield each when it is done."""
    _reader.cache_clear()  # the model's files may have changed
    for each in work:
        _tokenize_chunk(*each)
        yield each[2]


def _by_workers(work: Iterable[_Work], count: int) -> Generator[Chunk]:
    """Tokenize chunks in ``count`` processes; yield each when it is done."""
    with ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_single) as pool:
        futures = {pool.submit(_tokenize_chunk, *each): each[2] for each in work}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _single() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core already


@cache
def _reader(model: str, chats: DataConfig) -> tuple[Tokenizer, ChatTemplate | None, int]:
    """Load the tokenizer and template of this process, once."""
    source = described(model, presets=False)
    tokenizer = Tokenizer.from_source(source)
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer, run_template(source, tokenizer, chats), source.config.vocab_size


def _tokenize_chunk(model: str, chats: DataConfig, chunk: Chunk, target: str) -> None:
    tokenizer, template, vocab_size = _reader(model, chats)
    reader = Reader(tokenizer, template, turns=chats.turns, columns=chats.columns)
    stream = collect(chunk.documents(reader), vocab_size, Path(chunk.path), allow_empty=True)
    part = Path(f"{target}.{os.getpid()}.part")
    arrays = {"tokens": stream.tokens, "ends": stream.ends}
    if stream.trained is not None:
        arrays["trained"] = stream.trained
    ignored: Counter[str] = sum((tally.ignored for tally in reader.tallies), Counter())
    arrays["ignored"] = np.array(json.dumps(ignored))
    with part.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    part.replace(target)


def _join(
    output: Path, parts: Path, count: int, vocab_size: int, tokenizer: str, tell: Callable[[str], None]
) -> tuple[int, int]:
    tokens = documents = 0
    kinds = set()
    found = RowCounts(str(output))
    for index in range(count):
        with np.load(parts / f"{index:06}.npz", allow_pickle=False) as part:
            if len(part["ends"]):
                kinds.add("trained" in part)
            found.ignored.update(json.loads(str(part["ignored"])) if "ignored" in part else {})
    if len(kinds) == 2:
        raise ValueError("chats and text cannot share a token file: tokenize them apart")
    if not kinds:
        raise ValueError("there is no text in the input: name files that hold some")
    # Earlier output ends here; processes that have mapped it keep it.
    for name in ("meta.json", "tokens.bin", "ends.bin", "trained.bin"):
        (output / name).unlink(missing_ok=True)
    with (
        (output / "tokens.bin").open("wb") as tokens_file,
        (output / "ends.bin").open("wb") as ends_file,
        (output / "trained.bin").open("wb") as trained_file,
    ):
        for index in range(count):
            with np.load(parts / f"{index:06}.npz", allow_pickle=False) as part:
                ends = part["ends"]
                if not len(ends):
                    continue
                tokens_file.write(part["tokens"].astype(token_dtype(vocab_size)).tobytes())
                ends_file.write((ends + np.uint64(tokens)).astype("<u8").tobytes())
                if "trained" in part:
                    trained_file.write(part["trained"].tobytes())
                tokens += int(ends[-1])
                documents += len(ends)
    chats = kinds == {True}
    if not chats:
        (output / "trained.bin").unlink()
    write_meta(output, tokens, documents, vocab_size, tokenizer, chats=chats)
    shutil.rmtree(parts)
    if found.ignored:
        tell(found.unread())
    return tokens, documents
