# ruff: noqa: B023  (every lambda is called before its loop goes on)
"""The CUDA C++ kernels and the fused loss on one GPU: errors against float64, times beside peers, peak memory.

    python benchmarks/ops_ladder.py OUT_DIRECTORY

Writes ladder.json and linear_cross_entropy.json.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from transect.ops import linear_cross_entropy as ce
from transect.ops.cuda import launcher


def seconds(call: Callable[[], Any], repeats: int = 10) -> list[float]:
    """Times of single calls by device events, after two to warm up."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return times


def row(name: str, case: str, times: list[float], work: float, unit: str, **more: Any) -> dict[str, Any]:
    median = statistics.median(times)
    found = {"name": name, "case": case, "us": median * 1e6, "min_us": min(times) * 1e6, "max_us": max(times) * 1e6}
    found |= {unit: work / median / 1e12} | more
    print(found, flush=True)
    return found


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want).norm() / want.norm())


def ladder() -> list[dict[str, Any]]:
    rows = []
    for n in (4096, 3620):
        a, b = torch.randn(n, n, device="cuda"), torch.randn(n, n, device="cuda")
        want = a.double() @ b.double()
        flops = 2 * n**3
        case = f"float32 {n}x{n}x{n}"
        multiply = launcher("matmul", "transect_matmul_float")
        for rung, name in ((1, "naive"), (2, "coalesced"), (3, "shared tiles"), (4, "register tiles")):
            c = torch.full((n, n), float("nan"), device="cuda")
            times = seconds(lambda r=rung, c=c, a=a, b=b, n=n: multiply(r, a, b, c, n, n, n), 5 if rung < 3 else 20)
            rows.append(row(f"rung {rung} {name}", case, times, flops, "tflops", error=error(c, want)))
        times = seconds(lambda a=a, b=b: a @ b, 20)
        rows.append(row("cublas float32", case, times, flops, "tflops", error=error(a @ b, want)))
        if n == 4096:
            x, y = a.bfloat16(), b.bfloat16()
            want = x.double() @ y.double()
            tensor = launcher("matmul", "transect_matmul_bfloat16")
            c = torch.full((n, n), float("nan"), device="cuda")
            times = seconds(lambda c=c, x=x, y=y, n=n: tensor(x, y, c, n, n, n), 20)
            rows.append(row("rung 5 tensor cores", f"bfloat16 {n}", times, flops, "tflops", error=error(c, want)))
            times = seconds(lambda x=x, y=y: x @ y, 20)
            rows.append(row("cublas bfloat16", f"bfloat16 {n}", times, flops, "tflops", error=error(x @ y, want)))
        else:
            p, q = a.cpu(), b.cpu()
            p @ q
            begun = time.perf_counter()
            p @ q
            rows.append(row("cpu blas", case, [time.perf_counter() - begun], flops, "tflops"))
    odd_a, odd_b = torch.randn(333, 100, device="cuda"), torch.randn(100, 204, device="cuda")
    for rung in (1, 2, 3, 4):
        c = torch.full((333, 204), float("nan"), device="cuda")
        launcher("matmul", "transect_matmul_float")(rung, odd_a, odd_b, c, 333, 204, 100)
        found = error(c, odd_a.double() @ odd_b.double())
        rows.append({"name": f"rung {rung}", "case": "float32 333x204x100", "error": found})
    n = 64 * 1024 * 1024
    a, b, c = (torch.randn(n, device="cuda") for _ in range(3))
    add = launcher("vector_add", "transect_vector_add")
    times = seconds(lambda: add(a, b, c, n), 20)
    wrong = float((c - (a + b)).abs().max())
    rows.append(row("vector add", "256 MB a vector", times, 12 * n, "terabytes_per_second", error=wrong))
    parts, out = torch.empty(1024, device="cuda"), torch.empty(1, device="cuda")
    add_up = launcher("sum", "transect_sum")
    times = seconds(lambda: add_up(a, parts, out, n, 1024), 20)
    off = abs(float(out) - float(a.double().sum())) / float(a.double().norm())
    rows.append(row("sum", "256 MB", times, 4 * n, "terabytes_per_second", error=off))
    rows.append(row("torch sum", "256 MB", seconds(lambda: a.sum(), 20), 4 * n, "terabytes_per_second"))
    x, g = torch.randn(2 * n, device="cuda").bfloat16(), torch.randn(2 * n, device="cuda").bfloat16()
    y = torch.empty_like(x)
    small = slice(0, 1 << 20)
    for tanh in (0, 1):
        form = "tanh" if tanh else "none"
        forward, backward = launcher("gelu", "transect_gelu"), launcher("gelu", "transect_gelu_gradient")
        times = seconds(lambda t=tanh, f=forward: f(x, y, 2 * n, t), 20)
        want = F.gelu(x[small].double(), approximate=form)
        rows.append(row(f"gelu {form}", "256 MB", times, 8 * n, "terabytes_per_second", error=error(y[small], want)))
        times = seconds(lambda f=form: F.gelu(x, approximate=f), 20)
        rows.append(row(f"torch gelu {form}", "256 MB", times, 8 * n, "terabytes_per_second"))
        times = seconds(lambda t=tanh, f=backward: f(g, x, y, 2 * n, t), 20)
        leaf = x[small].double().requires_grad_()
        (want,) = torch.autograd.grad(F.gelu(leaf, approximate=form), leaf, g[small].double())
        rows.append(
            row(f"gelu gradient {form}", "256 MB", times, 12 * n, "terabytes_per_second", error=error(y[small], want))
        )
    return rows


