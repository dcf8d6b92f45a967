"""Transect's server beside llama.cpp's, as far as no server is needed."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.peers import peer
from benchmarks.server import load_cpu

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PIECES = ["<s>", " the", "ing", " apple", " Paris", " 42", " of", " pear", "\u00e9"]


@pytest.fixture
def module():
    return load_cpu


def test_prompts_are_words_of_one_token_each(module):
    tokenizer = SimpleNamespace(vocab_size=len(PIECES), decode=lambda ids: PIECES[ids[0]])
    words = module.words_of(tokenizer)
    assert words == [" the", " apple", " pear"]
    first, again = (module.level(2.0, 20, 3, words) for _ in range(2))
    assert first == again and first.value == 2.0
    lengths = [len(each.prompt.split()) for each in first.work]
    assert min(lengths) >= 80 and max(lengths) <= 320 and len(set(lengths)) > 10
    assert {word for each in first.work for word in each.prompt.split()} == {"the", "apple", "pear"}


def test_both_servers_get_the_same_file_threads_and_context(module, monkeypatch):
    monkeypatch.setattr(module, "resolve", lambda model: SimpleNamespace(path=Path("/models/a.gguf")))
    found = module.commands("a", 3, "/other/python", 81)
    ours, theirs = (" ".join(found[name]) for name in ("Transect", "llama.cpp"))
    assert theirs.startswith("/other/python -m llama_cpp.server --model /models/a.gguf --port 81")
    assert "--n_threads 3 --n_threads_batch 3" in theirs and f"--n_ctx {peer.CONTEXT}" in theirs
    assert "serve a --port 81 --threads 3" in ours and f"--max-model-len {peer.CONTEXT}" in ours


def test_a_server_that_ends_at_once_is_an_error_with_its_last_words(module):
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with (
        pytest.raises(RuntimeError, match="no such model"),
        module.running(command, "http://127.0.0.1:9"),
    ):
        pass


def test_the_page_has_both_servers_at_each_rate(module):
    def level(rate, server, ms):
        times = {"p50": ms / 1e3, "p99": 2 * ms / 1e3}
        result = {"output_tokens_per_second": 10.0, **dict.fromkeys(("ttft", "tpot", "itl", "e2e"), times)}
        return {"rate": rate, "seed": 0, "server": server, "result": result}

    levels = [level("1", "llama.cpp", 800), level("1", "Transect", 300), level("0.5", "Transect", 200)]
    machine = {"processor": "a processor", "commit": "0123456789ab", "version": "99.0.0"}
    page = module.page(
        {"levels": levels, "environment": machine, "command": "c", "model": "m", "threads": 2, "requests": 3}
        | {"seeds": [0], "peer": "0.3.36"}
    )
    lines = page.splitlines()
    assert lines[2].startswith("| 0.5 | Transect | 10.0 | 200 | 400 | 200.0 |")
    assert [line.split("|")[2].strip() for line in lines[3:5]] == ["Transect", "llama.cpp"]
    assert "one seed, llama-cpp-python 0.3.36" in page
