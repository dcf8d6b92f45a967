"""Vectors and scores of prompts, against transformers' hidden states and log-probabilities."""

import json
import math

import numpy as np
import pytest
import torch
from tiny_llm import save_tiny_llm

from transect import LLM, AsyncEngine, PoolingParams, SamplingParams
from transect.engine.executors.pooling import default_pooling
from transect.engine.frontends.scoring import document_text, query_text

PROMPTS = [[5, 6, 7], list(range(40, 90)), [1], [9] * 33]
SETTINGS = {"dtype": "float32", "native": False, "threads": 1, "num_kv_blocks": 14, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    return directory, save_tiny_llm(directory)


@pytest.fixture(scope="module", params=[False, True], ids=["lag 0", "lag 1"])
def llm(tiny, request):
    return LLM(str(tiny[0]), async_scheduling=request.param, max_num_batched_tokens=16, **SETTINGS)


@torch.no_grad()
def expected(model, prompt, pooling, dimensions=None, normalize=True):
    hidden = model.model(torch.tensor([prompt])).last_hidden_state[0].double()
    vector = (hidden[-1] if pooling == "last" else hidden.mean(0))[:dimensions]
    return (vector / vector.norm() if normalize else vector).numpy()


def vectors(outputs):
    return [np.array(output.outputs.embedding) for output in outputs]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_those_of_transformers(tiny, llm, pooling):
    """In chunks of 16 tokens, twice, so that the second time there is something in the prefix cache."""
    for _ in range(2):
        found = llm.embed(PROMPTS, PoolingParams(pooling=pooling))
        assert [output.prompt_token_ids for output in found] == PROMPTS
        for prompt, vector in zip(PROMPTS, vectors(found), strict=True):
            assert np.abs(vector - expected(tiny[1], prompt, pooling)).max() < 1e-5
    assert found[1].num_cached_tokens == (48 if pooling == "last" else 0)


def test_fewer_dimensions_and_any_length(tiny, llm):
    (short,) = vectors(llm.embed([PROMPTS[1]], PoolingParams(dimensions=8)))
    assert np.abs(short - expected(tiny[1], PROMPTS[1], "last", 8)).max() < 1e-5
    (free,) = vectors(llm.embed([PROMPTS[1]], PoolingParams(pooling="mean", normalize=False)))
    assert np.abs(free - expected(tiny[1], PROMPTS[1], "mean", normalize=False)).max() < 1e-4
    cut = llm.embed([PROMPTS[1]], PoolingParams(truncate_prompt_tokens=5))[0]
    assert cut.prompt_token_ids == PROMPTS[1][-5:]


def test_beside_requests_that_generate_and_preempt(tiny, llm):
    """The pool holds a few of these at a time; the vectors are as they are alone."""
    generate = SamplingParams(max_tokens=60, seed=1, ignore_eos=True)
    before = llm.stats().preemptions
    names = [llm.submit([8] * 40, generate) for _ in range(4)]
    embed = [llm._request(prompt, SamplingParams(max_tokens=1), pooling="mean") for prompt in [[7] * 90, PROMPTS[1]]]
    for request in embed:
        llm._core.add(request)
    found = {}
    while llm.has_work:
        for output in llm.step():
            if output.pooled is not None:
                found[output.request_id] = np.frombuffer(output.pooled)
    assert llm.stats().preemptions > before and not set(names) & found.keys()
    for request in embed:
        wanted = expected(tiny[1], list(request.prompt_token_ids), "mean", normalize=False)
        assert np.abs(found[request.request_id] - wanted).max() < 1e-4


@torch.no_grad()
def test_scores_are_mean_log_probabilities_of_the_query(tiny, llm):
    query, documents = "why?", ["ab", "a longer one <|im_end|>"]
    found = llm.score(query, documents)
    encode = llm.tokenizer.encode
    for document, output in zip(documents, found, strict=True):
        before = encode(document_text(document), add_special_tokens=True, parse_special=False)
        after = encode(query_text(query), add_special_tokens=False, parse_special=False)
        logprobs = torch.log_softmax(tiny[1](torch.tensor([before + after])).logits[0].double(), -1)
        wanted = [float(logprobs[len(before) + i - 1, token]) for i, token in enumerate(after)]
        assert output.outputs.score == pytest.approx(math.exp(sum(wanted) / len(wanted)), rel=1e-4)
        assert 257 not in output.prompt_token_ids, "what a document spells is text"
    both = llm.score(["x y", query], documents)
    assert both[1].outputs.score == pytest.approx(found[1].outputs.score, rel=1e-6)


def test_what_cannot_work_is_refused(llm):
    with pytest.raises(ValueError, match="dimensions must be at most 64, the size of this model, got 65"):
        llm.embed("a", PoolingParams(dimensions=65))
    with pytest.raises(ValueError, match="pooling must be last or mean, got 'max'"):
        PoolingParams(pooling="max")
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.embed(["a", ""])
    with pytest.raises(ValueError, match="text_1 has 2 texts and text_2 has 3"):
        llm.score(["a", "b"], ["c", "d", "e"])
    with pytest.raises(ValueError, match="the query is empty"):
        llm.score(" ", ["c"])
    assert not llm.has_work


async def test_the_engine_in_another_process_gives_the_same(tiny):
    async with await AsyncEngine.start(model=str(tiny[0]), **SETTINGS) as engine:
        found = await engine.embed(PROMPTS[1], PoolingParams(pooling="mean"))
        assert np.abs(np.array(found.outputs.embedding) - expected(tiny[1], PROMPTS[1], "mean")).max() < 1e-5
        with pytest.raises(ValueError, match="at most 64"):
            await engine.embed("a", PoolingParams(dimensions=100))


def test_the_pooling_that_a_model_brings(tmp_path):
    assert default_pooling(tmp_path) == "last"
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling" / "config.json"
    for text, wanted in (("mean_tokens", "mean"), ("lasttoken", "last")):
        file.write_text(
            json.dumps({"word_embedding_dimension": 8, f"pooling_mode_{text}": True, "include_prompt": True})
        )
        assert default_pooling(tmp_path) == wanted
    file.write_text(json.dumps({"pooling_mode_cls_token": True}))
    with pytest.raises(ValueError, match="asks for pooling_mode_cls_token"):
        default_pooling(tmp_path)
