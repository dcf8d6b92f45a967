"""Data: token files, chats, and packing under which no document sees another and every token has its turn."""

import itertools
import json
import subprocess
import sys
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from effort import quick_first
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import write_chats, write_text

from transect.train.config import DataConfig
from transect.train.data import tokenize as tokenizing
from transect.train.data.batches import IGNORE, DocumentPlan, WindowPlan
from transect.train.data.documents import chat_tokens
from transect.train.data.identity import stream_identity
from transect.train.data.loader import Loader, Position, load_stream
from transect.train.data.tokens import TokenStream, join, open_tokens

LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=40)


def stream_of(lengths, *, chats=False):
    """Tokens that tell where they are from: document number times 100 plus position."""
    tokens = np.concatenate([d * 100 + np.arange(n) for d, n in enumerate(lengths)]).astype(np.uint32)
    trained = tokens % 3 != 0 if chats else None
    return TokenStream(tokens, np.cumsum(lengths).astype(np.uint64), trained)


def check_batch(batch, trained):
    bounds = batch.cu_seqlens.tolist()
    assert bounds[0] == 0 and bounds[-1] == batch.num_tokens
    for first, last in itertools.pairwise(bounds):
        part = batch.tokens_T[first:last]
        assert len(set((part // 100).tolist())) == 1  # one document
        assert (part - part[0] == torch.arange(last - first)).all()  # in order, whole
        assert (batch.positions_T[first:last] == torch.arange(last - first)).all()
        labels = batch.labels_T[first:last]
        for token, label in zip(part.tolist(), labels.tolist(), strict=True):
            if label != IGNORE:
                assert label == token + 1  # the next token of the same document
                assert not trained or label % 3 != 0
    assert batch.num_labels == int((batch.labels_T != IGNORE).sum())


@given(LENGTHS, st.integers(0, 3), st.integers(0, 5))
@settings(max_examples=60)
def test_windows_cover_the_stream_once(lengths, epoch, seed) -> None:
    stream = stream_of(lengths)
    if sum(lengths) < 32:
        with pytest.raises(ValueError, match=r"lower data\.micro_batch"):
            WindowPlan(stream, 16, 32, seed, epoch)
        return
    plan = WindowPlan(stream, 16, 32, seed, epoch)
    seen = []
    for index in range(len(plan)):
        batch = plan.batch(index)
        assert batch.num_tokens == 32
        check_batch(batch, trained=False)
        seen += batch.tokens_T.tolist()
    assert len(seen) == len(set(seen))
    assert len(seen) > sum(lengths) - plan.offset - 16 - 32
    # a label is missing only after a document's last token
    labels = sum(plan.batch(index).num_labels for index in range(len(plan)))
    ends = {int(stream.tokens[int(end) - 1]) for end in stream.ends}
    assert labels == len([token for token in seen if token not in ends])


@given(LENGTHS, st.integers(0, 3), st.integers(0, 5))
@settings(max_examples=60)
def test_packed_documents_are_whole_and_each_comes_once(lengths, epoch, seed) -> None:
    stream = stream_of(lengths, chats=True)
    usable = [d for d, n in enumerate(lengths) if 1 < n <= 64]
    if not usable:
        with pytest.raises(ValueError, match=r"data\.seq_len"):
            DocumentPlan(stream, 64, 128, seed, epoch)
        return
    plan = DocumentPlan(stream, 64, 128, seed, epoch)
    seen = []
    for index in range(len(plan)):
        batch = plan.batch(index)
        assert batch.num_tokens <= 128
        check_batch(batch, trained=True)
        seen += [int(batch.tokens_T[first]) // 100 for first in batch.cu_seqlens[:-1]]
    assert sorted(seen) == usable
    assert plan.left_out == len(lengths) - len(usable)


def test_packing_fills_micro_batches() -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 2000)
    plan = DocumentPlan(stream_of(lengths, chats=True), 64, 256, 0, 0)
    filled = sum(plan.batch(i).num_tokens for i in range(len(plan))) / (256 * len(plan))
    assert filled > 0.98


@pytest.mark.parametrize("lengths", [[37] * 30, [5, 300, 1, 2, 90], [128]])
def test_validation_sees_every_token_once_and_in_order(lengths) -> None:
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    stream = TokenStream(tokens, np.cumsum(lengths).astype(np.uint64))
    loader = Loader(stream, DataConfig(seq_len=32, micro_batch=64), seed=3)
    next(loader)
    before = copy(loader.position)
    batches = list(loader.one_epoch())
    assert torch.equal(torch.cat([batch.tokens_T for batch in batches]), torch.arange(sum(lengths)))
    labels = torch.cat([batch.labels_T for batch in batches])
    last = np.cumsum(lengths) - 1  # of each document: nothing follows it
    expected = torch.arange(1, sum(lengths) + 1)
    expected[torch.from_numpy(last)] = IGNORE
    assert torch.equal(labels, expected)
    assert loader.position == before


def test_a_validation_text_may_be_shorter_than_a_micro_batch() -> None:
    config = DataConfig(seq_len=32, micro_batch=64)
    (batch,) = Loader(stream_of([9, 8]), config, seed=3, held_out=True).one_epoch()
    assert batch.lengths == [9, 8] and batch.num_labels == 15
    with pytest.raises(ValueError, match="the data has 1 tokens"):
        Loader(stream_of([1]), config, seed=3, held_out=True)


def test_batches_made_ahead_are_the_same_from_any_position() -> None:
    stream, config = stream_of([37] * 30), DataConfig(seq_len=32, micro_batch=64)
    plain, ahead = Loader(stream, config, seed=3), Loader(stream, config, seed=3, ahead=True)
    for _ in range(40):  # into later epochs
        assert torch.equal(next(ahead).tokens_T, next(plain).tokens_T)
        assert ahead.position == plain.position
    plain.position, ahead.position = Position(1, 4), Position(1, 4)
    assert torch.equal(next(ahead).tokens_T, next(plain).tokens_T)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_loader_goes_on_from_any_position(ahead: bool) -> None:
    loader = Loader(stream_of([37] * 30), DataConfig(seq_len=32, micro_batch=64), seed=3, ahead=ahead)
    first = [next(loader) for _ in range(5)]
    at = Position(loader.position.epoch, loader.position.index)
    rest = [next(loader).tokens_T for _ in range(40)]  # into later epochs
    again = Loader(loader.stream, loader.config, seed=3)
    again.position = at
    assert all(torch.equal(a, next(again).tokens_T) for a in rest)
    assert again.position.epoch >= 2
    other = Loader(loader.stream, loader.config, seed=4)
    assert other.identity() != loader.identity()
    assert not torch.equal(next(other).tokens_T, first[0].tokens_T)


def test_chat_tokens_are_what_a_server_would_send_and_what_is_said(tiny) -> None:
    _, tokenizer, template = tiny
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Ciao"},
    ]
    ids, trained = chat_tokens(messages, tokenizer, template)
    said = tokenizer.decode([t for t, s in zip(ids, trained, strict=True) if s], skip_special_tokens=False)
    assert said == "Hello<|im_end|>Ciao<|im_end|>"
    assert ids == tokenizer.encode(template.render(messages, add_generation_prompt=False), parse_special=True)
    prompt = tokenizer.encode(template.render(messages[:1]), parse_special=True)
    assert ids[: len(prompt)] == prompt


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: the line is not JSON"),
        ("[1]", "line 2: a line must be a JSON object"),
        ('{"a": 1}', "line 2: no layout is known with the keys a:"),
        ('{"messages": []}', 'line 2: "messages" must be a list'),
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 2: the chat has no message of the assistant"),
    ],
)
def test_a_bad_line_is_named(tiny, tmp_path, line: str, message: str) -> None:
    path = tmp_path / "chats.jsonl"
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path.write_text(json.dumps(good) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        load_stream([str(path)], 300, tiny[1], tiny[2])


def test_tokenized_by_workers_it_is_the_same_as_in_memory(tiny, tmp_path) -> None:
    folder, tokenizer, template = tiny
    lines = [{"text": f"document\u2028{i} " * (i % 9 + 1)} for i in range(300)]  # a line's end to some, not to JSONL
    text = tmp_path / "many.jsonl"
    text.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines) + "\n", encoding="utf-8")
    write_text(tmp_path / "one.txt")
    inputs = [str(text), str(tmp_path / "one.txt")]
    tokens, documents = tokenizing.tokenize(inputs, tmp_path / "a.tokens", str(folder), workers=2, chunk_bytes=2000)
    assert documents == 301
    mapped = open_tokens(tmp_path / "a.tokens", 300, tokenizer.fingerprint)
    direct = load_stream(inputs, 300, tokenizer, template)
    assert len(mapped.tokens) == tokens and np.array_equal(mapped.tokens, direct.tokens)
    assert np.array_equal(mapped.ends, direct.ends) and stream_identity(mapped) == stream_identity(direct)
    assert not (tmp_path / "a.tokens" / "parts").exists()


