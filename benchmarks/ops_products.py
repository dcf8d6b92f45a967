# ruff: noqa: B008, B023, E501  (every lambda is called before its loop goes on; tables of variants are one line each)
"""Matrix products and attention on one GPU: correctness on real shapes, then each variant beside its peers and its floor.

    python benchmarks/ops_products.py OUT_DIRECTORY [--sections matmul,rows,...] [--compile-workers 12]

Every variant of a section is first run once in worker processes, which fills Triton's cache in parallel. Times are of CUDA
graphs of several calls on inputs rotated past the L2 cache, the median over replays.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from transect.ops import flash_attention as fa
from transect.ops import int4_matmul as i4
from transect.ops import matmul as mm
from transect.ops import paged_attention as pa
from transect.ops import small_matmul as sm
from transect.ops.paged_batch import PagedBatch

COPY, READ, RATE = 4.28e12, 4.35e12, 790e12
DEVICE = "cuda"
Calls = list[Callable[[], Any]]


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) * scale


def measure(calls: Calls, replays: int = 15) -> tuple[float, float, float]:
    """Median, least and largest seconds of one call over replays of a graph of all of them."""
    for call in calls[:1]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) / 1e3 / len(calls) for start, end in events]
    return statistics.median(times), min(times), max(times)


class Section:
    """Runs variants, or in a worker only one call of every n-th."""

    def __init__(self, shard: tuple[int, int] | None) -> None:
        self.shard = shard
        self.count = 0
        self.rows: list[dict[str, Any]] = []

    def time(self, name: str, case: str, calls: Calls, floor: float, **more: Any) -> None:
        self.count += 1
        if self.shard is not None and (self.count % self.shard[1] != self.shard[0] or not name.startswith("ours")):
            return
        try:
            if self.shard is not None:
                calls[0]()
                torch.cuda.synchronize()
                return
            median, least, most = measure(calls)
        except Exception as error:  # a variant that does not fit the device is a result too
            if self.shard is None:
                self.rows.append({"case": case, "name": name, "error": str(error)[:200]})
            return
        row = {"case": case, "name": name, "us": median * 1e6, "min_us": least * 1e6, "max_us": most * 1e6}
        self.rows.append(row | {"floor_us": floor * 1e6, "of_floor": floor / median} | more)

    def check(self, case: str, ours: Callable[[], Any], peer: Callable[[], Any], exact: Callable[[], Any]) -> None:
        """Relative errors of ours and of torch's own against float64 (or float32 where that is said)."""
        if self.shard is not None:
            return
        try:
            want = exact().double()
            errors = [float((f().double() - want).norm() / want.norm()) for f in (ours, peer)]
        except Exception as error:
            self.rows.append({"case": case, "name": "error", "error": str(error)[:300]})
            return
        self.rows.append(
            {"case": case, "name": "numerics", "ours": errors[0], "torch": errors[1], "ratio": errors[0] / errors[1]}
        )


