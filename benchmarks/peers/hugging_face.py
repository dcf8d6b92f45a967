"""One sequence of the 8B shape: transformers' ``generate``, eager and compiled with a static cache, and Transect.

    python benchmarks/peers/hugging_face.py [--out DIRECTORY] [--model llama-3.1-8b]

Random weights, bfloat16, a prompt of 512 tokens, greedy; the median time between two tokens, after tokens that warm up.
transformers compiles by itself when its cache is static (``reduce-overhead``: CUDA graphs).
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.tables.engine import peers_table
from transect.bench.offline import decode_steps
from transect.engine.frontends.llm import LLM
from transect.spec.shapes import PRESETS

PROMPT = 512
TOKENS = {"transformers, eager": 24, "transformers, torch.compile, static cache": 80}
SKIPPED = 4
"""First tokens of a run, which are not counted."""
WARM_RUNS = {"transformers, eager": 0, "transformers, torch.compile, static cache": 1}


class Moments(transformers.StoppingCriteria):
    """Never stops; notes when each token was there."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **settings: Any) -> torch.Tensor:
        self.at.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def shape(name: str) -> transformers.PretrainedConfig:
    """Return transformers' configuration of one of ``models.presets``."""
    ours = PRESETS[name]
    kind = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[ours.architecture]
    return kind(
        vocab_size=ours.vocab_size,
        hidden_size=ours.dim,
        intermediate_size=ours.ffn_dim,
        num_hidden_layers=ours.n_layers,
        num_attention_heads=ours.n_heads,
        num_key_value_heads=ours.n_kv_heads,
        head_dim=ours.head_dim,
        tie_word_embeddings=ours.tied_embeddings,
        max_position_embeddings=8192,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )


@torch.inference_mode()
def generated(model: Any, name: str, prompt: torch.Tensor) -> dict[str, Any]:
    """Measure the seconds per token of ``generate``; sampling is off."""
    more = {"cache_implementation": "static"} if "static" in name else {}
    gaps: list[float] = []
    start = time.perf_counter()
    for _ in range(WARM_RUNS[name] + 1):
        moments = Moments()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=TOKENS[name],
            do_sample=False,
            stopping_criteria=transformers.StoppingCriteriaList([moments]),
            **more,
        )
        torch.cuda.synchronize()
        gaps = [after - before for before, after in zip(moments.at, moments.at[1:], strict=False)][SKIPPED:]
    return {"token_s": record.summary(gaps), "all_s": time.perf_counter() - start}


def ours(name: str, prompt: list[int]) -> dict[str, Any]:
    """Measure the seconds per token of ``LLM``."""
    llm = LLM(name, load_format="dummy", max_model_len=2048, max_num_seqs=1, kv_cache_tokens=4096, seed=0)
    decode_steps(llm, [prompt], 8, 4)
    found = decode_steps(llm, [prompt], 100, 4)
    return {"token_s": record.summary(found.steps[SKIPPED:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python benchmarks/peers/hugging_face.py",
        "environment": record.environment(("torch", "triton", "transformers")),
        "gpu": torch.cuda.get_device_name(),
        "model": options.model,
        "ways": {},
    }

    def attempt(name: str, work: Callable[[], dict[str, Any]]) -> None:
        try:
            result["ways"][name] = work()
            record.write(options.out / "engine_peers.json", result)
            print(name, json.dumps(result["ways"][name]), flush=True)
        except Exception:
            traceback.print_exc()

    prompt = torch.randint(0, 10000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    attempt("Transect", lambda: ours(options.model, prompt[0].tolist()))
    gc.collect()
    torch.cuda.empty_cache()
    start = time.perf_counter()
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(shape(options.model), dtype=torch.bfloat16).eval()
    print(f"transformers' model made in {time.perf_counter() - start:.1f} s", flush=True)
    for name in TOKENS:
        attempt(name, lambda name=name: generated(model, name, prompt.cuda()))
    print(peers_table(result))


if __name__ == "__main__":
    main()
