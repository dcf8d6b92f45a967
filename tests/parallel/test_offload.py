"""Each rank streams its own part of the layers: the tokens are those of one device that has all of them."""

import gc

import pytest
import torch
from effort import proving
from tiny_checkpoints import make_model
from tiny_llm import save_tiny_llm_text

from transect import LLM, SamplingParams

torch.set_num_threads(1)
SETTINGS = {
    "dtype": "float32", "native": False, "num_kv_blocks": 20, "max_model_len": 64, "threads": 1, "max_num_seqs": 16,
    "seed": 11, "block_size": 4,
}  # fmt: skip
SHARED = list(range(20, 34))
PROMPTS = [[5, 6, 7], [*SHARED, 3, 4], [1], [*SHARED, 9, 9, 9], [9] * 33]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True),
    SamplingParams(seed=3, top_p=0.9, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=1.5, frequency_penalty=0.5, max_tokens=14, ignore_eos=True),
    SamplingParams(seed=5, n=3, top_k=20, max_tokens=10),
    SamplingParams(seed=6, max_tokens=14, ignore_eos=True),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("six layers")
    make_model("llama-bias", num_hidden_layers=6).save_pretrained(folder)
    save_tiny_llm_text(folder)
    return str(folder)


def tokens_of(results):
    return [[choice.token_ids for choice in result.outputs] for result in results]


@pytest.mark.parametrize(("axis", "where"), [("tensor_parallel_size", "file"), ("pipeline_parallel_size", "host")])
def test_ranks_stream_their_own_parts(checkpoint, pair, tmp_path, axis, where):
    """With preemptions; with ``--prove`` a second time, with prefix hits."""
    folder = str(tmp_path) if where == "file" else None
    alone = LLM(checkpoint, **SETTINGS)
    spread = LLM(
        checkpoint, ranks=pair, **{axis: 2}, cpu_offload_gb=1000, offload_folder=folder, check_plans=True, **SETTINGS
    )
    try:
        for _ in range(2 if proving() else 1):
            assert tokens_of(spread.generate(PROMPTS, PARAMS)) == tokens_of(alone.generate(PROMPTS, PARAMS))
        assert spread.stats().preemptions > 0
        assert f"{6 if axis == 'tensor_parallel_size' else 3} of" in spread.kernels
    finally:
        spread.close()
        gc.collect()


def test_ranks_that_share_experts(pair, tmp_path):
    """A rank without requests computes the experts of others, and streams for that."""
    make_model("qwen3_moe", num_hidden_layers=4).save_pretrained(tmp_path)
    save_tiny_llm_text(tmp_path)
    alone = LLM(str(tmp_path), **SETTINGS)
    spread = LLM(
        str(tmp_path), ranks=pair, data_parallel_size=2, enable_expert_parallel=True, cpu_offload_gb=1000,
        check_plans=True, **SETTINGS,
    )  # fmt: skip
    try:
        assert tokens_of(spread.generate(PROMPTS[:1], PARAMS[0])) == tokens_of(alone.generate(PROMPTS[:1], PARAMS[0]))
        assert tokens_of(spread.generate(PROMPTS, PARAMS)) == tokens_of(alone.generate(PROMPTS, PARAMS))
    finally:
        spread.close()
        gc.collect()
