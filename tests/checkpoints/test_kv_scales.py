"""Scales of keys and values for a cache in fp8: no change without it, and what is large fits with it."""

import dataclasses

import pytest
import torch
from commands import run_here
from gpu_engine import gpu_model
from safetensors.torch import load_file, save_file
from tiny_llm import save_tiny_llm

from transect import LLM, SamplingParams
from transect.checkpoints.kv_scales import KVScales, measured_scales, powers_of_two, read_scales, use_scales
from transect.models.context import PagedContext, WholePrompts
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack
from transect.ops.attention.paged.rotary_kv_write import triton_rotary_kv_write
from transect.ops.opset import resolve_ops
from transect.spec.model import ModelConfig

TINY = ModelConfig("llama", 61, 32, 2, 4, 2, 16, 48, 64)
CONFIGS = {"llama": TINY, "qwen3": dataclasses.replace(TINY, architecture="qwen3", qk_norm=True)}
SCALES = torch.tensor([[[4.0, 0.5], [8.0, 1.0]], [[1.0, 2.0], [0.25, 16.0]]])


def hidden(model, dtype=torch.float32, whole=None):
    device = model.norm.weight.device
    caches = model.new_kv_cache(40, 4, dtype)
    for cache in caches:
        cache.zero_()
    tables = torch.arange(15, dtype=torch.int32, device=device).view(3, 5)
    starts, ends = (torch.tensor(n, dtype=torch.int32, device=device) for n in ((0, 3, 6, 16), (3, 3, 10)))
    context = PagedContext(*caches, tables, starts, ends, model.ops, whole=whole)
    return model(torch.arange(16, device=device), context.positions(), context)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_cache_of_the_models_dtype_gives_the_same(name):
    """Layer by layer and fused, with norms of heads and without."""
    model = Decoder(CONFIGS[name], dtype=torch.float32, ops=resolve_ops("cpu")).requires_grad_(False)
    model.init_weights(0.3, torch.Generator().manual_seed(0))
    for stack in (model.run_layers, FusedStack(model, max_positions=64)):
        model.stack = stack
        use_scales(model, torch.ones(2, 2, 2))
        want = hidden(model)
        use_scales(model, SCALES)
        torch.testing.assert_close(hidden(model), want, rtol=1e-5, atol=1e-5)


def test_scales_round_nothing():
    """In bfloat16, where one kernel normalises heads, turns and writes them: the results are the same to the bit."""
    pytest.importorskip("triton")
    ops = dataclasses.replace(resolve_ops("cpu"), rotary_kv_write=triton_rotary_kv_write)
    config = dataclasses.replace(CONFIGS["qwen3"], n_layers=1)
    model = Decoder(config, dtype=torch.bfloat16, ops=ops).requires_grad_(False)
    model.init_weights(0.3, torch.Generator().manual_seed(0))
    model.stack = FusedStack(model, max_positions=64)
    ways = None, WholePrompts(1, 3)  # by the cache, and of two prompts by what the kernel leaves of keys
    want = [hidden(model, torch.bfloat16, way) for way in ways]
    use_scales(model, SCALES[:1])
    for way, each in zip(ways, want, strict=True):
        assert torch.equal(hidden(model, torch.bfloat16, way), each)


def test_what_the_cache_keeps_is_divided():
    own = KVScales(torch.tensor([[3.0, 4.0], [0.7, 1.0]]), 4, torch.device("cpu"), torch.float32)
    ones = [torch.ones(1, heads, 2) for heads in (4, 2, 2)]
    q, k, v = (x[0, :, 0].tolist() for x in own.before(*ones))
    assert (q, k, v) == ([4, 4, 4, 4], [0.25, 0.25], [1, 1])  # scales are rounded up: 3 to 4, 0.7 to 1
    joined = own.joined(torch.cat([x.flatten(1) for x in ones], 1))
    assert joined.tolist() == [[4.0] * 8 + [0.25] * 4 + [1.0] * 4]
    assert powers_of_two(torch.tensor([0.5, 5.0])).tolist() == [0.5, 8.0]


def test_a_ranks_part_of_the_heads_takes_the_largest():
    part = Decoder(dataclasses.replace(TINY, n_heads=2, n_kv_heads=1), ops=resolve_ops("cpu"))
    use_scales(part, SCALES)
    q, k, v = part.layers[0].attention.kv_scales.before(*(torch.ones(1, n, 16) for n in (2, 1, 1)))
    assert (q.max(), k.max(), v.max()) == (4, 0.25, 0.125)


@pytest.fixture(scope="module")
def loud(tmp_path_factory):
    """A model whose keys are far beyond 448, and a text."""
    folder = tmp_path_factory.mktemp("loud")
    save_tiny_llm(folder, hidden_size=128, intermediate_size=256)
    path = folder / "model.safetensors"
    state = load_file(path)
    for name in state:
        if name.endswith("k_proj.weight"):
            state[name] *= 2.0**13
        elif name.endswith("q_proj.weight"):
            state[name] *= 2.0**-13
    save_file(state, path, metadata={"format": "pt"})
    text = folder / "text.txt"
    text.write_text("keys and values of a text that says how large they are " * 40)
    return folder, text


def chances(model, **settings):
    settings = {"device": "cpu", "max_model_len": 64, "dtype": "bfloat16", "kv_cache_tokens": 256, **settings}
    llm = LLM(str(model), **settings)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=5, ignore_eos=True)
    prompt = [5, 6, 7, 9, 11] * 4
    llm.generate([prompt[:16]], params)
    found, kernels = llm.generate([prompt], params)[0].outputs[0].logprobs[0], llm.kernels
    llm.close()
    return {token: each.logprob for token, each in found.items()}, kernels


