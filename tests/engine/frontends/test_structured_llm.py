"""``LLM`` under grammars on a tiny random model, beside every other option of a request."""

import json
import re

import pytest
from tiny_llm import save_tiny_llm

from transect import LLM, SamplingParams, StructuredOutputsParams

SETTINGS = {"dtype": "float32", "native": False, "threads": 1, "num_kv_blocks": 7, "max_num_seqs": 8}
FORM = StructuredOutputsParams(regex="[a-c]{2,30}(-[0-9]{1,3}){3}")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(directory)
    return str(directory)


@pytest.fixture(scope="module", params=[False, True], ids=["lag 0", "lag 1"])
def llm(directory, request):
    return LLM(directory, async_scheduling=request.param, **SETTINGS)


def params(**more):
    return SamplingParams(**{"max_tokens": 60, "seed": 1, "structured_outputs": FORM} | more)


def test_answers_keep_to_the_form_with_every_option(llm):
    options = [
        {},
        {"temperature": 0.0},
        {"n": 3, "temperature": 2.0},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"repetition_penalty": 1.3, "frequency_penalty": 1.5, "presence_penalty": -0.5},
        {"logit_bias": {ord("a") - 33: 5.0, 5: 100.0}},
        {"top_k": 3, "top_p": 0.9, "min_p": 0.01},
        {"min_tokens": 40},
        {"ignore_eos": True},
    ]
    outputs = llm.generate(["Hi there"] * len(options), [params(**each) for each in options])
    free = llm.generate("Hi there", SamplingParams(max_tokens=10, seed=1))
    assert free[0].outputs[0].text
    for option, output in zip(options, outputs, strict=True):
        for choice in output.outputs:
            assert choice.finish_reason == "stop" and re.fullmatch(FORM.regex, choice.text), (option, choice.text)
        if "n" in option:
            assert len({choice.text for choice in output.outputs}) == 3
        if "logprobs" in option:
            assert [next(iter(entry)) for entry in output.outputs[0].logprobs] == output.outputs[0].token_ids
    assert llm.stats().preemptions > 0, "the pool is too large for this test"
    again = llm.generate("Hi there", params())
    assert again[0].outputs[0].text == outputs[0].outputs[0].text


def test_stop_strings_and_lengths_cut_answers_short(llm):
    stopped, cut = llm.generate(["Hi"] * 2, [params(stop=["-"]), params(max_tokens=5)])
    assert re.fullmatch("[a-c]+", stopped.outputs[0].text) and stopped.outputs[0].stop_reason == "-"
    assert cut.outputs[0].finish_reason == "length" and len(cut.outputs[0].token_ids) == 5


def test_chat_and_json(llm):
    form = StructuredOutputsParams(json={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4})
    answer = llm.chat([{"role": "user", "content": "x"}], params(structured_outputs=form))[0].outputs[0]
    assert 2 <= len(json.loads(answer.text)) <= 4 and answer.finish_reason == "stop"


def test_a_bad_form_is_refused_before_anything_runs(llm):
    with pytest.raises(ValueError, match="structured_outputs cannot be used"):
        llm.generate(["a", "b"], [params(), params(structured_outputs=StructuredOutputsParams(regex="("))])
    assert not llm.has_work


def test_both_lags_give_the_same(directory):
    texts = []
    for ahead in (False, True):
        llm = LLM(directory, async_scheduling=ahead, **SETTINGS)
        outputs = llm.generate(["a", "bb"], [params(seed=4), SamplingParams(max_tokens=20, seed=4)])
        texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1]
