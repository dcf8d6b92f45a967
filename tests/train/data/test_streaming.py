"""Data that is streamed: every document once an epoch, and the same batches from any position."""

import itertools
import json
from collections import Counter
from copy import copy
from dataclasses import asdict

import pytest
import torch
from training_runs import tiny_run, write_chats

from transect.text.chat_template import ChatTemplate
from transect.text.tokenizer import Tokenizer
from transect.train.config import DataConfig, TrainConfig
from transect.train.data.loader import Position, load_stream
from transect.train.data.streaming import StreamingLoader
from transect.train.loop import checkpoint
from transect.train.loop.trainer import Trainer
from transect.train.objectives.base import StepFailed

SMALL = 4000 / 2**20
"""MiB of a section: a few to each of the files below."""


def loader_of(tiny, files, said=None, **settings):
    sizes = {"seq_len": 64, "micro_batch": 128, "streaming": True, "buffer_mib": SMALL}
    config = DataConfig(train=tuple(map(str, files)), **{**sizes, **settings})
    return StreamingLoader(config, 3, 300, tiny[1], tiny[2], tell=(said if said is not None else []).append)


def write_rows(path, count, word="row"):
    path.write_text("".join(json.dumps({"text": f"{word} {i}. " * (1 + i % 5)}) + "\n" for i in range(count)))
    return path


def epoch_of(loader, epoch):
    """The batches of an epoch, from where the loader stands."""
    found = []
    while True:
        batch = next(loader)
        if loader.position.epoch > epoch:
            return found
        found.append(batch)


def answers(batches):
    """The documents of batches, as tuples of tokens."""
    found = Counter()
    for batch in batches:
        bounds = batch.cu_seqlens.tolist()
        found.update(tuple(batch.tokens_T[a:b].tolist()) for a, b in itertools.pairwise(bounds))
    return found


def test_every_chat_comes_once_in_every_epoch_in_another_order(tiny, tmp_path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 60)
    said = []
    loader = loader_of(tiny, [chats], said, seq_len=256, micro_batch=512)
    first = epoch_of(loader, 0)
    loader.position = Position(1)
    second = epoch_of(loader, 1)
    assert answers(first) == answers(second) and sum(answers(first).values()) == 60
    assert any(not torch.equal(a.tokens_T, b.tokens_T) for a, b in zip(first, second, strict=False))
    assert "sections" in said[0] and "messages" in said[1]
    assert len(loader._sections(0)) > 2


def test_a_text_s_tokens_come_all_but_the_last_of_each_section(tiny, tmp_path) -> None:
    files = [write_rows(tmp_path / f"{name}.jsonl", 150, name) for name in ("a", "b")]
    batches = epoch_of(loader_of(tiny, files), 0)
    read = sum(batch.num_tokens for batch in batches)
    tokens = sum(len(tiny[1].encode(json.loads(line)["text"])) + 1 for file in files for line in file.open())
    assert all(batch.num_tokens == 128 for batch in batches) and 0.8 * tokens < read <= tokens