def test_processes_that_tokenize_need_no_torch():
    program = "import sys, transect.train.data.tokenize\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_chats_keep_their_mask_in_a_token_file(tiny, tmp_path) -> None:
    folder, tokenizer, template = tiny
    chats = write_chats(tmp_path / "chats.jsonl", 10)
    tokenizing.tokenize([chats], tmp_path / "c.tokens", str(folder), workers=1)
    mapped, direct = open_tokens(tmp_path / "c.tokens", 300), load_stream([chats], 300, tokenizer, template)
    assert mapped.trained is not None and np.array_equal(mapped.trained, direct.trained)


@pytest.mark.parametrize("workers", quick_first([1, 2], 1))
def test_an_interrupted_tokenization_goes_on(tiny, tmp_path, workers) -> None:
    folder, _, _ = tiny
    text = tmp_path / "many.jsonl"
    text.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(200)))
    output = tmp_path / "b.tokens"

    def interrupt(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenizing.tokenize([text], output, str(folder), workers=workers, chunk_bytes=500, progress=interrupt)
    with pytest.raises(ValueError, match="not a finished token file"):
        open_tokens(output, 300)
    finished = {path: path.stat().st_mtime_ns for path in (output / "parts").glob("*.npz")}
    assert finished
    begun = []
    _, documents = tokenizing.tokenize(
        [text], output, str(folder), workers=workers, chunk_bytes=500, progress=lambda done, total: begun.append(done)
    )
    assert documents == 200
    assert begun[0] > 0  # it did not start over
    text.write_text(json.dumps({"text": "other"}) + "\n")
    assert tokenizing.tokenize([text], output, str(folder), workers=1)[1] == 1


def test_a_template_that_was_corrected_begins_anew(tiny, tmp_path) -> None:
    folder, tokenizer, _ = tiny
    chats, template, output = write_chats(tmp_path / "chats.jsonl"), tmp_path / "chat.jinja", tmp_path / "c.tokens"
    config = DataConfig(chat_template=str(template))
    text = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    text += "{% if add_generation_prompt %}[assistant]{% endif %}"

    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    template.write_text(text)
    with pytest.raises(KeyboardInterrupt):
        tokenizing.tokenize([chats], output, str(folder), workers=1, chunk_bytes=500, chats=config, progress=stop)
    template.write_text(text.replace("[", "<").replace("]", ">"))
    tokenizing.tokenize([chats], output, str(folder), workers=1, chunk_bytes=500, chats=config)
    assert "[user]" not in tokenizer.decode(open_tokens(output, 300).tokens.tolist())


def test_an_output_that_cannot_be_written_is_named(tiny, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "a.tokens"
    with pytest.raises(ValueError, match=r"cannot write to .*a\.tokens \(Not a directory\)"):
        tokenizing.tokenize([write_text(tmp_path / "one.txt")], output, str(tiny[0]), workers=1)


def test_damaged_and_foreign_token_files_are_refused(tiny, tmp_path) -> None:
    folder, tokenizer, _ = tiny
    write_text(tmp_path / "one.txt")
    output = tmp_path / "d.tokens"
    tokenizing.tokenize([tmp_path / "one.txt"], output, str(folder), workers=1)
    with pytest.raises(ValueError, match="another tokenizer"):
        open_tokens(output, 300, "other")
    with pytest.raises(ValueError, match="token ids up to 300"):
        open_tokens(output, 200, tokenizer.fingerprint)
    meta = (output / "meta.json").read_text()
    (output / "meta.json").write_text(meta.replace('"vocab_size": 300', '"vocab_size": []'))
    with pytest.raises(ValueError, match=r"meta\.json is damaged"):
        open_tokens(output, 300)
    (output / "meta.json").write_text(meta)
    (output / "tokens.bin").write_bytes(b"12")
    with pytest.raises(ValueError, match=r"tokens\.bin has 2 bytes"):
        open_tokens(output, 300, tokenizer.fingerprint)


def test_joined_streams_keep_their_documents() -> None:
    joined = join([stream_of([3, 4]), stream_of([5])])
    assert joined.ends.tolist() == [3, 7, 12] and joined.bounds(2) == (7, 12)


def documents_of(loader, epoch):
    """Which document each packed one of an epoch is."""
    loader.position = Position(epoch, 0)
    batches = [next(loader) for _ in range(loader.size(epoch))]
    return [int(token) // 100 for batch in batches for token in batch.tokens_T[batch.cu_seqlens[:-1].long()]]


def two_sources(first, second, *, chats):
    stream = stream_of(first + second, chats=chats)
    return replace(stream, sources=(len(first), len(first) + len(second)))


@pytest.mark.parametrize("chats", [True, False])
@pytest.mark.parametrize(("weights", "times"), [((1, 1), (2.5, 0.625)), ((0.2, 0.8), (1, 1)), ((3, 1), (3.75, 0.3125))])
def test_weights_are_shares_of_the_tokens_of_an_epoch(weights, times, chats) -> None:
    stream = two_sources([32] * 20, [32] * 80, chats=chats)
    config = DataConfig(train=("a", "b"), weights=weights, seq_len=32, micro_batch=64)
    loader = Loader(stream, config, seed=1)
    seen = documents_of(loader, 0)
    counts = np.bincount(seen, minlength=100)
    assert abs(counts[:20].mean() - times[0]) < 0.11 and abs(counts[20:].mean() - times[1]) < 0.03
    assert set(counts[:20]) <= {int(times[0]), int(times[0]) + 1}
    if times[1] % 1:
        other = np.bincount(documents_of(loader, 1), minlength=100)
        assert (other[20:] > 0).tolist() != (counts[20:] > 0).tolist()  # another part in every epoch
    plain = Loader(stream, DataConfig(seq_len=32, micro_batch=64), seed=1)
    assert plain.identity()["sizes"] != loader.identity()["sizes"]


def test_chats_that_are_too_long_are_dropped_cut_or_an_error() -> None:
    stream = stream_of([20, 50, 90], chats=True)
    late = np.asarray(stream.trained).copy()
    late[70:110] = False  # the first 40 tokens of the last document
    stream = replace(stream, trained=late)
    told = []
    made = {}
    for policy in ("drop", "cut"):
        loader = Loader(stream, DataConfig(seq_len=40, micro_batch=80, too_long=policy), seed=0, tell=told.append)
        batch = next(loader)
        made[policy] = sorted(batch.lengths)
    assert made == {"drop": [20], "cut": [20, 40]}
    assert told == [
        "2 of 3 documents are longer than data.seq_len = 40 tokens and are left out",
        "1 of 3 documents are longer than data.seq_len = 40 tokens and are left out",
        "1 of 3 documents are longer than data.seq_len = 40 tokens and are cut to that length",
    ]
    with pytest.raises(
        ValueError, match=r"2 documents are longer than data.seq_len = 40 tokens \(the longest has 90\)"
    ):
        Loader(stream, DataConfig(seq_len=40, micro_batch=80, too_long="stop"), seed=0)


def test_weights_are_shares_of_what_is_short_enough() -> None:
    stream = replace(stream_of([90] * 20 + [30] * 20 + [30] * 100, chats=True), sources=(40, 140))
    config = DataConfig(train=("a", "b"), weights=(0.5, 0.5), seq_len=32, micro_batch=64)
    loader = Loader(stream, config, seed=0)
    tokens = torch.cat([next(loader).tokens_T for _ in range(loader.size(0))])
    assert float((tokens < 4000).float().mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("lengths", "chats"), [([200, 20], False), ([20, 90], True)])
def test_a_weight_of_data_that_cannot_come_is_refused(lengths, chats) -> None:
    stream = replace(stream_of(lengths, chats=chats), sources=(1, 2))
    config = DataConfig(train=("a", "b"), weights=(0.5, 0.5), seq_len=32, micro_batch=32)
    with pytest.raises(ValueError, match=r"data\.weights gives b a share.*data\.seq_len = 32"):
        Loader(stream, config, seed=0)


def test_weights_that_fit_no_files_are_refused() -> None:
    with pytest.raises(ValueError, match=r"for each of the 1 entries of data\.train"):
        DataConfig(train=("a",), weights=(1.0, 2.0))


def test_weights_that_leave_no_micro_batch_are_refused() -> None:
    stream = TokenStream(np.arange(192, dtype=np.uint16), np.array([64, 128, 192], dtype=np.uint64), None, (1, 2, 3))
    config = DataConfig(train=("a", "b", "c"), weights=(1.34, 1.33, 0.33), seq_len=64, micro_batch=192)
    with pytest.raises(ValueError, match=r"data\.weights leaves 2 pieces of 64 tokens in an epoch"):
        Loader(stream, config, 0)


def test_a_token_file_is_there_until_another_takes_its_place(tiny, tmp_path) -> None:
    folder, text = tmp_path / "a.tokens", write_text(tmp_path / "a.txt")
    tokenizing.tokenize([text], folder, str(tiny[0]), workers=1)
    (folder / "notes.txt").write_text("mine")
    before = open_tokens(folder, 300)
    tokens = before.tokens.copy()
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        tokenizing.tokenize([bad], folder, str(tiny[0]), workers=1)
    bad.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    with pytest.raises(ValueError, match="chats and text cannot share a token file"):
        tokenizing.tokenize([text, bad], folder, str(tiny[0]), workers=1)
    assert (open_tokens(folder, 300).tokens == tokens).all()
    bad.write_text('{"text": "short"}\n')
    count, _ = tokenizing.tokenize([bad], folder, str(tiny[0]), workers=1)
    assert len(open_tokens(folder, 300).tokens) == count < len(tokens)
    assert (before.tokens == tokens).all()  # a run that has the old one mapped goes on
    assert (folder / "notes.txt").read_text() == "mine"
