"""A KV cache in fp8 or int8: half the bytes, nearly the same probabilities, and who refuses it."""

import pytest
import torch
from tiny_llm import save_tiny_llm

from transect import LLM, SamplingParams
from transect.checkpoints.kernel_choice import cache_dtype
from transect.engine.build import build_engine
from transect.engine.config import EngineConfig
from transect.engine.executors.gpu.setup import check_cache
from transect.engine.frontends.vllm_arguments import engine_settings
from transect.ops.attention.paged import (
    dispatch,
    kv_cache_write,
    paged_attention,
    paged_attention_torch,
    rotary_kv_write,
)
from transect.ops.attention.paged.cache_codes import encode, values_of
from transect.ops.attention.paged.kv_cache_write import example_batch
from transect.ops.lang.jit import INTERPRETED
from transect.spec.model import ModelConfig

SETTINGS = {"device": "cpu", "max_model_len": 64, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny_llm(folder)
    return str(folder)


def first_logprobs(model, **settings):
    llm = LLM(model, kv_cache_tokens=256, **{**SETTINGS, **settings})
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=5, ignore_eos=True)
    prompt = [5, 6, 7, 9, 11] * 4
    # A prompt's second half is attended through the cache: its first half was a request before.
    llm.generate([prompt[:16]], params)
    found = llm.generate([prompt], params)[0].outputs[0].logprobs[0]
    kernels = llm.kernels
    llm.close()
    return {token: each.logprob for token, each in found.items()}, kernels


@pytest.mark.parametrize(("name", "most"), [("fp8", 0.3), ("int8", 0.1)])
def test_probabilities_are_near_and_the_engine_says_so(model, name, most):
    exact, _ = first_logprobs(model)
    rounded, kernels = first_logprobs(model, kv_cache_dtype=name)
    assert f"KV cache in {name}" in kernels
    shared = exact.keys() & rounded.keys()
    assert len(shared) >= 3 and exact != rounded
    assert max(abs(exact[token] - rounded[token]) for token in shared) < most


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "most"), [("fp8", 0.3), ("int8", 0.1)])
def test_on_a_gpu_probabilities_are_near(model, name, most):
    on_gpu = {"device": "cuda", "cuda_graphs": "lazy"}
    exact, _ = first_logprobs(model, **on_gpu)
    rounded, kernels = first_logprobs(model, kv_cache_dtype=name, **on_gpu)
    assert f"KV cache in {name}" in kernels
    shared = exact.keys() & rounded.keys()
    assert len(shared) >= 3 and max(abs(exact[token] - rounded[token]) for token in shared) < most


def test_bytes_hold_twice_the_tokens(model):
    config = {"model": model, "kv_cache_bytes": 1 << 16, **SETTINGS}
    sizes = [build_engine(EngineConfig(**config, kv_cache_dtype=name)).kv_tokens for name in ("auto", "fp8", "int8")]
    assert sizes[1] == 2 * sizes[0]
    # A head of 16 numbers has a scale of 4 bytes; the cache is whole blocks of 16 tokens.
    assert 2 * sizes[0] * 16 / 20 - 16 <= sizes[2] <= 2 * sizes[0] * 16 / 20


def test_int8_is_off_by_half_a_step_of_its_head():
    """The error that the settings page says, for heads of very different sizes, and heads of zeros."""
    batch = example_batch(((3, 9), (1, 5)), 4, 8)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 4, 2, 8, generator=generator) * torch.tensor([1e-3, 50.0])[:, None]
    v[1] = 0
    caches = [torch.zeros(8, 2, 4, 12, dtype=torch.int8) for _ in range(2)]
    kv_cache_write.reference(k, v, *caches, batch)
    blocks, offsets = batch.slots_T
    for x, cache in ((k, caches[0]), (v, caches[1])):
        read = values_of(cache[blocks, :, offsets], torch.float32)
        assert ((read - x).abs() <= x.abs().amax(-1, keepdim=True) / 253.9).all()
        assert x.abs().max() == 0 or (read - x).abs().max() > 0


