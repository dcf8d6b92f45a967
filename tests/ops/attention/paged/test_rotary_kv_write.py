"""Rotation and cache write in one launch: padding, strides, in place, as an operator, in a graph; fused products."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from transect.ops.attention.paged.batch import PagedBatch
from transect.ops.attention.paged.kv_cache_write import example_batch, triton_kv_cache_write
from transect.ops.attention.paged.rotary_kv_write import (
    _operator,
    reference,
    rotary_kv_write,
    rule,
    triton_rotary_kv_write,
    warps_for,
)
from transect.ops.numerics import sample
from transect.ops.position.rotary import triton_rotary
from transect.ops.registry import get

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, SIZE, BLOCK_SIZE, BLOCKS = 6, 2, 16, 4, 16


def inputs(batch: PagedBatch, tokens: int, norm: bool = True) -> dict[str, Any]:
    """q, k, v as views of one projection; caches of negative numbers, so that what was not written shows."""
    joined = sample(tokens, HEADS + 2 * KV_HEADS, SIZE).to(DEVICE)
    q, k, v = joined.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    angles = 10 * sample(tokens, SIZE // 2, seed=1).to(DEVICE)
    caches = torch.full((2, BLOCKS, KV_HEADS, BLOCK_SIZE, SIZE), -7.0, device=DEVICE)
    made = {"q": q, "k": k, "v": v, "cos": angles.cos(), "sin": angles.sin(), "k_cache": caches[0]}
    made |= {"v_cache": caches[1], "batch": batch.to(DEVICE)}
    if norm:
        made |= {"q_weight": sample(SIZE, seed=2).to(DEVICE), "k_weight": sample(SIZE, seed=3).to(DEVICE)}
    return made


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if "cache" in name else value for name, value in arguments.items()}


def agree(arguments: dict[str, Any], expected: dict[str, Any], q: torch.Tensor) -> None:
    torch.testing.assert_close(q, reference(**expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(arguments["k_cache"], expected["k_cache"], rtol=1e-4, atol=1e-4)
    assert torch.equal(arguments["v_cache"], expected["v_cache"])


RAGGED = example_batch(((1, 9), (3, 20), (5, 5)), BLOCK_SIZE, BLOCKS)
DECODE = example_batch(((1, 9), (1, 20), (1, 5)), BLOCK_SIZE, BLOCKS)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("batch", "tokens"), [(RAGGED, 9), (DECODE, 3)], ids=["ragged", "decode"])
def test_views_of_one_projection(batch: PagedBatch, tokens: int, norm: bool) -> None:
    arguments = inputs(batch, tokens, norm)
    expected = copied(arguments)
    agree(arguments, expected, triton_rotary_kv_write(**arguments))


def test_each_head_may_have_weights_of_its_own() -> None:
    """With powers of two between the heads' the results are those of one weight for all, times these, to the bit."""
    one = inputs(RAGGED, 9)
    q_factors, k_factors = (2.0 ** torch.arange(-n, n, 2, device=DEVICE)[:, None] for n in (HEADS, KV_HEADS))
    own = copied(one) | {"q_weight": one["q_weight"] * q_factors, "k_weight": one["k_weight"] * k_factors}
    expected = copied(own)
    turned = triton_rotary_kv_write(**own)
    assert torch.equal(turned, triton_rotary_kv_write(**one) * q_factors)
    wanted = torch.where(one["k_cache"] == -7, one["k_cache"], one["k_cache"] * k_factors[:, None])
    assert torch.equal(own["k_cache"], wanted)
    agree(own, expected, turned)


def test_result_in_the_place_of_q() -> None:
    arguments = inputs(RAGGED, 9)
    expected = copied(arguments) | {"q": arguments["q"].clone()}
    turned = triton_rotary_kv_write(**arguments, out=arguments["q"])
    assert turned.data_ptr() == arguments["q"].data_ptr()
    agree(arguments, expected, turned)