def losses() -> list[dict[str, Any]]:
    rows = []
    tokens, dim, vocab = 8192, 4096, 128256
    x0 = torch.randn(tokens, dim, device="cuda").bfloat16()
    w0 = (torch.randn(vocab, dim, device="cuda") * dim**-0.5).bfloat16()
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    target[::7] = ce.IGNORE
    flops = 6 * tokens * dim * vocab
    gradients = {}
    for name, call in (("ours", ce.linear_cross_entropy_autograd), ("torch", ce._peer)):
        x, w = x0.clone().requires_grad_(), w0.clone().requires_grad_()

        def step(call: Any = call, x: Any = x, w: Any = w) -> Any:
            x.grad = w.grad = None
            loss = call(x, w, target)
            loss.backward()
            return loss.detach()

        step()
        gc.collect()
        torch.cuda.synchronize()
        x.grad = w.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        aside = peak - w0.nbytes
        times = seconds(step, 10)
        gradients[name] = (float(loss), x.grad[:512].double(), w.grad[:2048].double())
        rows.append(
            row(
                name,
                f"{tokens}x{dim}x{vocab}",
                times,
                flops,
                "tflops",
                peak_bytes=peak,
                peak_less_weight_gradient=aside,
            )
        )
        x.grad = w.grad = None
        del x, w, step
    logits = x0.double()[:512] @ w0.double().T
    rows.append(
        {
            "name": "gradients, ours against torch",
            "dx": error(gradients["ours"][1], gradients["torch"][1]),
            "dw": error(gradients["ours"][2], gradients["torch"][2]),
            "loss": [gradients["ours"][0], gradients["torch"][0]],
        }
    )
    share = 1 / float((target != ce.IGNORE).sum())
    p = logits.softmax(-1)
    for i in range(512):
        if int(target[i]) != ce.IGNORE:
            p[i, target[i]] -= 1
        else:
            p[i] = 0
    want = (p * share) @ w0.double()
    rows.append(
        {
            "name": "dx against float64",
            "ours": error(gradients["ours"][1], want),
            "torch": error(gradients["torch"][1], want),
        }
    )
    print(rows[-2:])
    return rows


def main() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, section in (("ladder", ladder), ("linear_cross_entropy", losses)):
        found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": section()}
        Path(sys.argv[1], f"{name}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
