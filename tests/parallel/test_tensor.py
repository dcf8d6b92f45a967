"""Tensor parallelism gives the tokens of one device: every family, every way in which an engine runs."""

import gc

import pytest
import torch
from tiny_checkpoints import FAMILIES, make_model, write_gguf
from tiny_llm import save_tiny_llm_text

from transect import LLM, SamplingParams

torch.set_num_threads(1)
SETTINGS = {
    "dtype": "float32", "native": False, "num_kv_blocks": 96, "threads": 1, "max_num_seqs": 16, "seed": 11,
    "block_size": 4, "check_plans": True,
}  # fmt: skip
SHARED = list(range(20, 34))
PROMPTS = [[5, 6, 7], [*SHARED, 3, 4], [1], [*SHARED, 9, 9, 9], [9] * 33]


def params():
    free = {"ignore_eos": True, "max_tokens": 14}
    return [
        SamplingParams(temperature=0.0, logprobs=3, **free),
        SamplingParams(seed=3, top_p=0.9, **free),
        SamplingParams(temperature=1.5, frequency_penalty=0.5, logit_bias={7: 2.0}, **free),  # the engine's own seed
        SamplingParams(seed=5, n=3, top_k=20, min_p=0.01, max_tokens=10),
        SamplingParams(seed=6, n=2, min_tokens=9, max_tokens=14, repetition_penalty=1.2, prompt_logprobs=1),
    ]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folders of every family, made when they are asked for."""
    folder, made = tmp_path_factory.mktemp("families"), {}

    def find(family):
        if family not in made:
            make_model(family).save_pretrained(folder / family)
            save_tiny_llm_text(folder / family)
            made[family] = str(folder / family)
        return made[family]

    return find


def tokens_of(results):
    return [[choice.token_ids for choice in result.outputs] for result in results]


def assert_same(model, ranks, size=2, **changes):
    """The same requests on one device and on several; returns what the engines say of themselves."""
    settings = SETTINGS | changes
    alone = LLM(model, **settings | {"check_plans": False})
    spread = LLM(model, ranks=ranks, tensor_parallel_size=size, **settings)
    try:
        for _ in range(2):  # the second time with prefix hits
            mine, theirs = alone.generate(PROMPTS, params()), spread.generate(PROMPTS, params())
            assert tokens_of(mine) == tokens_of(theirs)
        for a, b in zip(mine[0].outputs[0].logprobs, theirs[0].outputs[0].logprobs, strict=True):
            assert list(a) == list(b)
            assert [v.logprob for v in a.values()] == pytest.approx([v.logprob for v in b.values()], abs=1e-4)
        stats = alone.stats(), spread.stats()
        assert stats[0] == stats[1]
        assert stats[1].prefix_hit_tokens > 0 or not settings.get("enable_prefix_caching", True)
        return alone, spread
    finally:
        spread.close()
        gc.collect()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_draws_the_same_tokens(checkpoints, pair, family):
    assert_same(checkpoints(family), pair)


@pytest.mark.parametrize(
    "settings",
    [
        {"async_scheduling": True},
        {"async_scheduling": True, "num_kv_blocks": 20, "max_model_len": 64},  # so few that sequences are preempted
        {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
    ],
    ids=["ahead", "preempted", "chunks"],
)
def test_it_does_not_matter_how_the_engine_runs(checkpoints, pair, settings):
    _, spread = assert_same(checkpoints("qwen3"), pair, **settings)
    assert ("num_kv_blocks" in settings) == (spread.stats().preemptions > 0)
