"""``allowed_token_ids`` and ``bad_words`` of a tiny model, beside every other option; truncated prompts."""

import re

import numpy as np
import pytest
import torch
from tiny_llm import EOS, save_tiny_llm

from transect import LLM, SamplingParams, StructuredOutputsParams
from transect.engine.executors.penalties import LogitAdjuster, Pick
from transect.engine.scheduling.request import Request, RequestState, Sequence
from transect.text.grammar.bad_words import WithoutSequences, spellings

SETTINGS = {"dtype": "float32", "native": False, "threads": 1, "num_kv_blocks": 7, "max_num_seqs": 8}
FEW = list(range(64, 70))


@pytest.fixture(scope="module", params=[False, True], ids=["lag 0", "lag 1"])
def llm(tmp_path_factory, request):
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(directory)
    return LLM(str(directory), async_scheduling=request.param, **SETTINGS)


def holds(tokens, ids):
    return any(tuple(tokens[at : at + len(ids)]) == tuple(ids) for at in range(len(tokens)))


def test_few_tokens_and_pairs_that_must_not_come(llm):
    """What is kept out in the second run is what came in the first."""
    options = [
        {"seed": 1},
        {"temperature": 0.0},
        {"n": 3, "seed": 2},
        {"logprobs": 2, "seed": 3},
        {"frequency_penalty": 1.5, "repetition_penalty": 1.3, "seed": 4},
        {"logit_bias": {66: 50.0, 9: 100.0}, "seed": 5},
        {"top_k": 2, "seed": 6},
    ]
    base = SamplingParams(max_tokens=40, temperature=1.5, allowed_token_ids=FEW)
    params = [base.with_(**each) for each in options]
    free = llm.generate([[5, 6, 7]] * len(params), params)
    outputs = [choice.token_ids for result in free for choice in result.outputs]
    assert all(set(tokens) <= set(FEW) and len(tokens) == 40 for tokens in outputs)
    pairs = [tuple(tokens[at : at + 2 + at % 2]) for tokens in outputs for at in (3, 30)]
    without = [each.with_(bad_words_token_ids=pairs) for each in params]
    together = llm.generate([[5, 6, 7]] * len(params), without)
    assert llm.stats().preemptions > 0, "the pool is too large for this test"
    for result, each in zip(together, without, strict=True):
        for choice in result.outputs:
            assert set(choice.token_ids) <= set(FEW) and not any(holds(choice.token_ids, pair) for pair in pairs)
            assert len(choice.token_ids) == 40
        if each.logprobs is not None:
            assert [next(iter(entry)) for entry in result.outputs[0].logprobs] == result.outputs[0].token_ids
        alone = llm.generate([[5, 6, 7]], each)[0]
        assert [c.token_ids for c in alone.outputs] == [c.token_ids for c in result.outputs]


def test_words_as_text_are_kept_out_also_under_a_grammar(llm):
    form = StructuredOutputsParams(regex="[ab]{20} b")
    params = SamplingParams(max_tokens=40, seed=1, structured_outputs=form, bad_words=["aa", "bbb"], temperature=2.0)
    texts = [choice.text for choice in llm.generate("Hi", params.with_(n=4))[0].outputs]
    assert all(re.fullmatch(form.regex, text) and "aa" not in text and "bbb" not in text for text in texts)
    assert len(set(texts)) > 1


def test_the_end_may_come_where_it_is_allowed(llm):
    params = SamplingParams(max_tokens=200, seed=1, allowed_token_ids=[64, EOS], temperature=5.0)
    choice = llm.generate([[5, 6]], params)[0].outputs[0]
    assert choice.finish_reason == "stop" and choice.token_ids[-1] == EOS and set(choice.token_ids) <= {64, EOS}


def test_the_end_of_a_prompt(llm):
    params = SamplingParams(max_tokens=4, truncate_prompt_tokens=3)
    assert llm.generate([[1, 2, 3, 4, 5]], params)[0].prompt_token_ids == [3, 4, 5]
    longest = llm.generate([[1] * 5000], params.with_(truncate_prompt_tokens=-1))[0]
    assert len(longest.prompt_token_ids) == llm.max_model_len - 4
    with pytest.raises(ValueError, match="leave no room: lower max_tokens"):
        llm.generate([[1, 2, 3]], params.with_(truncate_prompt_tokens=-1, max_tokens=llm.max_model_len))


def test_a_chat_goes_on_with_its_last_message(llm):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]
    params = SamplingParams(max_tokens=1)
    result = llm.chat(messages, params, add_generation_prompt=False, continue_final_message=True)[0]
    assert result.prompt.endswith("assistant\nb c")
    with pytest.raises(ValueError, match="set add_generation_prompt=False"):
        llm.chat(messages, params, continue_final_message=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must be at least 0"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids holds token id 1000000; this model has ids 0 to 299"),
        ({"allowed_token_ids": [EOS], "min_tokens": 2}, "min_tokens masks all of allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words must hold non-empty strings"),
        ({"bad_words": ["x" * 5000]}, "bad_words holds 5000 characters in all: give at most 4096"),
        ({"bad_words": ["a"] * 129}, "bad_words holds 129 entries: give at most 128"),
        ({"bad_words_token_ids": [[]]}, "bad_words_token_ids must hold lists of 1 to"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1, or -1"),
    ],
)
def test_what_cannot_work_is_refused(llm, changes, words):
    with pytest.raises(ValueError, match=words):
        llm.generate([[1, 2]], SamplingParams(**changes))
    assert not llm.has_work


def test_nothing_left_ends_one_request_alone(llm):
    params = SamplingParams(max_tokens=5, allowed_token_ids=[70], bad_words_token_ids=[(70, 70)])
    bad, good = llm.generate([[1], [1]], [params, SamplingParams(max_tokens=5, seed=1, ignore_eos=True)])
    assert bad.outputs[0].finish_reason == "error" and "bad_words" in bad.outputs[0].error
    assert bad.outputs[0].token_ids == [70] and len(good.outputs[0].token_ids) == 5


def test_spellings_are_with_a_space_and_without():
    encode = lambda text, add_special_tokens, parse_special: list(text.encode())  # noqa: E731
    assert spellings(["ab", " c"], encode) == ((97, 98), (32, 97, 98), (32, 99))


def test_masks_of_sequences():
    """Bits of both signs of a word; a fork goes its own way."""
    banned = WithoutSequences([(31,), (40, 63), (40, 41, 0)])
    words = np.zeros(2, np.int32)
    assert banned.fill(words) is None and words.tolist() == [0x7FFFFFFF, -1]
    banned.accept(40)
    other = banned.fork()
    assert banned.banned() == {31, 63} and other.banned() == {31, 63}
    other.accept(41)
    assert other.banned() == {31, 0} and banned.banned() == {31, 63}
    assert other.fill(words) is None and words.tolist() == [0x7FFFFFFE, -1]


def test_few_allowed_tokens_keep_their_logits():
    params = SamplingParams(allowed_token_ids=[3, 1], logit_bias={1: 2.0, 2: 100.0})
    state = RequestState(Request("a", (1,), params), 0.0, 9)
    draw = Sequence(state, 0, 0, (0, 0, 0, 0), 1).draws[0]
    logits = torch.arange(5, dtype=torch.float32)[None].clone()
    LogitAdjuster().apply(logits, [Pick(draw, 1, 0)], {})
    inf = float("inf")
    assert logits.tolist() == [[-inf, 3.0, -inf, 3.0, -inf]]
