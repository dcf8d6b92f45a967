"""The C++ kernels on every instruction set: exact weights, results that do not depend on the batch, clean refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transect.formats.ggml_blocks import QuantizedTensor
from transect.formats.ggml_k_types import K_TYPES
from transect.formats.ggml_quantize import quantize
from transect.hardware.host_memory import ALIGNMENT, HUGE_PAGE
from transect.ops.cpu import build, packing
from transect.ops.cpu.library import Kind, Library, PackedWeight, empty_cache, load
from transect.ops.registry import Unavailable
from transect.spec.numbers.gguf import BLOCK_TYPES

QUANTIZED = {
    Kind.Q4_HALF: (4, 32, True),
    Kind.Q4_FLOAT: (4, 32, False),
    Kind.Q8_HALF: (8, 32, True),
    Kind.Q8_FLOAT: (8, 32, False),
    Kind.Q8_FLOAT_G16: (8, 16, False),
}
BLOCKS = tuple(kind for kind in Kind if kind.name in BLOCK_TYPES and kind > Kind.F32)


def _random_weight(
    library: Library, kind: Kind, n: int, k: int, bias: bool = False
) -> tuple[PackedWeight, torch.Tensor]:
    """A packed matrix and the float32 matrix that it stands for."""
    b = torch.randn(n) if bias else None
    if kind in QUANTIZED:
        bits, group, half = QUANTIZED[kind]
        codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
        scale, zero = torch.rand(n, k // group) * 0.1, torch.randn(n, k // group) * 0.1
        if half:
            scale, zero = scale.half().float(), zero.half().float()
        dense = (
            codes.double() * scale.double().repeat_interleave(group, 1) + zero.double().repeat_interleave(group, 1)
        ).float()
        return PackedWeight(kind, n, k, library.pack_affine(kind, codes, scale, zero), b), dense
    if kind in BLOCKS:
        made = BLOCK_TYPES[kind.name]
        blocks = torch.randint(0, 256, (n, k // made.block, made.nbytes), dtype=torch.uint8).numpy()
        for at in made.halves:
            blocks[..., at : at + 2] = (torch.rand(n, k // made.block, 1) / 64).half().numpy().view(np.uint8)
        tensor = QuantizedTensor(kind.name, (n, k), blocks.reshape(n, -1))
        return replace(packing.pack(library, tensor), bias=b), torch.from_numpy(tensor.dequantize())
    if kind == Kind.FP8:
        codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
        codes[codes & 0x7F == 0x7F] = 1  # NaN; 1 is below the normal range
        scale = torch.rand(n, k // 32) / 64
        dense = codes.view(torch.float8_e4m3fn).float() * scale.repeat_interleave(32, 1)
        return replace(packing.pack_fp8(library, codes, scale), bias=b), dense
    dense = torch.randn(n, k).to(torch.bfloat16 if kind == Kind.BF16 else torch.float32)
    got, data = library.pack_dense(dense)
    assert got == kind
    return PackedWeight(kind, n, k, data, b), dense.float()


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize(("n", "k"), [(1, 32), (40, 64), (576, 576), (100, 1536)])
def test_linear_against_float64_and_bitwise_in_any_batch(library: Library, kind: Kind, n: int, k: int) -> None:
    torch.manual_seed(n * k)
    k = -(-k // 256) * 256 if kind.name.endswith("_K") else k
    weight, dense = _random_weight(library, kind, n, k, bias=n > 40)
    rows = library.rows(weight, torch.arange(n))
    if library.isa == "plain":  # without a fused multiply-add the weight is rounded twice
        torch.testing.assert_close(rows, dense, rtol=3e-7, atol=3e-7)
    else:
        assert torch.equal(rows, dense)
    x = torch.randn(70, k)
    whole = library.linear(x, weight)
    exact = x.double() @ dense.double().T + (weight.bias.double() if weight.bias is not None else 0)
    torch_error = (x @ dense.T + (weight.bias if weight.bias is not None else 0) - exact).norm() / exact.norm()
    assert (whole - exact).norm() / exact.norm() <= max(
        8 * torch_error, 2e-6
    )  # one chain sums longer than torch's tree
    for m in (0, 1, 2, 3, 5, 8, 15, 33, 41):
        assert torch.equal(library.linear(x[:m], weight), whole[:m]), m
    assert torch.equal(library.linear(x[7:8], weight), whole[7:8])


def test_threads_do_not_change_the_bits() -> None:
    try:
        one, three = load(1), load(3)
    except Unavailable as reason:
        pytest.skip(str(reason))
    torch.manual_seed(0)
    weight, _ = _random_weight(one, Kind.Q4_HALF, 200, 96)
    x = torch.randn(50, 96)
    assert torch.equal(one.linear(x, weight), three.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(9, 3, 64, None), (4, 4, 32, 17), (16, 1, 128, None), (8, 2, 96, 40), (2, 1, 16, 300)],
)
def test_paged_attention_reads_only_its_own_slots(
    library: Library, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    torch.manual_seed(0)
    lengths = [(1, 1), (1, 700), (37, 37), (20, 300), (1, 129), (5, 128)]  # (queries, tokens so far) of each row
    k, v = empty_cache((200, kv_heads, 16, dim), dtype)
    k.fill_(math.nan)
    v.fill_(math.nan)
    tables = torch.full((len(lengths), 64), 10**9, dtype=torch.int32)
    free = torch.randperm(200).tolist()
    keys, values = [], []
    for b, (_, n) in enumerate(lengths):
        keys.append(torch.randn(n, kv_heads, dim).to(dtype))
        values.append(torch.randn(n, kv_heads, dim).to(dtype))
        for i in range(0, n, 16):
            tables[b, i // 16] = block = free.pop()
            count = min(16, n - i)
            k[block, :, :count] = keys[b][i : i + 16].transpose(0, 1)
            v[block, :, :count] = values[b][i : i + 16].transpose(0, 1)
    queries = [torch.randn(q, heads, dim) for q, _ in lengths]
    starts = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).int()
    totals = torch.tensor([n for _, n in lengths], dtype=torch.int32)
    out = library.paged_attention(torch.cat(queries), k, v, tables, starts, totals, dim**-0.5, window)
    for b, (q, n) in enumerate(lengths):
        mine = out[starts[b] : starts[b + 1]]
        key, value = (t[b].double().repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for t in (keys, values))
        scores = torch.einsum("qhd,hkd->hqk", queries[b].double(), key) * dim**-0.5
        at, j = torch.arange(n - q, n)[:, None], torch.arange(n)[None]
        hidden = (j > at) if window is None else (j > at) | (j <= at - window)
        exact = torch.einsum("hqk,hkd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), value)
        torch.testing.assert_close(mine.double(), exact, rtol=0, atol=2e-5)
        alone = library.paged_attention(
            queries[b],
            k,
            v,
            tables[b : b + 1],
            torch.tensor([0, q], dtype=torch.int32),
            totals[b : b + 1],
            dim**-0.5,
            window,
        )
        assert torch.equal(alone, mine)
        last = library.paged_attention(
            queries[b][-1:],
            k,
            v,
            tables[b : b + 1],
            torch.tensor([0, 1], dtype=torch.int32),
            totals[b : b + 1],
            dim**-0.5,
            window,
        )
        assert torch.equal(last, mine[-1:])


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("queries", [1, 5, 17])
def test_tiles_of_a_deep_chunk_are_shared_without_changing_the_bits(window: int | None, queries: int) -> None:
    """Tiles are cut apart on several threads; the results merge in their order."""
    try:
        teams = [load(threads) for threads in (1, 2, 5)]
    except Unavailable as reason:
        pytest.skip(str(reason))
    torch.manual_seed(queries)
    lengths = [(1, 90), (queries, 2500), (2, 130)]
    k, v = empty_cache((200, 3, 16, 64), torch.bfloat16)
    k.normal_()
    v.normal_()
    tables = torch.randperm(200, dtype=torch.int32)[:160].expand(3, 160).contiguous()
    starts = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).int()
    totals = torch.tensor([n for _, n in lengths], dtype=torch.int32)
    q = torch.randn(int(starts[-1]), 9, 64)
    found = [team.paged_attention(q, k, v, tables, starts, totals, 0.125, window) for team in teams]
    assert all(torch.equal(each, found[0]) for each in found[1:])
    second = (q[2:3], k, v, tables[1:2], torch.tensor([0, 1]).int(), totals[1:2] - queries + 2)
    lone = [team.paged_attention(*second, 0.125, window) for team in teams]
    assert queries == 1 or all(torch.equal(each[0], found[0][2]) for each in lone)


def test_every_number_of_fp8_is_read_from_a_cache(library: Library) -> None:
    """Also those below the normal range, zeros of both signs and NaN, which infects what reads it."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    k, v = (cache.zero_() for cache in empty_cache((1, 1, 16, 256), torch.float8_e4m3fn))
    v[0, 0, 0] = codes
    one = torch.tensor([1], dtype=torch.int32)
    read = partial(library.paged_attention, torch.ones(1, 1, 256), block_tables=torch.zeros(1, 1, dtype=torch.int32),
                   query_starts=torch.tensor([0, 1], dtype=torch.int32), seq_lens=one, scale=1.0)  # fmt: skip
    torch.testing.assert_close(read(k_cache=k, v_cache=v)[0, 0], codes.float(), rtol=0, atol=0, equal_nan=True)
    k[0, 0, 0, 3] = math.nan
    assert read(k_cache=k, v_cache=v.zero_()).isnan().all()


