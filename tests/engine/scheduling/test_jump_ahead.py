"""Tokens that a grammar forces: the same as if they were drawn, in fewer steps. helpers/kv_checker.py checks that none
but the one token that may come is taken without a draw, and the fuzz of the scheduler meets such grammars, too."""

import json

import msgspec
import pytest
from grammar_fakes import Steps
from kv_checker import VOCAB
from small_engine import make, recorded_batches, request
from tiny_llm import save_tiny_llm

from transect import LLM, SamplingParams, StructuredOutputsParams

FORM = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": {"a_rather_long_name": {"type": "boolean"}, "and_another_one": {"enum": ["left", "right"]}},
        "required": ["a_rather_long_name", "and_another_one"],
    },
    disable_any_whitespace=True,
    disable_additional_properties=True,
)


def constrained(name, kind=1, fails_at=None, **params):
    grammar = Steps(kind, VOCAB, 24, fails_at=fails_at, forcing=5)
    return msgspec.structs.replace(request(name, **({"max_tokens": 40} | params)), constraint=grammar)


def run(lag, jump_ahead, *requests, **limits):
    core = make(lag, jump_ahead=jump_ahead, **limits)
    for each in requests:
        core.add(each)
    batches, outputs = recorded_batches(core)
    found = {}
    for output in outputs:
        tokens, _ = found.setdefault((output.request_id, output.index), ([], None))
        tokens += output.new_token_ids
        found[output.request_id, output.index] = tokens, output.finish_reason
    assert core.stats().kv_blocks_used == 0 and core.executor.num_forced <= core.scheduler.jumps.taken
    return found, len(batches), core.stats()


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("limits", [{}, {"num_blocks": 10, "max_num_batched_tokens": 7}], ids=["roomy", "tight"])
def test_steps_are_saved_and_tokens_are_not(lag, limits):
    requests = [constrained(str(seed), seed, n=1 + seed % 3, seed=seed, max_tokens=26) for seed in range(4)]
    requests.append(request("free", first=9, max_tokens=12))
    slow, many, before = run(lag, False, *requests, **limits)
    fast, few, stats = run(lag, True, *requests, **limits)
    assert fast == slow and stats.generation_tokens == before.generation_tokens
    assert before.jumped_tokens == 0 < 30 < stats.jumped_tokens and few < many * 0.7, (few, many)
    assert not limits or stats.preemptions > 0, "the pool is too large for this test"


@pytest.mark.parametrize("lag", [0, 1])
def test_ends_within_what_is_forced(lag):
    """max_tokens, stop tokens and grammars that fail end answers where they do without jumps; logprobs stay whole."""
    requests = [constrained(f"length {most}", max_tokens=most) for most in range(1, 12)]
    requests += [constrained(f"stop {token}", stop_token_ids=[token]) for token in range(1, VOCAB)]
    if lag == 0:  # the fuzz has them a step ahead
        requests += [constrained(f"fails {at}", fails_at=at) for at in range(6)]
    requests.append(constrained("logprobs", logprobs=1))
    slow, _, _ = run(lag, False, *requests)
    fast, _, stats = run(lag, True, *requests)
    assert fast == slow and stats.jumped_tokens > 20
    assert {reason for _, reason in slow.values()} >= {"length", "stop"}


def test_an_abort_while_a_draw_is_void():
    core = make(1)
    core.add(constrained("a"))
    while not core.scheduler.jumps._void:
        core.step()
    core.abort("a")
    recorded_batches(core)
    assert not core.scheduler.jumps._void and core.stats().kv_blocks_used == 0


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(directory)
    return str(directory)


@pytest.mark.parametrize("lag", [False, True], ids=["lag 0", "lag 1"])
def test_a_real_grammar_on_a_real_model(directory, lag):
    """With a token for each byte nearly every token of this JSON is forced."""
    settings = {"dtype": "float32", "native": False, "threads": 1, "max_num_seqs": 8, "num_kv_blocks": 14}
    params = [
        SamplingParams(max_tokens=150, seed=seed, structured_outputs=FORM, **more)
        for seed, more in enumerate(
            ({}, {"temperature": 0.0}, {"n": 3}, {"frequency_penalty": 1.0}, {"logprobs": 1}, {"stop": ["_one"]})
        )
    ]
    found, steps = [], []
    for jump_ahead in (False, True):
        llm = LLM(directory, async_scheduling=lag, jump_ahead=jump_ahead, **settings)
        results = llm.generate(["Hi"] * len(params), params)
        found.append([(c.text, c.token_ids, c.finish_reason) for result in results for c in result.outputs])
        steps.append(llm.stats().steps)
        assert llm.stats().preemptions > 0, "the pool is too large for this test"
    assert found[0] == found[1] and llm.stats().jumped_tokens > 200
    for text, _, reason in found[1][:-1]:
        assert set(json.loads(text)) == {"a_rather_long_name", "and_another_one"} and reason == "stop"
    assert found[1][-1][0].endswith('"and_another') and found[1][-1][2] == "stop"
    alone = []
    for jump_ahead in (False, True):
        llm = LLM(directory, async_scheduling=lag, jump_ahead=jump_ahead, **settings)
        llm.generate("Hi", params[0])
        alone.append(llm.stats().steps)
    assert alone[1] < alone[0] / 4
