"""Decode steps of gpt-oss-20b's shape on one GPU, with each kernel that its decode rows can attend by, in turns.

    python benchmarks/engine/sinks.py [--rows 1,16,64] [--context 2048] [--out FILE]

``streamed``: the kernel that streams the cache, which engines use; ``tiles``: the one that reads it in tiles. Random
weights in bfloat16. The log-probabilities that both give the likeliest tokens of the first decode step are compared,
beside those of one engine with the same prompts in batches of another size, whose sums have another order: with random
weights greedy tokens part soon, because many are nearly as likely.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.server.load import model_folder
from transect.bench.offline import decode_steps
from transect.engine.executors.gpu import setup
from transect.engine.frontends.llm import LLM
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.ops.attention.paged.dispatch import PagedTriton
from transect.ops.opset import OpSet

CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-5,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 199998,
    "eos_token_id": 200002,
}
"""The config.json of openai/gpt-oss-20b."""
TOP = 5


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 10000, (count, length), generator=generator).tolist()


def engines(folder: Path, context: int, config: dict[str, Any]) -> dict[str, LLM]:
    """Build one engine for each way, side by side, on the same weights."""
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(config))
    model = str(model_folder(str(folder / "shape"), folder / "gpt-oss-20b"))
    settings: dict[str, Any] = {"load_format": "dummy", "max_model_len": context + 512, "enable_prefix_caching": False}
    # Two engines share the GPU, so each gets the cache that it needs and no more.
    settings |= {"kv_cache_tokens": 64 * (context + 512), "max_num_seqs": 64, "seed": 0}
    resolve = setup.resolve_ops

    def in_tiles(*arguments: Any, **options: Any) -> OpSet:
        ops = resolve(*arguments, **options)
        assert isinstance(ops.paged_attention, PagedTriton)
        return replace(ops, paged_attention=replace(ops.paged_attention, decode=None))

    with mock.patch.object(setup, "resolve_ops", in_tiles):
        tiles = LLM(model, **settings)
    return {"tiles": tiles, "streamed": LLM(model, **settings)}


Second = tuple[int, dict[int, float]]
"""A prompt's first token, and log-probabilities of the likeliest after it."""


def seconds(llm: LLM, given: list[list[int]], together: int) -> list[Second]:
    """Return the results of the first decode step of each prompt, ``together`` prompts at a time."""
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=TOP)
    found = []
    for first in range(0, len(given), together):
        for each in llm.generate(given[first : first + together], params):
            (output,) = each.outputs
            assert output.logprobs is not None
            found.append((output.token_ids[0], {token: of.logprob for token, of in output.logprobs[1].items()}))
    return found


def furthest(one: list[Second], other: list[Second]) -> float:
    """Return the largest difference of a log-probability that both have, if the first token is the same."""
    pairs = [(a, b) for (first, a), (same, b) in zip(one, other, strict=True) if first == same]
    return max(abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200" / "sinks.json")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python benchmarks/engine/sinks.py",
        "environment": record.environment(("torch", "triton")),
        "gpu": torch.cuda.get_device_name(),
        "context": options.context,
        "rows": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        made = engines(Path(folder), options.context, CONFIG)
    given = prompts(32, 300, 0)
    tiles, streamed = (seconds(llm, given, 16) for llm in made.values())
    result["logprobs"] = {
        "apart": furthest(tiles, streamed),
        "apart_by_batch": furthest(tiles, seconds(made["tiles"], given, 8)),
    }
    print(f"log-probabilities: {result['logprobs']}", flush=True)
    for count in map(int, options.rows.split(",")):
        times: dict[str, list[float]] = {name: [] for name in made}
        for run in range(options.runs):
            for name, llm in made.items():
                spare = -(-count * options.context // 8192) + 16
                times[name].append(decode_steps(llm, prompts(count, options.context, run), 48, spare).per_token)
        result["rows"][str(count)] = {name: record.summary(each) for name, each in times.items()}
        shown = ", ".join(
            f"{name} {found['median'] * 1e3:.3f} ms" for name, found in result["rows"][str(count)].items()
        )
        print(f"{count} rows: {shown}", flush=True)
        record.write(options.out, result)


if __name__ == "__main__":
    main()