def copies(nbytes: int, least: int = 4, most: int = 24) -> int:
    """Input sets so that together they are well past the L2 cache (60 MB)."""
    if "--shard" in sys.argv:
        return 1
    return max(least, min(most, -(-250_000_000 // max(nbytes, 1))))


def matmul(s: Section) -> None:
    x, w = normal(777, 1000), normal(520, 1000, scale=0.03)
    g, r, b = normal(520, 1000, scale=0.03), normal(777, 520), normal(520)
    for name, kw in (
        ("plain", {}), ("gelu", {"bias": b, "activation": "gelu"}), ("tanh", {"bias": b, "activation": "gelu_tanh"}),
        ("gate", {"gate": g, "residual": r}),
    ):  # fmt: skip
        wide = {k: v.double() if torch.is_tensor(v) else v for k, v in kw.items()}
        for label, tiles in (
            ("default", None),
            ("tiles", mm.Tiles(64, 64, 32, warps=4)),
            ("persistent", mm.Tiles(128, 128, 64, persistent=True)),
            ("halves", mm.Tiles(128, 256, 64, persistent=True, halves=True)),
        ):
            s.check(
                f"numerics {name} {label}",
                lambda t=tiles, kw=kw: mm.matmul(x, w, **kw, tiles=t),
                lambda kw=kw: mm._peer(x, w, **kw),
                lambda kw=wide: mm.reference(x.double(), w.double(), **kw),
            )
    up = normal(777, 520)
    s.check("dX", lambda: mm.matmul(up, w.T), lambda: up @ w, lambda: up.double() @ w.double())
    s.check(
        "dW",
        lambda: mm.matmul(up.T[:, :776], x.T[:, :776]),
        lambda: up.T[:, :776] @ x[:776],
        lambda: up[:776].double().T @ x[:776].double(),
    )
    s.check("dW large", lambda: mm.matmul(up.T, x.T), lambda: up.T @ x, lambda: up.double().T @ x.double())
    x32, w32 = x.float(), w.float()
    s.check("float32", lambda: mm.matmul(x32, w32), lambda: x32 @ w32.T, lambda: x32.double() @ w32.double().T)
    for n in (4096, 8192):
        sets = [(normal(n, n), normal(n, n, scale=n**-0.5)) for _ in range(3)]
        floor = 2 * n**3 / RATE
        case = f"{n}x{n}x{n}"
        s.time("cublas", case, [lambda p=p: F.linear(*p) for p in sets], floor)
        s.time("ours default", case, [lambda p=p: mm.matmul(*p) for p in sets], floor)
        for bm, bn, bk, stages, warps, group, halves in (
            (128, 256, 64, 4, 8, 8, True), (128, 256, 64, 4, 8, 16, True), (128, 256, 64, 4, 8, 4, True),
            (128, 256, 64, 4, 8, 32, True), (256, 128, 64, 4, 8, 8, True), (128, 256, 64, 3, 8, 8, True),
        ):  # fmt: skip
            tiles = mm.Tiles(bm, bn, bk, group, warps, stages, True, False, halves)
            s.time(
                f"ours {bm}x{bn}x{bk} s{stages} w{warps} g{group} h{int(halves)}",
                case,
                [lambda p=p, t=tiles: mm.matmul(*p, tiles=t) for p in sets],
                floor,
            )
        for bm, bn, bk, stages, warps, group in (
            (128, 256, 64, 3, 8, 8),
            (128, 256, 64, 4, 8, 8),
            (128, 128, 64, 4, 4, 8),
            (128, 128, 64, 4, 8, 8),
        ):
            tiles = mm.Tiles(bm, bn, bk, group, warps, stages)
            s.time(
                f"ours grid {bm}x{bn}x{bk} s{stages} w{warps}",
                case,
                [lambda p=p, t=tiles: mm.matmul(*p, tiles=t) for p in sets],
                floor,
            )
        if n == 4096:
            s.time("cublas+gelu", case + " gelu", [lambda p=p: F.gelu(F.linear(*p)) for p in sets], floor)
            for bn, halves, stages in ((256, True, 3), (256, True, 4)):
                for activation in ("gelu", "gelu_tanh"):
                    tiles = mm.Tiles(128, bn, 64, 8, 8, stages, True, False, halves)
                    s.time(
                        f"ours {activation} 128x{bn} s{stages}",
                        case + " gelu",
                        [lambda p=p, t=tiles, a=activation: mm.matmul(*p, activation=a, tiles=t) for p in sets],
                        floor,
                    )
            merged = [(normal(n, n), normal(2 * 14336, n, scale=n**-0.5)) for _ in range(2)]
            gated = [(x, both[14336:], both[:14336]) for x, both in merged]
            floor = 4 * n * n * 14336 / RATE
            s.time(
                "cublas+silu*",
                "4096x14336x4096 gate",
                [lambda p=p: F.silu(F.linear(p[0], p[2])) * F.linear(p[0], p[1]) for p in gated],
                floor,
            )
            for bm, bn, stages, halves in ((128, 128, 3, False), (128, 128, 4, False), (128, 128, 4, True)):
                tiles = mm.Tiles(bm, bn, 64, 8, 8, stages, True, False, halves)
                s.time(
                    f"ours gate {bm}x{bn} s{stages} h{int(halves)}",
                    "4096x14336x4096 gate",
                    [lambda p=p, t=tiles: mm.matmul(p[0], p[1], gate=p[2], tiles=t) for p in gated],
                    floor,
                )


SHAPES = ((4096, 6144), (4096, 28672), (14336, 4096), (4096, 128256), (4096, 4096))
FEW = [
    sm.Cut(0, bn, bk, 1, warps, 3, early=early) for bn, bk, warps in ((4, 512, 2), (8, 256, 2), (16, 256, 4), (2, 2048, 4), (2, 1024, 2), (8, 512, 4)) for early in (False, True)
]  # fmt: skip
SOME = [
    sm.Cut(16, bn, bk, split, warps, stages, True, bulk, early)
    for bn, bk, split, warps, stages, bulk, early in (
        (64, 128, 1, 4, 4, False, True), (64, 128, 2, 4, 4, False, True), (64, 128, 4, 4, 4, False, True), (32, 256, 1, 4, 4, False, True),
        (64, 128, 1, 4, 6, True, True), (64, 128, 2, 4, 4, True, True), (64, 128, 4, 4, 4, True, True), (64, 128, 3, 4, 4, True, True), (64, 256, 2, 4, 3, True, True), (64, 128, 2, 4, 4, True, False),
        (128, 128, 4, 4, 3, True, True), (128, 64, 4, 4, 6, True, True), (128, 64, 8, 4, 4, True, True), (64, 128, 8, 4, 4, True, True),
    )
]  # fmt: skip
MANY = [
    (bm, bn, bk, split, warps, stages, swap, True, early)
    for bm, bn, bk, split, warps, stages, swap, early in (
        (64, 64, 128, 1, 4, 4, True, True), (64, 64, 128, 2, 4, 4, True, True), (64, 64, 128, 4, 4, 4, True, True), (64, 128, 64, 2, 4, 5, True, True), (64, 128, 64, 4, 4, 5, True, True),
        (64, 64, 128, 2, 4, 4, False, True), (64, 128, 64, 4, 4, 5, False, True), (64, 128, 128, 2, 4, 3, False, True), (64, 128, 64, 1, 4, 5, False, True),
        (128, 64, 128, 1, 4, 4, True, True), (128, 128, 64, 1, 8, 4, False, True), (128, 128, 64, 2, 8, 4, False, True), (128, 128, 64, 4, 8, 4, False, True), (128, 64, 64, 1, 4, 5, True, True), (128, 64, 64, 2, 4, 5, True, True),
        (128, 128, 64, 2, 4, 3, False, True), (128, 256, 64, 2, 8, 4, False, True), (128, 128, 64, 2, 8, 4, False, False),
        (256, 128, 64, 1, 8, 4, False, True), (256, 128, 64, 2, 8, 4, False, True), (256, 128, 64, 4, 8, 4, False, True), (256, 64, 64, 1, 8, 5, True, True), (256, 64, 64, 2, 8, 5, True, True), (128, 256, 64, 1, 8, 4, False, True), (256, 64, 64, 1, 4, 5, False, True), (256, 128, 64, 3, 8, 4, False, True),
    )
]  # fmt: skip


def rows(s: Section) -> None:
    ours = sm.launcher()
    for m in (1, 3, 16, 40, 200):
        x, w, b = normal(m, 1000), normal(520, 1000, scale=0.03), normal(520)
        s.check(
            f"numerics {m}",
            lambda x=x, w=w, b=b: ours(x, w, b),
            lambda x=x, w=w, b=b: F.linear(x, w, b),
            lambda x=x, w=w, b=b: F.linear(x.double(), w.double(), b.double()),
        )
    x, w = normal(16, 4096), normal(6144, 4096, scale=0.02)
    s.check(
        "numerics split 8",
        lambda: ours(x, w, cut=sm.Cut(16, 64, 128, 8, 4, 4)),
        lambda: F.linear(x, w),
        lambda: F.linear(x.double(), w.double()),
    )
    for k, n in SHAPES:
        for m in (1, 8, 16, 64, 128, 256):
            count = copies(n * k * 2)
            weights = [normal(n, k, scale=k**-0.5) for _ in range(count)]
            x = normal(m, k)
            floor = max((n * k + m * k + m * n) * 2 / COPY, 2 * m * n * k / RATE)
            case = f"rows {m} K {k} N {n}"
            s.time("cublas", case, [lambda w=w: F.linear(x, w) for w in weights], floor)
            s.time("ours default", case, [lambda w=w: ours(x, w) for w in weights], floor)
            cuts = FEW + SOME[5:7] if m == 1 else SOME if m <= 16 else [sm.Cut(*c) for c in MANY if c[0] <= max(64, m)]
            if s.shard is not None and (k, n) != (4096, 6144):
                cuts = cuts if k == 14336 else []
            for cut in cuts:
                if cut.split > 1 and n > 20000 and cut.split > 2:
                    continue
                label = f"ours {cut.bm}x{cut.bn}x{cut.bk} p{cut.split} w{cut.warps} s{cut.stages} {'swap' if cut.swap else ''} {'bulk' if cut.bulk else ''} {'early' if cut.early else ''}"
                s.time(label, case, [lambda w=w, c=cut: ours(x, w, cut=c) for w in weights], floor)


def int4(s: Section) -> None:
    ours = i4.launcher()

    def packed(n: int, k: int, group: int) -> tuple[torch.Tensor, ...]:
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
        scale = torch.rand(n, k // group, device=DEVICE).add(0.1).mul(k**-0.5 / 4).to(torch.bfloat16)
        scale = scale.T.contiguous().T
        return codes, scale, -7.5 * scale

    for m, group in ((1, 32), (5, 64), (17, 128), (100, 128)):
        x, q = normal(m, 1024), packed(520, 1024, group)
        s.check(
            f"numerics {m} group {group}",
            lambda x=x, q=q: ours(x, *q),
            lambda x=x, q=q: i4._peer(x, *q),
            lambda x=x, q=q: i4.reference(x.double(), q[0], q[1].double(), q[2].double()),
        )
    for k, n in SHAPES:
        for m, group in ((1, 128), (16, 128), (1, 32), (64, 128)):
            if group == 32 and n != 28672:
                continue
            count = copies(n * k // 2, most=40)
            weights = [packed(n, k, group) for _ in range(count)]
            x = normal(m, k)
            floor = max((n * k * (0.5 + 4 / group) + 2 * m * k + 2 * m * n) / COPY, 2 * m * n * k / RATE)
            case = f"rows {m} K {k} N {n} group {group}"
            dense = [normal(n, k, scale=k**-0.5) for _ in range(copies(n * k * 2))]
            s.time("cublas bf16 weights", case, [lambda w=w: F.linear(x, w) for w in dense], floor)
            del dense
            s.time("ours default", case, [lambda w=w: ours(x, *w) for w in weights], floor)
            bm = max(16, m)
            for bn, split, warps, stages, early in (
                (64, 1, 4, 4, True),
                (64, 2, 4, 4, True),
                (64, 4, 4, 4, True),
                (64, 4, 4, 3, True),
                (64, 4, 4, 5, True),
                (64, 8, 4, 3, True),
                (128, 4, 8, 4, True),
                (128, 8, 8, 4, True),
                (128, 2, 4, 4, True),
                (64, 2, 4, 4, False),
                (64, 2, 4, 6, True),
            ):
                cut = i4.Cut(bm, bn, 2 * group, split, warps, stages, early=early)
                if s.shard is not None and (k, n) not in ((4096, 6144), (4096, 28672)):
                    continue
                s.time(
                    f"ours n{bn} p{split} w{warps} s{stages} e{int(early)}",
                    case,
                    [lambda w=w, c=cut: ours(x, *w, cut=c) for w in weights],
                    floor,
                )


def attention(s: Section) -> None:
    heads, d = 16, 128
    for size, causal, window, kv in (
        (128, True, None, 4),
        (96, False, None, 16),
        (64, True, 100, 8),
        (128, False, 100, 2),
    ):
        cu = torch.tensor([0, 300, 301, 1000], dtype=torch.int32, device=DEVICE)
        q, k, v = normal(1000, 16, size), normal(1000, kv, size), normal(1000, kv, size)
        up = torch.randn(1000, 16, size, device=DEVICE).to(torch.bfloat16)
        args = (cu, size**-0.5, causal, window)
        s.check(
            f"forward d{size} {causal} {window} kv{kv}",
            lambda: fa.flash_attention(q, k, v, *args),
            lambda: fa._peer(q, k, v, *args),
            lambda: fa.reference(q.double(), k.double(), v.double(), *args),
        )

        def grads(
            f: Any, dtype: torch.dtype, which: int, tensors: Any = (q, k, v), up: Any = up, args: Any = args
        ) -> torch.Tensor:
            leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
            return torch.autograd.grad(f(*leaves, *args), leaves, up.to(dtype))[which]

        for which, label in enumerate(("dq", "dk", "dv")):
            s.check(
                f"{label} d{size} {causal} {window} kv{kv}",
                lambda w=which: grads(fa.flash_attention_autograd, torch.bfloat16, w),
                lambda w=which: grads(fa._peer, torch.bfloat16, w),
                lambda w=which: grads(fa.reference, torch.float64, w),
            )
    for batch, length in ((4, 4096), (1, 16384)):
        tokens = batch * length
        cu = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32) * length
        q, k, v, up = (normal(tokens, heads, d) for _ in range(4))
        dense = [t.view(batch, length, heads, d).transpose(1, 2) for t in (q, k, v)]
        for causal in (True, False):
            flops = 4 * batch * length * length * heads * d * (0.5 if causal else 1)
            case = f"forward S {length} causal {causal}"
            floor = flops / RATE
            for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash2", SDPBackend.FLASH_ATTENTION)):

                def call(backend: Any = backend, causal: bool = causal, dense: Any = dense) -> Any:
                    with sdpa_kernel(backend):
                        return F.scaled_dot_product_attention(*dense, is_causal=causal)

                s.time(name, case, [call] * 2, floor, tflops=True)
            for bm, bn, warps, stages, bulk in ((128, 128, 8, 3, True), (64, 64, 4, 3, True)):
                tiles = fa.Tiles(bm, bn, warps, stages, bulk)
                s.time(
                    f"ours {bm}x{bn} w{warps} s{stages} b{int(bulk)}",
                    case,
                    [lambda t=tiles, c=causal: fa.forward(q, k, v, cu, d**-0.5, c, tiles=t)] * 2,
                    floor,
                    tflops=True,
                )
            s.time("ours default", case, [lambda c=causal: fa.forward(q, k, v, cu, d**-0.5, c)] * 2, floor)
            case = f"backward S {length} causal {causal}"
            floor = 2.5 * flops / RATE
            for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash2", SDPBackend.FLASH_ATTENTION)):
                if s.shard is not None:
                    continue
                try:
                    leaves = [t.detach().requires_grad_() for t in dense]
                    with sdpa_kernel(backend):
                        out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
                    upstream = up.view(batch, length, heads, d).transpose(1, 2)

                    def back(out: Any = out, leaves: Any = leaves, upstream: Any = upstream) -> Any:
                        return torch.autograd.grad(out, leaves, upstream, retain_graph=True)

                    events(s, name, case, back, floor)
                except Exception as error:
                    s.rows.append({"case": case, "name": name, "error": str(error)[:200]})
            out, lse = fa.forward(q, k, v, cu, d**-0.5, causal)
            s.time(
                "ours default",
                case,
                [lambda c=causal, o=out, e=lse: fa.backward(up, q, k, v, o, e, cu, d**-0.5, c)],
                floor,
            )
            for queries in ((128, 64, 8, 3), (64, 64, 4, 1)):
                s.time(
                    f"ours keys (64, 64, 4, 1) queries {queries}",
                    case,
                    [
                        lambda c=causal, b=fa.Tiles(*queries, True), o=out, e=lse: fa.backward(
                            up, q, k, v, o, e, cu, d**-0.5, c, keys=fa.Tiles(64, 64, 4, 1, True), queries=b
                        )
                    ],
                    floor,
                )


def events(s: Section, name: str, case: str, call: Callable[[], Any], floor: float) -> None:
    """Time without a graph: autograd of a library's operator."""
    for _ in range(3):
        call()
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    median = statistics.median(times)
    s.rows.append(
        {
            "case": case,
            "name": name,
            "us": median,
            "min_us": min(times),
            "max_us": max(times),
            "floor_us": floor * 1e6,
            "of_floor": floor * 1e6 / median,
            "tflops": True,
        }
    )


def pages(lengths: list[int], new: list[int], blocks: int, block_size: int = 16) -> PagedBatch:
    widest = -(-max(lengths) // block_size)
    table = torch.randperm(blocks)[: widest * len(lengths)].view(len(lengths), widest).to(torch.int32)
    starts = torch.tensor([0, *new]).cumsum(0, dtype=torch.int32)
    return PagedBatch(
        table.to(DEVICE), starts.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE), block_size
    )


def paged(s: Section) -> None:
    cache = [normal(4096, 8, 16, 128) for _ in range(2)]
    batch = pages([1000, 3, 517, 64, 1, 700], [1, 3, 300, 1, 1, 64], 4096)
    q = normal(370, 32, 128)
    for window in (None, 100):
        for label, op in (
            ("default", pa.PagedTriton()),
            ("split 1024", pa.PagedTriton(pa.Tiles(split=1024))),
            ("split 256", pa.PagedTriton(pa.Tiles(split=256))),
        ):
            s.check(
                f"numerics {label} window {window}",
                lambda o=op, w=window: o(q, *cache, batch, 0.09, w),
                lambda w=window: pa.reference(q.float(), *cache, batch, 0.09, w).to(torch.bfloat16),
                lambda w=window: pa.reference(q.double(), *(c.double() for c in cache), batch, 0.09, w),
            )
    kv_bytes = 2 * 8 * 128 * 2
    for context, rows_ in product((512, 1024, 4096, 32768), (1, 8, 32, 64, 128, 256)):
        nbytes = rows_ * context * kv_bytes
        if not 16e6 < nbytes < 6e9:
            continue
        if s.shard is not None and (context, rows_) != (4096, 8):
            continue
        sets = max(1, min(8, -(-300_000_000 // nbytes)))
        blocks = rows_ * context // 16
        caches = [(normal(blocks, 8, 16, 128), normal(blocks, 8, 16, 128)) for _ in range(sets)]
        batch = pages([context] * rows_, [1] * rows_, blocks)
        q = normal(rows_, 32, 128)
        floor = (nbytes + 2 * q.nbytes) / COPY
        case = f"decode rows {rows_} context {context} MB {nbytes // 1000000}"
        s.time("ours default", case, [lambda c=c: pa.PagedTriton()(q, *c, batch, 0.09) for c in caches], floor)
        for bn, warps, stages, split in (
            (64, 4, 3, 0),
            (64, 4, 4, 0),
            (32, 2, 6, 0),
            (64, 4, 3, 256),
            (64, 4, 4, 512),
            (32, 4, 5, 128),
            (64, 2, 5, 0),
        ):
            tiles = pa.Tiles(decode_bn=bn, decode_warps=warps, decode_stages=stages, split=split)
            s.time(
                f"ours n{bn} w{warps} s{stages} split {split}",
                case,
                [lambda c=c, t=tiles: pa.PagedTriton(t)(q, *c, batch, 0.09) for c in caches],
                floor,
            )
        if s.shard is None and context == 4096 and rows_ in (8, 64):
            from torch.nn.attention.flex_attention import flex_attention  # noqa: F401

            k = caches[0][0].view(rows_, -1, 8, 16, 128).transpose(1, 2).reshape(rows_, 8, context, 128)
            v = caches[0][1].view(rows_, -1, 8, 16, 128).transpose(1, 2).reshape(rows_, 8, context, 128)
            qd = q.view(rows_, 32, 1, 128)
            for name, backend in (
                ("flash2 dense", SDPBackend.FLASH_ATTENTION),
                ("cudnn dense", SDPBackend.CUDNN_ATTENTION),
            ):

                def call(backend: Any = backend, k: Any = k, v: Any = v, qd: Any = qd) -> Any:
                    with sdpa_kernel(backend):
                        return F.scaled_dot_product_attention(qd, k, v, enable_gqa=True)

                s.time(name, case, [call] * 2, floor)
        del caches
    for new, context in ((2048, 2048), (512, 8192)):
        caches = [normal(context * 4 // 16, 8, 16, 128) for _ in range(2)]
        batch = pages([context] * 4, [new] * 4, context * 4 // 16)
        q = normal(4 * new, 32, 128)
        pairs = 4 * (new * (context - new) + new * (new + 1) // 2)
        floor = 4 * pairs * 32 * 128 / RATE
        for bm, bn, warps, stages in (
            (64, 64, 4, 3),
            (128, 64, 8, 3),
            (128, 64, 4, 3),
            (128, 128, 8, 2),
            (64, 128, 4, 2),
        ):
            tiles = pa.Tiles(bm=bm, bn=bn, warps=warps, stages=stages)
            s.time(
                f"ours {bm}x{bn} w{warps} s{stages}",
                f"prefill {new} of {context} x4",
                [lambda t=tiles, c=caches, b=batch, q=q: pa.PagedTriton(t)(q, *c, b, 0.09)] * 2,
                floor,
            )


SECTIONS = {"matmul": matmul, "rows": rows, "int4": int4, "attention": attention, "paged": paged}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--shard", default="")
    parser.add_argument("--compile-workers", type=int, default=14)
    options = parser.parse_args()
    names = options.sections.split(",")
    torch.manual_seed(0)
    if options.shard:
        index, count = map(int, options.shard.split("/"))
        for name in names:
            SECTIONS[name](Section((index, count)))
        return
    begun = time.time()
    workers = [
        subprocess.Popen(
            [
                sys.executable,
                __file__,
                options.out,
                "--sections",
                options.sections,
                "--shard",
                f"{i}/{options.compile_workers}",
            ],
            stderr=subprocess.DEVNULL,
        )
        for i in range(options.compile_workers)
    ]
    for worker in workers:
        worker.wait()
    print(f"compiled in {time.time() - begun:.0f} s", flush=True)
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "sections": {}}
    for name in names:
        section = Section(None)
        begun = time.time()
        try:
            SECTIONS[name](section)
        except Exception as error:
            section.rows.append({"case": "section", "name": "error", "error": repr(error)[:500]})
        results["sections"][name] = section.rows
        print(f"{name}: {time.time() - begun:.0f} s", flush=True)
        Path(options.out, "products.json").write_text(json.dumps(results, indent=1))
    for name, found in results["sections"].items():
        by_case: dict[str, list[dict[str, Any]]] = {}
        for row in found:
            by_case.setdefault(row["case"], []).append(row)
        for case, entries in by_case.items():
            best = sorted((e for e in entries if "us" in e and e["name"].startswith("ours")), key=lambda e: e["us"])[:2]
            others = [e for e in entries if "us" in e and not e["name"].startswith("ours")]
            errors = [e for e in entries if "us" not in e]
            if best or others:
                print(
                    name,
                    case,
                    " | ".join(f"{e['name']} {e['us']:.1f} ({e['of_floor']:.2f})" for e in best + others),
                    flush=True,
                )
            for e in errors:
                if e["name"] == "numerics" and e["ratio"] <= 1.3:
                    continue
                print(
                    "  ",
                    case,
                    e["name"],
                    e.get("ratio", ""),
                    e.get("ours", ""),
                    e.get("error", "")[:90].replace("\n", " "),
                )


if __name__ == "__main__":
    main()
