"""A model larger than the GPU: all layers stream from host memory, or from a file, beside the floor of the host link.

    python benchmarks/engine/zero_inference.py [--ranks 1] [--memory-gb 24] [--batch 128] [--folder DIR] [--out DIR]
    python benchmarks/engine/zero_inference.py --device cpu --layers 4 --dim 256        a dry run

Random weights in the shape of Qwen2.5-32B, in bfloat16. The engine may fill ``--memory-gb`` (10^9 bytes) of each GPU.
Decode: ``--batch`` sequences; prefill: steps of 8192 tokens. The link is measured in the same run, of several ranks all
at once. The floor of a step is the larger of two times: bytes that stream by the link's rate, and the floor
of the rest (``transect.costs.floors``). What is measured is kept at once, in ``DIR/zero_inference.json``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.gpu import RATES, Kept
from transect.bench import host_link
from transect.bench.offline import decode_steps, prefill_seconds
from transect.checkpoints.resolve import resolve
from transect.costs.floors import step_floor
from transect.costs.model import Row, weight_bytes
from transect.costs.storage import Storage
from transect.engine.frontends.llm import LLM
from transect.engine.scheduling.decisions import read_records
from transect.parallel.launch import Ranks

STEP_TOKENS = 8192
PROMPT = 256
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648,
    "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Generate random prompts."""
    return torch.randint(0, 1000, (count, tokens), generator=torch.Generator().manual_seed(seed)).tolist()


class Run:
    """An engine, the rate of the slowest link, and where results are kept."""

    def __init__(self, options: argparse.Namespace, model: str, kept: Kept) -> None:
        self.options, self.kept = options, kept
        self.config = resolve(model, load_format="dummy").config
        self.name = f"{options.ranks} {'file' if options.folder else 'host'}"
        cuda = options.device == "cuda"
        device = torch.device(options.device, 0) if cuda else torch.device("cpu")
        ranks = Ranks.start(options.ranks, options.device) if options.ranks > 1 else None
        if ranks is None:
            self.links = [host_link.rate(device)]
        else:
            ranks.call(host_link.JOB, None)
            self.links = host_link.rates(ranks.world)
        self.link = min(self.links)
        print(f"  links: {', '.join(f'{rate / 1e9:.1f}' for rate in self.links)} GB/s", flush=True)
        total = torch.cuda.get_device_properties(0).total_memory if cuda else 1
        memory = {"gpu_memory_utilization": options.memory_gb * 1e9 / total} if cuda else {"kv_cache_tokens": 65536}
        began = time.perf_counter()
        self.llm = LLM(
            model, load_format="dummy", device=options.device, dtype="bfloat16", seed=0, max_model_len=1024,
            max_num_seqs=options.batch, max_num_batched_tokens=STEP_TOKENS, enable_prefix_caching=False,
            cpu_offload_gb=10000, offload_folder=options.folder, tensor_parallel_size=options.ranks, ranks=ranks,
            **memory,
        )  # fmt: skip
        self.start_s = time.perf_counter() - began
        (header,) = read_records(self.llm._core.decisions.header)
        self.streamed = header.storage["streamed"]
        self.kv_tokens = 16 * self.llm.stats().kv_blocks_total

    def floor(self, rows: list[Row]) -> float:
        """Return the floor of a step in seconds: the bytes that stream to a rank, or a rank's share of the rest."""
        rest = step_floor(self.config, rows, RATES, Storage()).seconds / self.options.ranks
        return max(rest, self.streamed / self.link)

    def about(self) -> dict[str, Any]:
        """Return the measurements made before the first request."""
        found: dict[str, Any] = {
            "ranks": self.options.ranks,
            "weights_bytes": weight_bytes(self.config),
            "streamed_bytes_each": self.streamed,
            "link_bytes_per_second": self.links,
            "start_s": self.start_s,
            "kv_tokens": self.kv_tokens,
        }
        if self.options.device == "cuda":
            free, total = torch.cuda.mem_get_info(0)
            found["gpu_bytes_used"] = total - free
            print(f"  GPU 0: {(total - free) / 1e9:.1f} GB used; {self.kv_tokens} tokens of cache")
        print(
            f"  started in {self.start_s:.1f} s; {self.streamed / 1e9:.2f} GB stream to each rank, of weights of "
            f"{found['weights_bytes'] / 1e9:.1f} GB",
            flush=True,
        )
        return found

    def decode(self) -> dict[str, Any]:
        """Measure the seconds of a decode step of the whole batch."""
        batch = self.options.batch
        spare = -(-batch * PROMPT // STEP_TOKENS) + 2
        found = decode_steps(self.llm, prompts(batch, PROMPT, 1), self.options.steps, spare)
        return self._beside(f"decode of {batch}", found.steps, self.floor([Row(1, n) for n in found.middle]), batch)

    def prefill(self) -> dict[str, Any]:
        """Measure the seconds of steps full of prompt tokens."""
        steps, each = 4, 512
        seconds = prefill_seconds(self.llm, prompts(steps * STEP_TOKENS // each, each, 2))
        floor = self.floor([Row(each, each)] * (STEP_TOKENS // each))
        return self._beside(f"prefill of {STEP_TOKENS}", [seconds / steps], floor, STEP_TOKENS)

    def _beside(self, what: str, steps: list[float], floor: float, tokens: int) -> dict[str, Any]:
        times = record.summary(steps)
        share = floor / times["median"]
        print(
            f"  {self.name}, {what}: {times['median']:.3f} s a step, floor {floor:.3f}, {share:.1%} of it; "
            f"{tokens / times['median']:,.0f} tok/s",
            flush=True,
        )
        return {"tokens": tokens, "step_s": times, "floor_s": floor, "of_floor": share}


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--memory-gb", type=float, default=24.0)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder", default=None, help="layers live in a file here")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--dim", type=int, default=SHAPE["hidden_size"])
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200")
    options = parser.parse_args()
    shape = SHAPE | {"num_hidden_layers": options.layers}
    if options.dim != SHAPE["hidden_size"]:
        shape |= {"hidden_size": options.dim, "intermediate_size": 3 * options.dim, "vocab_size": 2048}
        shape |= {"num_attention_heads": options.dim // 64, "num_key_value_heads": options.dim // 128}
        shape |= {"bos_token_id": 1, "eos_token_id": 2}
    options.out.mkdir(parents=True, exist_ok=True)
    kept = Kept(options.out / "zero_inference.json")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        run = Run(options, folder, kept)
        kept.put(f"{run.name} about", run.about())
        kept.attempt(f"{run.name} decode", run.decode)
        kept.attempt(f"{run.name} prefill", run.prefill)
        run.llm.close()


if __name__ == "__main__":
    main()