def apart(one, two):
    """The largest difference; 9 where no likely token is in common."""
    return max((abs(one[token] - two[token]) for token in one.keys() & two.keys()), default=9.0)


def test_from_the_command_line_to_the_engine(loud, tmp_path):
    plain, text = loud
    out = tmp_path / "out"
    done = run_here("quantize", str(plain), "-o", str(out), "--format", "fp8", "--kv-scales", "--calibrate", str(text))
    assert done.returncode == 0, done.stderr
    scales = read_scales(out, 2, 2)
    assert scales.shape[:2] == (2, 2) and scales[:, 0].min() > 8 > scales[:, 1].max()
    exact, kernels = chances(out)
    assert "scales" not in kernels
    scaled, kernels = chances(out, kv_cache_dtype="fp8")
    assert "KV cache in fp8" in kernels and "the checkpoint's scales" in kernels
    state = load_file(out / "model.safetensors")
    save_file({name: t for name, t in state.items() if "k_scale" not in name and "v_scale" not in name},
              out / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    cut_off, kernels = chances(out, kv_cache_dtype="fp8")
    assert "scales" not in kernels
    assert apart(exact, scaled) < 0.3 * apart(exact, cut_off)


def test_the_c_kernels_cache_in_fp8_with_scales(loud, tmp_path):
    """In float32 beside plain torch over the same cache: the same codes, but for rounding next to a half."""
    plain, text = loud
    out = tmp_path / "out"
    run_here("quantize", str(plain), "-o", str(out), "--format", "int8", "--kv-scales", "--calibrate", str(text))
    exact, _ = chances(out, dtype="float32", native=False)
    torch_, _ = chances(out, dtype="float32", native=False, kv_cache_dtype="fp8")
    ours, kernels = chances(out, dtype="float32", native=True, kv_cache_dtype="fp8")
    assert "C++ kernels" in kernels and "KV cache in fp8, with the checkpoint's scales" in kernels
    assert 0 < apart(exact, ours) < 0.5 and apart(torch_, ours) < 0.2 * apart(exact, torch_)


def test_what_is_wrong_is_said(loud, tmp_path):
    plain, text = loud
    for more in (["--format", "fp8"], ["--format", "q8_0", "--calibrate", str(text)]):
        done = run_here("quantize", str(plain), "-o", str(tmp_path / "x"), "--kv-scales", *more)
        assert done.returncode and "fp8, int8 and int4" in done.stderr and "--calibrate" in done.stderr
    state = load_file(plain / "model.safetensors")
    whole = {f"model.layers.{i}.self_attn.{w}_scale": torch.tensor(2.0) for i in range(2) for w in "kv"}

    def read(**changed):
        save_file(state | whole | {f"model.layers.1.self_attn.{key}": value for key, value in changed.items()},
                  tmp_path / "model.safetensors")  # fmt: skip
        return read_scales(tmp_path, 2, 2)

    assert read().tolist() == [[[2, 2], [2, 2]], [[2, 2], [2, 2]]]
    with pytest.raises(ValueError, match=r"layers.1.self_attn.v_scale' has 3 scales.*2 key heads"):
        read(v_scale=torch.ones(3))
    with pytest.raises(ValueError, match=r"k_scale' has scales that are not positive"):
        read(k_scale=torch.tensor([1.0, -1.0]))
    whole.pop("model.layers.1.self_attn.k_scale")
    with pytest.raises(ValueError, match=r"layers.1.self_attn.k_scale' is missing"):
        read()
    assert read_scales(plain, 2, 2) is None
    both = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor(i + 1.0) for i in range(2)}  # older checkpoints
    save_file(state | both, tmp_path / "model.safetensors")
    assert read_scales(tmp_path, 2, 2).tolist() == [[[1, 1], [1, 1]], [[2, 2], [2, 2]]]
    model = Decoder(TINY, dtype=torch.float32, ops=resolve_ops("cpu")).requires_grad_(False)
    model.init_weights(0.3, torch.Generator().manual_seed(0))
    model.layers[0].attention.k.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="infinite or NaN"):
        measured_scales(model, [[1, 2, 3]])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_on_a_gpu_large_keys_fit(name):
    """The fused stack over a cache in fp8, beside one in bfloat16."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    config = dataclasses.replace(CONFIGS[name], dim=512, n_heads=4, n_kv_heads=2, head_dim=128, ffn_dim=512)
    model = gpu_model(config, torch.bfloat16, std=0.05)
    for layer in model.layers:
        (layer.attention.k_norm if config.qk_norm else layer.attention.k).weight.mul_(2.0**12)
        (layer.attention.q_norm if config.qk_norm else layer.attention.q).weight.mul_(2.0**-12)
    model.stack = FusedStack(model, max_positions=64)
    exact = hidden(model, torch.bfloat16)
    cut_off = hidden(model, torch.float8_e4m3fn)
    use_scales(model, torch.tensor([[64.0, 32.0], [0.5, 1.0]]).expand(2, 2, 2))
    scaled = hidden(model, torch.float8_e4m3fn)
    assert (scaled - exact).float().norm() < 0.5 * (cut_off - exact).float().norm()
    torch.testing.assert_close(hidden(model, torch.bfloat16), exact)
