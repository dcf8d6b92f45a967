"""Perplexity through the engine: the same as a plain computation with transformers."""

import math

import pytest
import torch
from tiny_llm import CONTEXT, save_tiny_llm

from transect import LLM
from transect.train.evaluation.perplexity import score_file, windows

TEXT = "".join(f"{i} ships and {i * i % 97} sails went by. Ærø, naïve — {i}?\n" for i in range(9))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    model = save_tiny_llm(folder)
    llm = LLM(str(folder), dtype="float32", native=False, max_num_seqs=4, max_num_batched_tokens=96)
    return model, llm


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@torch.no_grad()
def by_transformers(model, tokens, window, stride):
    """Sliding windows in a loop: all tokens before the window's new ones are context."""
    nats, done, begin = 0.0, 1, 0
    while done < len(tokens):
        end = min(begin + window, len(tokens))
        if begin and end == len(tokens):
            begin = end - window
        logs = model(torch.tensor([tokens[begin:end]])).logits[0].float().log_softmax(-1)
        for at in range(done, end):
            nats -= float(logs[at - begin - 1, tokens[at]])
        done, begin = end, begin + stride
    return nats


@pytest.mark.parametrize(("window", "stride"), [(64, 32), (64, 63), (50, 1), (CONTEXT - 1, 100)])
def test_the_score_is_that_of_transformers(tiny, text_file, window, stride):
    model, llm = tiny
    if stride == 1:
        text_file.write_text(TEXT[:70], encoding="utf-8")
    text = text_file.read_text(encoding="utf-8")
    tokens = llm.tokenizer.encode(text, add_special_tokens=True)
    score = score_file(llm, text_file, window=window, stride=stride)
    expected = by_transformers(model, tokens, window, stride)
    assert score.predicted == len(tokens) - 1
    assert score.nats / score.predicted == pytest.approx(expected / score.predicted, abs=1e-4)
    begun_by_bos = tokens[0] == llm.tokenizer.bos_token_id
    assert score.size == len(text.encode()) - (0 if begun_by_bos else 1)  # one byte a token here
    assert score.perplexity == pytest.approx(math.exp(expected / score.predicted), rel=1e-4)
    assert score.bits_per_byte == pytest.approx(expected / math.log(2) / score.size, rel=1e-4)


def test_windows_predict_every_token_once():
    for count in (2, 3, 10, 11, 64, 65, 200):
        for window, stride in ((2, 1), (10, 3), (10, 9), (64, 32)):
            spans = windows(count, window, stride)
            predicted = [at for first, last, start in spans for at in range(start, last)]
            assert predicted == list(range(1, count))
            assert all(last - first <= window and first < start for first, last, start in spans)
            assert all(start - first >= window - stride for first, _, start in spans[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [({"window": 1}, "from 2 to"), ({"window": CONTEXT}, "from 2 to"), ({"window": 20, "stride": 20}, "from 1 to 19")],
)
def test_sizes_out_of_range(tiny, text_file, change, message):
    with pytest.raises(ValueError, match=message):
        score_file(tiny[1], text_file, **change)


def test_files_that_are_no_text(tiny, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "binary").write_bytes(b"ab\xff\xfe")
    with pytest.raises(ValueError, match="empty"):
        score_file(tiny[1], tmp_path / "empty")
    with pytest.raises(ValueError, match="byte 2"):
        score_file(tiny[1], tmp_path / "binary")
    with pytest.raises(ValueError, match="cannot read"):
        score_file(tiny[1], tmp_path / "missing")
