"""Attention in spans of positions: the values, and on a GPU the same bits in a prompt, a chunk of it, and as decode
rows, of any cache, with and without room for the parts of all rows."""

import os
import re
import subprocess
import sys

import pytest
import torch

from transect.ops.attention.paged import decode_spans, dispatch
from transect.ops.attention.paged.batch import PagedBatch
from transect.ops.attention.paged.cache_codes import encode
from transect.ops.attention.paged.paged_attention import reference
from transect.ops.lang.jit import INTERPRETED

BLOCK = 16


class Sequence:
    """One sequence in a cache, whose tokens are asked for in pieces ``(first, last)``, each a row of a batch."""

    def __init__(self, length, kv_heads, group, d, device, dtype, cache=None, **scores):
        generator = torch.Generator(device).manual_seed(0)
        blocks = -(-length // BLOCK) + 2
        shape = (blocks, kv_heads, BLOCK, d)
        self.caches = [torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(2)]
        if cache == torch.int8:
            self.caches = [encode(each) for each in self.caches]
        elif cache is not None:
            self.caches = [each.to(cache) for each in self.caches]
        self.q = torch.randn(length, kv_heads * group, d, device=device, generator=generator).to(dtype)
        self.table = torch.randperm(blocks, device=device, generator=generator)[: blocks - 2].to(torch.int32)
        self.scale, self.scores = d**-0.5, scores

    def attend(self, call, rows):
        counts = torch.tensor([0, *(last - first for first, last in rows)], device=self.q.device)
        lengths = torch.tensor([last for _, last in rows], dtype=torch.int32, device=self.q.device)
        tables = self.table.expand(len(rows), -1).contiguous()
        batch = PagedBatch(tables, counts.cumsum(0, dtype=torch.int32), lengths, BLOCK)
        q = torch.cat([self.q[first:last] for first, last in rows])
        return call(q, *self.caches, batch, self.scale, **self.scores)

    def wanted(self, whole, rows):
        return torch.cat([whole[first:last] for first, last in rows])


MIXED = [(60, 64), (69, 70), (0, 3), (16, 17), (31, 32), (50, 51)]
SINGLES = [(position, position + 1) for position in (0, 15, 16, 31, 32, 63, 64, 69)]
SCORES = {"plain": {}, "window": {"window": 20}, "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}}


@pytest.mark.parametrize("name", SCORES)
def test_values_in_prompts_chunks_and_decode_rows(name):
    """More spans than the interpreter has room for, so some rows are summed by one program each."""
    device = "cpu" if INTERPRETED else "cuda"
    scores = {key: each.to(device) if key == "sinks" else each for key, each in SCORES[name].items()}
    sequence = Sequence(70, 2, 2, 16, device, torch.float32, **scores)
    call = dispatch.uniform()
    whole = sequence.attend(reference, [(0, 70)])
    for rows in ([(0, 70)], MIXED, SINGLES):
        torch.testing.assert_close(sequence.attend(call, rows), sequence.wanted(whole, rows), rtol=2e-5, atol=2e-6)


COMPILE = """
from transect.ops.attention.paged import decode_spans, prefill
from transect.ops.tools.compile import compile_kernel
for kernel in (*decode_spans.kernels(), *prefill.kernels()):
    if "in spans" in kernel.name and "sm_120" in kernel.targets:
        print(compile_kernel(kernel, "sm_120", sass=False).stages["ttgir"])
"""


def test_warps_do_not_share_the_columns_of_a_tile_where_products_are_of_single_warps():
    """Else the warps of a decode row would add weights of positions in another order than those of a prompt."""
    compiler = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=compiler)
    assert done.returncode == 0, done.stderr[-3000:]
    across = re.findall(r"nvidia_mma<.*warpsPerCTA = \[\d+, (\d+)\]", done.stdout)
    assert len(across) >= 3 and set(across) == {"1"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(("kv_heads", "group", "d"), [(8, 4, 128), (4, 7, 128), (2, 2, 64), (2, 16, 128)])
@pytest.mark.parametrize(("window", "load"), [(None, "uniform"), (300, "uniform"), (None, "uniform_on_hopper")])
def test_bits_are_those_of_the_whole_prompt(monkeypatch, window, load, kv_heads, group, d, cache):
    sequence = Sequence(1500, kv_heads, group, d, "cuda", torch.bfloat16, cache, window=window)
    call = getattr(dispatch, load)()
    whole = sequence.attend(dispatch.uniform(), [(0, 1500)])
    exact = sequence.attend(reference, [(0, 1500)])
    assert (whole.double() - exact.double()).norm() < 0.02 * exact.double().norm()
    singles = [(at, at + 1) for at in (0, 15, 63, 64, 255, 256, 257, 511, 700, 1023, 1024, 1499)]
    many = [(at, at + 1) for at in range(0, 1500, 3)]  # a sum in another order changes few results in bfloat16
    chunks = [[(0, 1)], [(0, 333)], [(333, 1500)], [(700, 933), (1499, 1500), (5, 6)], singles, many]
    for room in (decode_spans.PagedSpans.ROOM, 8):
        monkeypatch.setattr(decode_spans, "ROOM", room)
        monkeypatch.setattr(decode_spans.PagedSpans, "ROOM", room)
        for rows in chunks:
            assert torch.equal(sequence.attend(call, rows), sequence.wanted(whole, rows)), (room, rows[:3])
