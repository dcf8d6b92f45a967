"""A KV cache in fp8: half the bytes, nearly the same probabilities, and who refuses it."""

import pytest
import torch
from tiny_llm import save_tiny_llm

from transect import LLM, SamplingParams
from transect.engine.build import build_engine
from transect.engine.config import EngineConfig
from transect.engine.vllm_arguments import engine_settings
from transect.models.load import cache_dtype
from transect.ops.attention.paged import kv_cache_write
from transect.ops.attention.paged.kv_cache_write import example_batch

SETTINGS = {"device": "cpu", "max_model_len": 64, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny_llm(folder)
    return str(folder)


def first_logprobs(model, **settings):
    llm = LLM(model, kv_cache_tokens=256, **SETTINGS, **settings)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=5, ignore_eos=True)
    prompt = [5, 6, 7, 9, 11] * 4
    # A prompt's second half is attended through the cache: its first half was a request before.
    llm.generate([prompt[:16]], params)
    found = llm.generate([prompt], params)[0].outputs[0].logprobs[0]
    kernels = llm.kernels
    llm.close()
    return {token: each.logprob for token, each in found.items()}, kernels


def test_probabilities_are_near_and_the_engine_says_so(model):
    exact, _ = first_logprobs(model)
    rounded, kernels = first_logprobs(model, kv_cache_dtype="fp8")
    assert "KV cache in fp8" in kernels
    shared = exact.keys() & rounded.keys()
    assert len(shared) >= 3 and exact != rounded
    assert max(abs(exact[token] - rounded[token]) for token in shared) < 0.3


def test_bytes_hold_twice_the_tokens(model):
    config = {"model": model, "kv_cache_bytes": 1 << 16, **SETTINGS}
    sizes = [build_engine(EngineConfig(**config, kv_cache_dtype=name)).kv_tokens for name in ("auto", "fp8")]
    assert sizes[1] == 2 * sizes[0]


def test_what_is_too_large_becomes_the_largest_number():
    batch = example_batch(((3, 3),), 4, 4)
    caches = [torch.zeros(4, 1, 4, 8, dtype=torch.float8_e4m3fn) for _ in range(2)]
    kv_cache_write.reference(torch.full((3, 1, 8), 1e4), torch.full((3, 1, 8), -1e4), *caches, batch)
    blocks, offsets = batch.slots_T
    assert (caches[0].float()[blocks, :, offsets] == 448).all() and (
        caches[1].float()[blocks, :, offsets] == -448
    ).all()


def test_names_and_refusals():
    assert cache_dtype("auto", "fp8") == torch.float8_e4m3fn and cache_dtype("auto") == torch.bfloat16
    assert EngineConfig(model="m", **engine_settings({"kv_cache_dtype": "fp8_e4m3"})).kv_cache_dtype == "fp8"
    assert engine_settings({"kv_cache_dtype": None}) == {}
    with pytest.raises(ValueError, match="kv_cache_dtype must be auto or fp8"):
        EngineConfig(model="m", kv_cache_dtype="int8")
    with pytest.raises(ValueError, match="fp8 is not for native=True"):
        EngineConfig(model="m", kv_cache_dtype="fp8", native=True)
