"""Long prompts on one GPU: attention of chunks through pages, and whole prompts through the engine.

    python benchmarks/engine/long_prompts.py [kernel] [engine] [--out FILE]

kernel: a chunk of 4,096 queries at the end of 12k, 32k and 128k positions, for ways of sharing key heads and sizes of
heads; beside the floor of its arithmetic and peers whose keys lie side by side (the copy out of the pages is not
counted): FlashAttention-3, where its package ``fa3-fwd`` is installed, and cuDNN by way of torch, which gets as many
keys without a mask as make the same arithmetic. engine: 12 prompts of 12,000 tokens, one token drawn for each, beside
vLLM's time, measured apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.popular_shapes import SHAPES
from benchmarks.peers import vllm
from benchmarks.server.load import model_folder
from transect.bench.offline import prefill_seconds
from transect.costs.floors import Rates, step_floor
from transect.costs.model import Row
from transect.engine.frontends.llm import LLM
from transect.ops.attention.paged.batch import PagedBatch
from transect.ops.opset import resolve_ops
from transect.spec.hf import from_hf

RATES = Rates(4.35e12, 750e12, "H200, measured")
HEADS = {
    "8b": (32, 8, 128),
    "3b": (24, 8, 128),
    "7b": (28, 4, 128),
    "1b": (32, 8, 64),
    "96": (32, 8, 96),
    "256": (16, 8, 256),
}
CONTEXTS = (12288, 32768, 131072)
CHUNK, BLOCK = 4096, 16
PROMPTS, TOKENS = 12, 12000
BUDGET_S = 0.06


def timed(work: Any) -> float:
    """Measure the seconds of a call on the GPU, the median of as many as fit a few hundredths of a second. Each follows
    another, so that the GPU never waits for the host."""
    work()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < BUDGET_S and len(times) < 20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        work()
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def chunk(heads: int, kv_heads: int, d: int, context: int) -> dict[str, Any]:
    """Measure one layer's attention of the last CHUNK of ``context`` positions, to contiguous blocks, as those of a
    prompt are where memory was free, and to scattered ones."""
    device = torch.device("cuda")
    made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    blocks = context // BLOCK
    q = torch.randn(CHUNK, heads, d, **made)
    k_cache, v_cache = (torch.randn(blocks, kv_heads, BLOCK, d, **made) for _ in range(2))
    scattered = torch.randperm(blocks, device=device).to(torch.int32)[None]
    starts = torch.tensor([0, CHUNK], dtype=torch.int32, device=device)
    lengths = torch.tensor([context], dtype=torch.int32, device=device)
    ops = resolve_ops(device, ("triton", "torch"))

    batches = [PagedBatch(tables, starts, lengths, BLOCK) for tables in (scattered.sort().values, scattered)]

    def ours(batch: PagedBatch) -> torch.Tensor:
        return ops.paged_attention(q, k_cache, v_cache, batch, d**-0.5, None)

    def side_by_side(batch: PagedBatch) -> list[torch.Tensor]:
        each = (cache[batch.block_tables[0].long()].transpose(1, 2) for cache in (k_cache, v_cache))
        return [x.reshape(1, context, kv_heads, d) for x in each]

    ours_s, scattered_s = (timed(lambda batch=batch: ours(batch)) for batch in batches)
    keys, values = side_by_side(batches[0])
    peers = {
        "fa3_s": lambda: flash_attention_3(q[None], keys, values),
        "cudnn_s": lambda: cudnn(q[None], keys[:, : context - CHUNK // 2], values[:, : context - CHUNK // 2]),
    }
    found: dict[str, float | None] = {"scattered_s": scattered_s}
    for name, peer in peers.items():
        try:
            found[name] = timed(peer)
        except (RuntimeError, ImportError) as error:
            print(f"{name}: {str(error)[:300]}")
            found[name] = None
    if found["fa3_s"] is not None:
        for batch in batches:
            apart = (ours(batch) - flash_attention_3(q[None], *side_by_side(batch))[0]).float().abs().max().item()
            if apart > 0.05:
                first = batch.block_tables[0, :3].tolist()
                raise ValueError(f"ours and FlashAttention-3 differ by {apart}, with blocks {first} and so on")
    flops = 4 * d * heads * (CHUNK * (context - CHUNK) + CHUNK * (CHUNK + 1) / 2)
    floor = flops / RATES.flops_per_second
    return {
        "seconds": ours_s,
        "floor_s": floor,
        "of_floor": floor / ours_s,
        "tflops": flops / ours_s / 1e12,
        **found,
    }


def flash_attention_3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """Attend causally from the last key back; all ``[1, tokens, heads, d]``."""
    from fa3_fwd_interface import flash_attn_func

    return flash_attn_func(q, k, v, causal=True)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend to all keys; all ``[1, tokens, heads, d]``."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), enable_gqa=True)


def engine(name: str, folder: Path) -> dict[str, Any]:
    """Measure the seconds for all prompts."""
    config = SHAPES[name].config()
    (folder / "shape").mkdir(exist_ok=True)
    (folder / "shape" / "config.json").write_text(json.dumps(config))
    llm = LLM(
        str(model_folder(str(folder / "shape"), folder / name)),
        load_format="dummy", max_model_len=16384, enable_prefix_caching=False, seed=0, cuda_graphs="lazy",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 10000, (PROMPTS, TOKENS), generator=generator).tolist()
    prefill_seconds(llm, prompts[:2])
    times = [prefill_seconds(llm, prompts) for _ in range(2)]
    least = step_floor(from_hf(config), [Row(TOKENS, TOKENS)] * PROMPTS, RATES).seconds
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return {"seconds": record.summary(times), "floor_s": least, "vllm_s": vllm.LONG_PROMPTS.get(name)}


def page(result: dict[str, Any]) -> str:
    """Format a page: attention to keys in pages, and prompts of 12,000 tokens."""
    before = result["before"]
    lines = [
        "| chunk of 4,096 queries | neighbouring blocks | of floor | scattered | of floor | FlashAttention-3 | cuDNN |",
        "|---" * 7 + "|",
    ]
    for name, each in result["kernel"].items():
        model, context = name.split(" at ")
        heads, kv_heads, d = HEADS[model]
        cells = []
        for way in ("seconds", "scattered_s"):
            cells += [f"{1e3 * each[way]:.2f} ms", f"{each['floor_s'] / each[way]:.0%}"] if way in each else ["", ""]
        peers = (each.get("fa3_s"), each.get("cudnn_s"))
        cells += ["" if value is None else f"{1e3 * value:.2f} ms" for value in peers]
        lines.append(
            f"| {heads} heads of {d}, {kv_heads} key heads, {int(context):,} positions | " + " | ".join(cells) + " |"
        )
    title = "| 12 prompts of 12,000 tokens | seconds | of floor | previous kernel, in turns | before | vLLM 0.24 |"
    lines += ["", title, "|---" * 6 + "|"]
    for name, each in result["engine"].items():
        median = each["seconds"]["median"]
        cells = [f"{median:.2f} s", f"{each['floor_s'] / median:.0%}"]
        turns = each.get("kernel_before")
        cells.append("" if turns is None else f"{turns['median']:.2f} s")
        cells += [f"{before['engine'][name]['seconds']['median']:.2f} s", f"{vllm.LONG_PROMPTS[name]:.2f} s"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    machine = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    runs = [machine] + [machine | {"commit": commit} for commit in result.get("other_commits", ())]
    lines.append(
        f"\n`{result['command']}` on one {result['gpu']}, {versions}, {record.made_at(runs)}; before: commit "
        f"{record.cited(before['commit'])}. vLLM was measured in another run.\n"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["kernel", "engine"])
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which nothing further begins")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200" / "long_prompts.json")
    options = parser.parse_args()
    began = time.perf_counter()
    result: dict[str, Any] = {
        "command": "python benchmarks/engine/long_prompts.py",
        "environment": record.environment(("torch", "triton")),
        "commit": record.commit(),
        "gpu": torch.cuda.get_device_name(),
        "kernel": {},
        "engine": {},
    }
    work: list[tuple[str, str, Any]] = []
    if "kernel" in options.parts:
        for context in map(int, options.contexts.split(",")):
            work += [("kernel", f"{name} at {context}", (*sizes, context)) for name, sizes in HEADS.items()]
    with tempfile.TemporaryDirectory() as folder:
        if "engine" in options.parts:
            work += [("engine", name, None) for name in vllm.LONG_PROMPTS]
        for part, name, sizes in work:
            if time.perf_counter() - began > options.limit:
                break
            try:
                found = chunk(*sizes) if part == "kernel" else engine(name, Path(folder))
            except Exception:
                traceback.print_exc()
                continue
            result[part][name] = found
            print(part, name, json.dumps(found), flush=True)
            record.write(options.out, result)


if __name__ == "__main__":
    main()