def test_scales_of_fp8_that_overflow_are_refused(library: Library) -> None:
    codes = torch.ones(16, 32, dtype=torch.uint8)
    packing.pack_fp8(library, codes, torch.full((16, 1), 255.0))
    with pytest.raises(ValueError, match=r"below 256.*has 256; use native=False"):
        packing.pack_fp8(library, codes, torch.full((16, 1), 256.0))


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *K_TYPES, "F16", "BF16", "F32"])
def test_packing_keeps_every_value_of_a_gguf_tensor(library: Library, type_name: str) -> None:
    tensor = quantize(np.random.default_rng(1).standard_normal((48, 256)).astype(np.float32), type_name)
    packed = packing.pack(library, tensor)
    got = library.rows(packed, torch.arange(48))
    expected = torch.from_numpy(tensor.dequantize())
    if library.isa == "plain":
        torch.testing.assert_close(got, expected, rtol=3e-7, atol=3e-7)
    else:
        assert torch.equal(got, expected)


@settings(max_examples=30)
@given(st.data())
def test_packed_file_round_trip_and_damage(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    try:
        library = load(1)
    except Unavailable as reason:
        pytest.skip(str(reason))
    path = tmp_path_factory.mktemp("packed") / "model.pack"
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=4))
    weights = {f"w{i}": _random_weight(library, Kind.Q4_HALF, n, 32 * g)[0] for i, (n, g) in enumerate(shapes)}
    packing.write_packed(path, weights)
    back = packing.read_packed(path, weights)
    assert back is not None
    for name, weight in weights.items():
        assert (back[name].kind, back[name].n, back[name].k) == (weight.kind, weight.n, weight.k)
        assert torch.equal(back[name].data, weight.data)
        assert back[name].data.data_ptr() % 64 == 0
    assert packing.read_packed(path, ["other"]) is None
    whole = path.read_bytes()
    path.write_bytes(whole[:20] + b"\xff" + whole[21:])
    assert packing.read_packed(path, weights) is None
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert packing.read_packed(path, weights) is None


