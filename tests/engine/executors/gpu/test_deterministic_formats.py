"""Deterministic mode on a GPU with packed weights and caches in 8 bits: tokens and log-probabilities of a request are
the same to the bit alone, in a batch, in chunks, after a hit of the prefix cache, with graphs and without."""

import random

import pytest
import torch

from transect import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
PARAMS = SamplingParams(max_tokens=8, seed=1, temperature=0.8, logprobs=3, ignore_eos=True)
LENGTHS = (3, 40, 700, 17, 300, 1, 128, 33)


def prompts():
    return [random.Random(length).choices(range(100, 50_000), k=length) for length in LENGTHS]


def answers(llm, together):
    groups = [prompts()] if together else [[prompt] for prompt in prompts()]
    outputs = [output.outputs[0] for group in groups for output in llm.generate(group, PARAMS)]
    return [(list(output.token_ids), output.logprobs) for output in outputs]


FORMATS = [(None, "auto"), ("int4", "auto"), ("fp8", "auto"), ("int8", "auto")]
FORMATS += [(None, "fp8"), ("int4", "int8"), ("fp8", "fp8")]


@pytest.mark.parametrize(("quantization", "cache"), FORMATS)
def test_answers_do_not_depend_on_the_batch(quantization, cache):
    settings = {"load_format": "dummy", "device": "cuda", "deterministic": True, "seed": 0, "max_model_len": 1024}
    settings |= {"quantization": quantization, "kv_cache_dtype": cache, "kv_cache_tokens": 16384}
    llm = LLM("qwen3-0.6b", enable_prefix_caching=False, max_num_seqs=64, **settings)
    alone = answers(llm, together=False)
    assert answers(llm, together=True) == alone, "in one batch"
    llm.close()
    chunked = LLM("qwen3-0.6b", cuda_graphs="off", max_num_batched_tokens=96, max_num_seqs=8, **settings)
    assert answers(chunked, together=True) == alone, "in chunks, without graphs"
    assert answers(chunked, together=True) == alone, "after hits of the prefix cache"
    chunked.close()
