"""lm-evaluation-harness on the engine: local task files, results equal to a plain computation with transformers."""

import functools
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from effort import proving
from tiny_llm import EOS, greedy_tokens, save_tiny_llm

from transect import LLM

ROOT = Path(__file__).resolve().parents[3]
TASKS = Path(__file__).parent / "tasks"
installed = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install 'transect[eval]'"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    model = save_tiny_llm(folder, seed=3)
    return model, LLM(str(folder), dtype="float32", native=False, max_num_seqs=8, max_num_batched_tokens=128)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Data sets are read from the task's file and kept in a folder of the test's own."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(ROOT)


def records():
    return [json.loads(line) for line in (TASKS / "questions.jsonl").read_text().splitlines()]


@torch.no_grad()
def log_probability(model, context, continuation):
    logs = model(torch.tensor([context + continuation])).logits[0].float().log_softmax(-1)
    places = range(len(context) - 1, len(context) + len(continuation) - 1)
    return sum(float(logs[at, token]) for at, token in zip(places, continuation, strict=True))


@installed
def test_multiple_choice(tiny, offline):
    from transect.train.evaluation.harness import run_tasks

    model, llm = tiny
    found = run_tasks(llm, "tiny", ["transect_choose"], include=TASKS)["transect_choose"]
    right = right_by_length = 0
    for record in records():
        context = llm.tokenizer.encode(record["question"])
        values = [log_probability(model, context, llm.tokenizer.encode(" " + c)) for c in record["choices"]]
        scaled = [value / len(choice) for value, choice in zip(values, record["choices"], strict=True)]
        right += values.index(max(values)) == record["answer"]
        right_by_length += scaled.index(max(scaled)) == record["answer"]
    assert found["acc,none"] == pytest.approx(right / 5)
    assert found["acc_norm,none"] == pytest.approx(right_by_length / 5)


@installed
def test_rolling_log_likelihood(tiny, offline):
    from transect.train.evaluation.harness import run_tasks

    model, llm = tiny
    found = run_tasks(llm, "tiny", ["transect_predict"], include=TASKS)["transect_predict"]
    nats = size = 0
    for record in records():
        line = f"{record['question']} {record['choices'][record['answer']]}."
        text = f"{line} {line}"
        nats -= log_probability(model, [llm.tokenizer.bos_token_id], llm.tokenizer.encode(text))
        size += len(text.encode())
    assert found["bits_per_byte,none"] == pytest.approx(nats / math.log(2) / size, abs=1e-4)


@installed
def test_what_the_harness_asks_one_by_one(tiny):
    from lm_eval.api.instance import Instance

    from transect.train.evaluation.harness import HarnessModel

    model, llm = tiny
    adapter = HarnessModel(llm, "tiny")

    def ask(kind, *arguments):
        return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]

    encode = llm.tokenizer.encode
    pairs = [("", "abc"), ("Two and ", "two"), ("x" * 300, " end")]  # the last context is longer than the model's
    pairs.append(("Two ", "x" * 300))
    values = adapter.loglikelihood(ask("loglikelihood", *pairs))
    bos, most = [llm.tokenizer.bos_token_id], llm.max_model_len - 1
    assert values[0][0] == pytest.approx(log_probability(model, bos, encode("abc")), abs=1e-3)
    assert values[1][0] == pytest.approx(log_probability(model, encode("Two and"), encode(" two")), abs=1e-3)
    assert values[2][0] == pytest.approx(log_probability(model, encode("x" * (most - 4)), encode(" end")), abs=1e-3)

    assert values[3][0] == pytest.approx(log_probability(model, encode("x"), encode("x" * (most - 1))), abs=1e-2)

    context = encode("Snow is")
    tokens = greedy_tokens(model, context, 12)
    greedy = llm.tokenizer.decode(tokens[: tokens.index(EOS)] if EOS in tokens else tokens)
    assert len(greedy) >= 3
    answer, cut = adapter.generate_until(
        ask(
            "generate_until",
            ("Snow is", {"max_gen_toks": 12, "until": [], "do_sample": False}),
            ("Snow is", {"max_gen_toks": 12, "until": [greedy[2]]}),
        )
    )
    assert answer == greedy
    assert cut == greedy[: greedy.index(greedy[2])]

    long = "".join(f"line {i}. " for i in range(60))  # two windows and a half
    (value,) = adapter.loglikelihood_rolling(ask("loglikelihood_rolling", (long,)))
    tokens, size = encode(long), llm.max_model_len - 2
    expected = log_probability(model, bos, tokens[:size])
    for start in range(size, len(tokens), size):
        end = min(start + size, len(tokens))
        first = end - size - 1
        expected += log_probability(model, tokens[first:start], tokens[start:end])
    assert value == pytest.approx(expected, abs=1e-2)


@installed
def test_generation_and_mistakes(tiny, offline, monkeypatch):
    from transect.train.evaluation import harness
    from transect.train.evaluation.harness import run_tasks, sampling_params

    if not proving():  # reading the harness's own thousands of tasks takes seconds
        few = functools.partial(harness.TaskManager, include_defaults=False)
        monkeypatch.setattr(harness, "TaskManager", few)

    _, llm = tiny
    found = run_tasks(llm, "tiny", ["transect_answer"], include=TASKS, limit=2)
    assert found["transect_answer"]["exact_match,none"] == 0
    with pytest.raises(ValueError, match="no task 'chess'"):
        run_tasks(llm, "tiny", ["chess"], include=TASKS)
    with pytest.raises(ValueError, match="num_beams"):
        sampling_params({"num_beams": 4})
    assert sampling_params({"do_sample": True}).temperature == 1.0
    assert sampling_params({}).temperature == 0.0
    assert sampling_params({"temperature": 0.7, "until": "x", "max_new_tokens": 3}).stop == ("x",)


def test_without_the_harness_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "transect.train.evaluation.harness", raising=False)
    with pytest.raises(ValueError, match=r"pip install 'transect\[eval\]'"):
        import transect.train.evaluation.harness  # noqa: F401