def test_the_products_of_every_kind_are_compiled_once() -> None:
    assert sorted(", ".join(build.TOGETHER).split(", ")) == sorted(kind.name for kind in Kind)


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"no C\+\+ compiler found.*install"):
        build.library_path()


def test_nothing_is_compiled_where_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    with pytest.raises(Unavailable, match="not compiled yet"):
        build.library_path(build=False)


def test_a_broken_compiler_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo fake 1 && exit 0\necho 'x.cpp: error: no such header' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(Unavailable, match=r"could not compile.*no such header"):
        build.library_path()
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_users_flags_come_last_and_make_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> "{tmp_path}/calls"\necho fake 1\nfor last; do true; done\n'
        '[ "$last" = --version ] || : > "$last"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path / "cache"))
    plain = build.library_path()
    (tmp_path / "calls").unlink()
    monkeypatch.setenv("TRANSECT_CXXFLAGS", "-g -fsanitize=address")
    assert build.library_path() != plain
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines() if line != "--version"]
    assert calls and all("-O3" in call[: call.index("-g")] and "-fsanitize=address" in call for call in calls)


def test_refusals_name_what_to_change() -> None:
    with pytest.raises(ValueError, match="multiples of 16, got 8 and 64; use block_size=16"):
        empty_cache((4, 2, 8, 64), torch.float32)
    with pytest.raises(ValueError, match="bfloat16, float32 or fp8"):
        empty_cache((4, 2, 16, 64), torch.float16)
    try:
        library = load(1)
    except Unavailable as reason:
        pytest.skip(str(reason))
    weight, _ = _random_weight(library, Kind.F32, 4, 32)
    with pytest.raises(ValueError, match=r"x must be \[rows, 32\]"):
        library.linear(torch.zeros(2, 31), weight)
    with pytest.raises(ValueError, match=r"row numbers must be in 0\.\.3"):
        library.rows(weight, torch.tensor([4]))


def test_a_large_matrix_in_huge_pages_has_the_same_numbers(library: Library) -> None:
    weight = torch.randn(512, 8192)
    kind, data = library.pack_dense(weight)
    assert data.numel() >= 8 * HUGE_PAGE and data.data_ptr() % ALIGNMENT == 0
    index = torch.tensor([0, 17, 511])
    assert torch.equal(library.rows(PackedWeight(kind, 512, 8192, data), index), weight[index])