@pytest.mark.parametrize("norm", [False, True])
def test_turned_keys_are_kept_beside_the_cache(norm: bool) -> None:
    """In their own place, a view of one projection, by kernel and reference; what lies around them stays."""
    arguments = inputs(RAGGED, 9, norm)
    expected = copied(arguments) | {"k": arguments["k"].clone()}
    q, v = arguments["q"].clone(), arguments["v"].clone()
    turned = triton_rotary_kv_write(**arguments, k_out=arguments["k"])
    kept = torch.empty_like(expected["k"])
    torch.testing.assert_close(turned, reference(**expected, k_out=kept), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(arguments["k"], kept, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(arguments["k_cache"], expected["k_cache"], rtol=1e-4, atol=1e-4)
    assert torch.equal(arguments["q"], q) and torch.equal(arguments["v"], v)
    with pytest.raises(ValueError, match="k_out"):
        triton_rotary_kv_write(**arguments, k_out=arguments["q"])


@pytest.mark.parametrize("call", ["fused", "write"])
def test_tokens_past_the_last_row_are_padding(call: str) -> None:
    """A static buffer of 12 tokens of which the batch names 9."""
    arguments = inputs(RAGGED, 12, norm=False)
    expected = {name: v[:9] if name in ("q", "k", "v", "cos", "sin") else v for name, v in copied(arguments).items()}
    if call == "fused":
        agree(arguments, expected, triton_rotary_kv_write(**arguments)[:9])
    else:
        triton_kv_cache_write(*(arguments[name] for name in ("k", "v", "k_cache", "v_cache", "batch")))
        get("kv_cache_write").reference(*(expected[name] for name in ("k", "v", "k_cache", "v_cache", "batch")))
        assert torch.equal(arguments["k_cache"], expected["k_cache"])
        assert torch.equal(arguments["v_cache"], expected["v_cache"])


def test_rows_of_length_0_and_blocks_below_0_are_padding() -> None:
    """Three rows of a decode step that was captured for three; only the first is in use."""
    tables, lengths = DECODE.block_tables.clone(), DECODE.seq_lens.clone()
    lengths[1] = 0
    tables[2] = -1
    batch = PagedBatch(tables, DECODE.query_starts, lengths, BLOCK_SIZE)
    arguments = inputs(batch, 3)
    expected = {name: v[:1] if name in ("q", "k", "v", "cos", "sin") else v for name, v in copied(arguments).items()}
    first = (DECODE.block_tables[:1], DECODE.query_starts[:2], torch.tensor([9], dtype=torch.int32))
    expected["batch"] = PagedBatch(*first, BLOCK_SIZE).to(DEVICE)
    agree(arguments, expected, triton_rotary_kv_write(**arguments)[:1])


def test_the_backward_rotation_undoes_the_forward_one() -> None:
    arguments = inputs(RAGGED, 9)
    parts = [arguments[name] for name in ("q", "k", "cos", "sin")]
    q, k = triton_rotary(*triton_rotary(*parts), *parts[2:], opposite=True)
    torch.testing.assert_close(q, parts[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(k, parts[1], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_operator() -> None:
    arguments = inputs(RAGGED, 9)
    batch = arguments.pop("batch")
    tables = {"block_tables": batch.block_tables, "query_starts": batch.query_starts, "seq_lens": batch.seq_lens}
    torch.library.opcheck(
        _operator, (), {**arguments, **tables, "eps": 1e-6}, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.filterwarnings("ignore")
def test_compiles_without_a_break() -> None:
    arguments = inputs(RAGGED, 9)
    expected = copied(arguments)

    def twice(**given: Any) -> torch.Tensor:
        return 2 * rotary_kv_write(**given)

    made = torch.compile(twice, fullgraph=True, backend="aot_eager")(**arguments)
    agree(arguments, expected, made / 2)


def test_what_does_not_fit_is_said() -> None:
    arguments = inputs(RAGGED, 9)
    with pytest.raises(ValueError, match="both q_weight and k_weight"):
        triton_rotary_kv_write(**(arguments | {"k_weight": None}))
    with pytest.raises(ValueError, match=r"weights must be \[d\] both.*got \[2, 16\] and \[16\]"):
        triton_rotary_kv_write(**(arguments | {"q_weight": arguments["q_weight"].expand(2, -1)}))
    with pytest.raises(ValueError, match=r"cos and sin \[T, d/2\]"):
        triton_rotary_kv_write(**(arguments | {"cos": arguments["cos"][:, :-1]}))
    with pytest.raises(ValueError, match="caches"):
        triton_rotary_kv_write(**(arguments | {"k_cache": arguments["k_cache"][:, :1]}))
    other = PagedBatch(RAGGED.block_tables, RAGGED.query_starts, RAGGED.seq_lens, 8).to(DEVICE)
    with pytest.raises(ValueError, match="the batch was made for 8"):
        triton_rotary_kv_write(**(arguments | {"batch": other}))
    with pytest.raises(ValueError, match="out must be"):
        triton_rotary_kv_write(**arguments, out=arguments["k"])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize("dependent_launch", [False, True])
def test_replay_of_a_captured_graph_follows_the_batch(dependent_launch: bool) -> None:
    arguments = inputs(DECODE, 3)
    triton_rotary_kv_write(**arguments, dependent_launch=dependent_launch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = triton_rotary_kv_write(**arguments, dependent_launch=dependent_launch)
    arguments["batch"].seq_lens.sub_(1)
    arguments["q"].mul_(2)
    arguments["k_cache"].fill_(-7)
    arguments["v_cache"].fill_(-7)
    expected = copied(arguments) | {"batch": arguments["batch"].to(DEVICE)}
    graph.replay()
    agree(arguments, expected, q)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
def test_a_token_gets_the_same_bits_in_any_batch() -> None:
    tokens, size = 4096, 128
    q, k, v = torch.randn(3, tokens, 8, size, device=DEVICE, dtype=torch.bfloat16)
    angles = torch.rand(tokens, size // 2, device=DEVICE)
    weights = torch.randn(2, size, device=DEVICE, dtype=torch.bfloat16)
    results = []
    for count in (tokens, 256, 1):
        table = torch.arange(tokens, dtype=torch.int32, device=DEVICE)[:count, None]
        starts = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
        batch = PagedBatch(table, starts, torch.ones(count, dtype=torch.int32, device=DEVICE), 16)
        caches = torch.zeros(2, tokens, 8, 16, size, device=DEVICE, dtype=torch.bfloat16)
        heads = [x[:count] for x in (q, k, v, angles.cos(), angles.sin())]
        turned = triton_rotary_kv_write(*heads, *caches, batch, *weights)
        results.append((turned[:1], caches[0, :1], caches[1, :1]))
    for result in results[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(result, results[0], strict=True))


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_a_thread_has_equally_many_numbers_in_any_batch_whatever_the_cache(size: int) -> None:
    """Else a head's sum of squares would have another order: 16 bytes are 8 numbers of q and k, and 16 of a cache in 8
    bits."""
    for cache_bytes in (1, 2):
        held = set()
        for tokens in (1, 256, 257, 5000):
            knobs = rule((tokens, size, 1))
            numbers = knobs["heads"] * (size // 2) // (32 * warps_for(knobs, size // 2, cache_bytes))
            held.add(min(numbers, 16 // cache_bytes))
        assert len(held) == 1 and max(held) <= 8


COMPILE = """
from transect.ops.registry import get
from transect.ops.tools.compile import compile_kernel
kernel = next(each for each in get("rotary_kv_write").kernels() if each.name == "cache in fp8, many tokens")
print(compile_kernel(kernel, "sm_90", sass=False).assembly)
"""


def test_the_compiler_fuses_the_same_product_of_every_head() -> None:
    """Else a head would have other bits at another place in a program: of eight heads one had b sin fused, not a
    cos."""
    compiler = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=compiler)
    assert done.returncode == 0, done.stderr[-3000:]
    number = r"(%\w+)"
    products = dict(re.findall(rf"mul\.f32\s+{number}, %\w+, {number};", done.stdout))
    fused = re.findall(rf"fma\.rn\.f32\s+%\w+, {number}, {number}, {number};", done.stdout)
    turns = Counter((by, products[added]) for first, by, added in fused if first != by and added in products)
    heads, parts = 8, 2  # a thread has one plane of every head, of queries and of keys
    assert sorted(turns.values()) == [heads * parts] * 2, turns


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_token_has_the_same_bits_alone_and_among_many(dtype: torch.dtype) -> None:
    tokens, size = 400, 128
    q, k, v = (sample(tokens, 8, size, seed=seed).cuda().bfloat16() for seed in range(3))
    angles = sample(tokens, size // 2, seed=3).cuda()
    weights = {"q_weight": sample(size, seed=4).cuda().bfloat16(), "k_weight": sample(size, seed=5).cuda().bfloat16()}

    def written(count: int) -> tuple[torch.Tensor, ...]:
        caches = [torch.zeros(tokens // 16, 8, 16, size, device="cuda").to(dtype) for _ in range(2)]
        batch = PagedBatch(
            torch.arange(tokens // 16, device="cuda", dtype=torch.int32)[None],
            torch.tensor([0, count], device="cuda", dtype=torch.int32),
            torch.tensor([count], device="cuda", dtype=torch.int32),
            16,
        )
        own = (x[:count] for x in (q, k, v, angles.cos(), angles.sin()))
        turned = triton_rotary_kv_write(*own, *caches, batch, **weights)
        return turned, caches[0].float()[: count // 16], caches[1].float()[: count // 16]

    for few, many in zip(written(64), written(tokens), strict=True):
        assert torch.equal(few, many[: len(few)])