@pytest.mark.parametrize("window", [None, 5])
def test_attention_reads_int8_as_the_values_it_stands_for(window):
    """By tiles and by the reference, as over a cache that holds those values."""
    batch = example_batch(((7, 20), (1, 33)), 4, 16)
    generator = torch.Generator().manual_seed(1)
    stored = encode(torch.randn(2, 16, 2, 4, 8, generator=generator))
    exact = values_of(stored, torch.float32)
    q = torch.randn(8, 4, 8, generator=generator)
    for attend in (paged_attention.reference, paged_attention_torch.tiled, paged_attention_torch.tiled_uniform):
        torch.testing.assert_close(attend(q, *stored, batch, 0.3, window), attend(q, *exact, batch, 0.3, window))


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or Triton's interpreter")
def test_kernels_write_and_read_int8_as_the_references():
    """Both kernels that write it, and paged attention in decode, in prefill and in a window."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = example_batch(((3, 20), (1, 33)), 16, 16).to(device)
    generator = torch.Generator().manual_seed(2)
    q, k, v, more = torch.randn(4, 4, 4, 16, generator=generator).to(device)
    k, v = k[:, :2], v[:, :2] * 30
    v[1, 0] = 0
    stored = encode(torch.randn(2, 16, 2, 16, 16, generator=generator)).to(device)
    want, found, turned = stored.clone(), stored.clone(), stored.clone()
    kv_cache_write.reference(k, v, *want, batch)
    kv_cache_write.triton_kv_cache_write(k, v, *found, batch)
    straight, none = torch.ones(4, 8, device=device), torch.zeros(4, 8, device=device)
    rotary_kv_write.triton_rotary_kv_write(more, k, v, straight, none, *turned, batch)
    for each in (found, turned):
        torch.testing.assert_close(values_of(each, torch.float32), values_of(want, torch.float32), rtol=0, atol=1e-3)
        assert (each != want).float().mean() < 1e-3  # a quotient next to a half may be rounded the other way
    for window in (None, 9):
        expected = paged_attention.reference(q, *want, batch, 0.3, window)
        read = dispatch.PagedTriton()(q, *want, batch, 0.3, window)
        torch.testing.assert_close(read, expected, rtol=2e-3 if device == "cuda" else 1e-5, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(32, 8, 128), (14, 2, 64), (8, 4, 80)])
def test_on_a_gpu_attention_in_bfloat16_reads_int8(heads, kv_heads, d, window):
    """Rows of one query, of several, and both."""
    generator = torch.Generator().manual_seed(3)
    for rows in (((1, 700), (1, 33), (1, 1)), ((70, 300), (16, 16)), ((40, 200), (1, 500), (1, 90))):
        batch = example_batch(rows, 16, 96).to("cuda")
        q = torch.randn(sum(new for new, _ in rows), heads, d, generator=generator).to("cuda", torch.bfloat16)
        stored = encode(torch.randn(2, 96, kv_heads, 16, d, generator=generator) * 3).to("cuda")
        exact = paged_attention.reference(q.double(), *values_of(stored, torch.float64), batch, d**-0.5, window)
        found = dispatch.PagedTriton()(q, *stored, batch, d**-0.5, window)
        assert (found.double() - exact).norm() <= 0.01 * exact.norm()


def test_a_gpu_refuses_int8_where_scales_would_not_be_aligned():
    sizes = [ModelConfig("llama", 61, 60, 2, 6, 2, head_dim, 128, 64) for head_dim in (10, 20)]
    config = EngineConfig(model="m", kv_cache_dtype="int8")
    with pytest.raises(ValueError, match=r"multiple of 4, not of 10: leave kv_cache_dtype out, or take fp8"):
        check_cache(config, sizes[0])
    check_cache(config, sizes[1])
    check_cache(EngineConfig(model="m", kv_cache_dtype="fp8"), sizes[0])


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
    with pytest.raises(ValueError, match="kv_cache_dtype must be auto, fp8"):
        EngineConfig(model="m", kv_cache_dtype="int4")
    with pytest.raises(ValueError, match="int8 is not for native=True"):
        EngineConfig(model="m", kv_cache_dtype="int8", native=True)
