"""Beam search against one that computes everything anew with transformers' model."""

import math

import pytest
import torch
from tiny_llm import EOS, save_tiny_llm

from transect import LLM, BeamSearchParams
from transect.engine.frontends.beam_search import BeamSearch
from transect.text.outputs import Logprob

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    return directory, save_tiny_llm(directory)


@pytest.fixture(scope="module", params=[False, True], ids=["lag 0", "lag 1"])
def llm(tiny, request):
    settings = {"dtype": "float32", "native": False, "threads": 1, "num_kv_blocks": 40, "max_num_seqs": 3}
    return LLM(str(tiny[0]), async_scheduling=request.param, **settings)


@torch.no_grad()
def plainly(model, prompt, width, steps, penalty, ends=(EOS,)):
    """All of it in a few lines: no early end, no cache."""
    going, done = [(0.0, ())], []
    for _ in range(steps):
        found = []
        for total, tokens in going:
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double()
            top = torch.log_softmax(logits, -1).topk(2 * width)
            found += [(total + p, (*tokens, t)) for p, t in zip(top.values.tolist(), top.indices.tolist(), strict=True)]
        done += [(p, t) for p, t in found if t[-1] in ends]
        going = sorted((x for x in found if x[1][-1] not in ends), key=lambda x: -x[0])[:width]
    scores = [(p / max(len(t) - (t[-1] in ends), 1) ** penalty, t) for p, t in done + going]
    return sorted(scores, key=lambda x: -x[0])[:width]


@pytest.mark.parametrize(("width", "steps", "penalty"), [(1, 6, 1.0), (3, 5, 1.0), (4, 4, 0.0), (3, 4, 2.0)])
def test_the_same_answers_as_a_plain_search(tiny, llm, width, steps, penalty):
    expected = plainly(tiny[1], PROMPT, width, steps, penalty)
    params = BeamSearchParams(beam_width=width, max_tokens=steps, length_penalty=penalty)
    (found,) = llm.beam_search([PROMPT], params)
    assert [tuple(each.tokens[3:]) for each in found.sequences] == [tokens for _, tokens in expected]
    for each, (score, tokens) in zip(found.sequences, expected, strict=True):
        assert each.score == pytest.approx(score, abs=1e-4)
        assert [position[t].logprob for t, position in zip(tokens, each.logprobs, strict=True)]
        assert sum(p[t].logprob for t, p in zip(tokens, each.logprobs, strict=True)) == pytest.approx(each.cum_logprob)


def test_ends_of_answers(tiny, llm):
    """A token that is among the likeliest ends some beams; a letter of the text does, too."""
    first = plainly(tiny[1], PROMPT, 3, 1, 1.0)[1][1][0]
    params = BeamSearchParams(beam_width=3, max_tokens=4, stop_token_ids=[first], length_penalty=0.0)
    expected = plainly(tiny[1], PROMPT, 3, 4, 0.0, ends=(EOS, first))
    sequences = llm.beam_search(PROMPT, params)[0].sequences
    assert [tuple(each.tokens[3:]) for each in sequences] == [tokens for _, tokens in expected]
    ended = next(each for each in sequences if each.tokens[-1] == first)
    assert (ended.finish_reason, ended.stop_reason) == ("stop", first)
    letter = llm.tokenizer.decode([first])
    by_text = BeamSearchParams(beam_width=3, max_tokens=4, stop=letter, length_penalty=0.0)
    (found,) = [each for each in llm.beam_search(PROMPT, by_text)[0].sequences if each.tokens == ended.tokens]
    assert found.stop_reason == letter and found.text == ended.text == llm.tokenizer.decode(PROMPT)


def test_several_prompts_with_few_places(llm):
    """Six beams want to run, three can; each prompt's answers are as they are alone."""
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    together = llm.beam_search([PROMPT, [9] * 20], params)
    for prompt, output in zip([PROMPT, [9] * 20], together, strict=True):
        alone = llm.beam_search([prompt], params)[0]
        assert [each.tokens for each in alone.sequences] == [each.tokens for each in output.sequences]
        assert len(alone.sequences) == 3 and all(len(each.tokens) == len(prompt) + 6 for each in alone.sequences)
    assert not llm.has_work


def test_the_context_ends_answers(llm):
    prompt = [3] * (llm.max_model_len - 3)
    (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True))
    assert {len(each.tokens) for each in output.sequences} == {llm.max_model_len}
    assert {each.finish_reason for each in output.sequences} == {"length"}


def test_the_search_ends_when_nothing_can_be_better():
    """After a likely end, a beam of very low probability need not go on for a thousand tokens."""
    params = BeamSearchParams(beam_width=1, max_tokens=1000, length_penalty=0.0)
    search = BeamSearch(params, 1000, (0,), tokenizer=None)
    search.advance([{0: Logprob(math.log(0.9)), 1: Logprob(math.log(0.1))}])
    assert not search.beams
    favours_long = BeamSearch(BeamSearchParams(beam_width=1, max_tokens=1000), 1000, (0,), tokenizer=None)
    favours_long.advance([{1: Logprob(math.log(0.6)), 0: Logprob(math.log(0.4))}])
    favours_long.advance([{0: Logprob(math.log(0.9)), 1: Logprob(math.log(0.1))}])
    assert favours_long.beams == [(1, 1)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"beam_width": 11}, "beam_width must be a whole number of 1 to 10, got 11"),
        ({"beam_width": True}, "beam_width must be"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1"),
        ({"temperature": 0.7}, "temperature must be 0 or 1 with beam search"),
        ({"length_penalty": float("nan")}, "length_penalty must be in"),
        ({"stop": ["a"] * 200}, "stop holds 200 entries"),
    ],
)
def test_what_cannot_work_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | changes)