@pytest.mark.parametrize("kind", ["text", "chats"])
def test_it_goes_on_from_any_position(tiny, tmp_path, kind: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", 200) if kind == "text" else write_chats(tmp_path / "c.jsonl", 60)
    sizes = {} if kind == "text" else {"seq_len": 256, "micro_batch": 512}
    loader = loader_of(tiny, [path], **sizes)
    seen = []
    for _ in range(3 * len(epoch_of(loader_of(tiny, [path], **sizes), 0))):
        at = copy(loader.position)
        seen.append((at, next(loader)))
    assert seen[-1][0].epoch >= 2 and any(at.section > 1 for at, _ in seen)
    for at, batch in seen[::7]:
        other = loader_of(tiny, [path], **sizes)
        other.position = Position(**asdict(at))
        assert torch.equal(next(other).tokens_T, batch.tokens_T)


def test_row_groups_of_parquet_are_read_apart(tiny, tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = pyarrow.table({"text": [f"record {i}. " * 4 for i in range(300)]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=20)
    loader = loader_of(tiny, [tmp_path / "a.parquet"])
    assert len(loader._chunks) > 3 and {chunk.kind for chunk in loader._chunks} == {"parquet"}
    ranges = sorted((chunk.start, chunk.end) for chunk in loader._chunks)
    assert ranges[0][0] == 0 and ranges[-1][1] == 15 and all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    text = "".join(tiny[1].decode(batch.tokens_T.tolist()) for batch in epoch_of(loader, 0))
    assert sum(f"record {i}." in text for i in range(300)) > 280
    bad = tmp_path / "b.parquet"
    bad.write_text("no parquet")
    with pytest.raises(ValueError, match="not a parquet file"):
        loader_of(tiny, [bad])


def test_what_cannot_be_streamed_is_refused(tiny, tmp_path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", 200)
    with pytest.raises(ValueError, match="set steps, not epochs"):
        loader_of(tiny, [rows]).size(0)
    with pytest.raises(ValueError, match=r"leave out data\.streaming"):
        loader_of(tiny, [rows], weights=(1.0,))
    tokens = tmp_path / "a.tokens"
    tokens.mkdir()
    with pytest.raises(ValueError, match="tokenized already"):
        loader_of(tiny, [tokens])
    with pytest.raises(ValueError, match=r"lower data\.micro_batch"):
        next(loader_of(tiny, [write_rows(tmp_path / "few.jsonl", 2)]))
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(ValueError, match="no text"):
        loader_of(tiny, [tmp_path / "none.jsonl"])
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match="line 1"):
        loader_of(tiny, [tmp_path / "bad.jsonl"])


def test_files_that_changed_make_another_identity(tiny, tmp_path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", 200)
    before = loader_of(tiny, [rows]).identity()
    assert loader_of(tiny, [rows]).identity() == before
    assert loader_of(tiny, [rows], turns="apart").identity()["masks"] != before["masks"]
    assert loader_of(tiny, [rows], buffer_mib=1).identity()["sizes"] != before["sizes"]
    write_rows(rows, 200, "Row")
    assert loader_of(tiny, [rows]).identity()["data"] != before["data"]


def test_a_run_that_is_resumed_in_a_section_is_the_same_to_the_bit(tmp_path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", 200)
    data = {"train": [str(rows)], "seq_len": 64, "micro_batch": 128, "streaming": True, "buffer_mib": SMALL}
    through = Trainer(tiny_run(tmp_path, data=data, steps=40))
    expected = [through.step().loss for _ in range(40)]
    first = Trainer(tiny_run(tmp_path, data=data, steps=40))
    assert [first.step().loss for _ in range(25)] == expected[:25]
    with checkpoint.Writer(tmp_path / "run", keep=2) as writer:
        writer.save(first.snapshot())
    found = checkpoint.newest(tmp_path / "run")
    assert found.state["position"]["section"] > 0
    second = Trainer(TrainConfig.from_dict(found.state["config"]), found)
    assert [second.step().loss for _ in range(15)] == expected[25:]


def test_a_bad_row_in_a_late_section_loses_no_step(tmp_path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", 200)
    data = {"train": [str(rows)], "seq_len": 64, "micro_batch": 128, "streaming": True, "buffer_mib": SMALL}
    order = StreamingLoader(DataConfig(**{**data, "train": (str(rows),)}), 0, 300, *_reading(tmp_path))._sections(0)
    late = order[1][0]  # a chunk of the second section of the epoch
    text = rows.read_bytes()
    broken = text[: late.start] + b"{" + b"x" * (text.index(b"\n", late.start) - late.start - 1)
    rows.write_bytes(broken + text[len(broken) :])
    config = tiny_run(tmp_path, data=data, steps=40, save_every=0, accumulate=2)
    with pytest.raises(StepFailed, match=r"step \d+: .*a\.jsonl, line \d+: the line is not JSON.*step-\d+ is whole"):
        Trainer(config).run()
    found = checkpoint.newest(tmp_path / "run")
    assert 0 < found.step < 40
    skips = config.changed(["data.on_bad_row=skip"])
    through, goes_on = Trainer(skips), Trainer(skips, found)
    expected = [through.step().loss for _ in range(found.step + 4)]
    assert [goes_on.step().loss for _ in range(4)] == expected[-4:]


def test_a_stretch_of_bad_rows_is_left_out_however_long(tiny, tmp_path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", 100)
    good = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join([*good[:50], *['{"nothing": "that can be trained on"}\n'] * 500, *good[50:]]))
    loader = loader_of(tiny, [rows], on_bad_row="skip")
    tokens = sum(batch.num_tokens for batch in epoch_of(loader, 0))
    stream = load_stream([str(rows)], 300, tiny[1], skip=True)
    assert tokens > 0.8 * len(stream.tokens)


@pytest.mark.parametrize("too_long", ["drop", "cut"])
def test_a_section_without_a_chat_that_fits_is_left_out(tiny, tmp_path, too_long) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 60)
    long = [{"role": "user", "content": "?" * 300}, {"role": "assistant", "content": "!"}]
    lines = (tmp_path / "chats.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "chats.jsonl").write_text("".join([*lines, *[json.dumps({"messages": long}) + "\n"] * 60]))
    loader = loader_of(tiny, [chats], seq_len=256, micro_batch=512, too_long=too_long)
    assert sum(answers(epoch_of(loader, 0)).values()) == 60


def test_a_file_that_is_gone_loses_no_step(tmp_path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", 200)
    data = {"train": [str(rows)], "seq_len": 64, "micro_batch": 128, "streaming": True, "buffer_mib": SMALL}
    trainer = Trainer(tiny_run(tmp_path, data=data, steps=60, save_every=0))
    rows.unlink()
    with pytest.raises(StepFailed, match=r"step \d+: .*No such file.*a\.jsonl.*step-\d+ is whole"):
        trainer.run()
    assert checkpoint.newest(tmp_path / "run").step == trainer.steps_done > 0


def _reading(tmp_path):
    """The tokenizer and template of the model of ``tiny_run``."""
    from transect.checkpoints.resolve import resolve

    source = resolve(tiny_run(tmp_path).model)
    return Tokenizer.from_source(source), ChatTemplate.from_source(source)
