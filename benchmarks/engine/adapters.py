"""Adapters in one batch beside the same engine without: tokens per second, and the first token after a load.

    python benchmarks/engine/adapters.py [--model MODEL] [--dummy] [--rows 8] [--adapters 1 8] [--rounds 7]
                                         [--rank 16] [--targets q_proj v_proj ...] [--device cpu] [--out FILE]

``base`` is an engine without ``enable_lora``, ``unused`` one with adapters loaded that no request names, ``mixed`` has
an adapter for every other row, and a number is the count of adapters over all rows. ``served alone`` (``--alone``) is
the base with one adapter for all requests (``--adapter``). Contenders take turns within each round; ratios are of one
round.
Adapters have random factors beside the matrices of ``--targets`` (all of the layers if none are named).
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from transect import LLM, SamplingParams
from transect.checkpoints.adapter import StoredAdapter
from transect.checkpoints.adapter_peft import write_adapter
from transect.checkpoints.adapter_served import ServedAdapter
from transect.checkpoints.peft_config import PeftSettings, target_names
from transect.models.weights.low_rank import LowRank
from transect.spec.model import ModelConfig
from transect.spec.weights import linear_shapes


def random_factors(config: ModelConfig, rank: int, targets: tuple[str, ...], seed: int) -> dict[str, LowRank]:
    """Generate small factors in bfloat16 beside each matrix of ``targets``."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(config.n_layers):
        for name, ((outputs, inputs), _) in linear_shapes(config, layer).items():
            if name.rpartition(".")[2] in targets:
                a = torch.randn(rank, inputs, generator=generator, dtype=torch.bfloat16) / 100
                b = torch.randn(outputs, rank, generator=generator, dtype=torch.bfloat16) / 100
                found[f"layers.{layer}.{name}"] = LowRank(a, b, 2.0)
    return found


def engine(options: argparse.Namespace, **more: Any) -> LLM:
    """Build an engine with the benchmark's settings."""
    settings: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": options.rows,
        "device": options.device,
        "seed": 1,
    }
    settings |= {"load_format": "dummy"} if options.dummy else {}
    settings |= {
        "gpu_memory_utilization": 0.42,
        "num_kv_blocks": 64 * options.rows,
        "quantization": options.quantization,
        "deterministic": options.deterministic,
    }
    return LLM(options.model, enable_prefix_caching=False, **settings, **more)


def seconds_of(llm: LLM, prompts: list[list[int]], adapters: list[str], tokens: int) -> float:
    """Measure the seconds of one batch; ``adapters``: content id of each row's."""
    params = [SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)] * len(prompts)
    began = time.perf_counter()
    llm._run([(None, prompt) for prompt in prompts], params, False, 0, adapters=adapters)
    return time.perf_counter() - began


def race(contenders: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Measure tokens per second of each contender, and its ratio to ``base`` in the same round."""
    numbers = random.Random(1)
    prompts = [[numbers.randrange(300, 30_000) for _ in range(16)] for _ in range(options.rows)]
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(options.rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            llm, adapters = contenders[name]
            rate = options.rows * options.tokens / seconds_of(llm, prompts, adapters, options.tokens)
            if turn:  # the first round warms up
                rates[name].append(rate)
    found = {}
    for name in names:
        ratios = [own / base for own, base in zip(rates[name], rates["base"], strict=True)]
        found[name] = {"tokens_per_s": record.summary(rates[name]), "over_base": record.summary(ratios)}
        print(f"{name:14} {statistics.median(rates[name]):10.1f} tokens/s  {statistics.median(ratios):.3f}", flush=True)
    return found


def first_tokens(llm: LLM, resident: str, others: list[str]) -> dict[str, Any]:
    """Measure the seconds to the first token with an adapter in its slot, and with ones that must be copied into
    one."""
    prompt = [list(range(300, 316))]
    seconds_of(llm, prompt, [resident], 1)
    there = [seconds_of(llm, prompt, [resident], 1) for _ in others]
    copied = [seconds_of(llm, prompt, [each], 1) for each in others]
    later = statistics.median(copied) - statistics.median(there)
    print(f"first token after a copy into a slot: {1e3 * later:.1f} ms later", flush=True)
    return {"in_slot_s": record.summary(there), "copied_s": record.summary(copied), "later_s": later}


def from_disk(llm: LLM, folder: Path) -> float:
    """Measure the seconds to read, check and prepare an adapter from files, which a server does in a thread."""
    began = time.perf_counter()
    llm._adapters.load(llm._adapters.find(str(folder)))
    return time.perf_counter() - began


def table(*results: dict[str, Any]) -> str:
    """Format speeds relative to the base: one row for each result, whose contenders are the same."""
    names = {"unused": "loaded, none used", "mixed": "every other row", "1": "1 adapter"}
    shown = [each for each in results[0]["contenders"] if each != "base"]
    heads = [names.get(each, each) for each in shown]
    lines = [
        f"| matrices with factors | {' | '.join(heads)} | base, tokens/s | first token after a copy into a slot |",
        "|---" * (len(shown) + 3) + "|",
    ]
    for result in results:
        speeds = [f"{result['contenders'][each]['over_base']['median']:.3f}" for each in shown]
        base, later = result["contenders"]["base"]["tokens_per_s"]["median"], result["first_token"]["later_s"]
        lines.append(
            f"| {', '.join(result['targets'])} | {' | '.join(speeds)} | {base:,.0f} | {1e3 * later:.1f} ms later |"
        )
    for result in results:
        machine = result["environment"]
        where = result.get("device", machine["processor"])
        lines.append(
            f"\n`{result['command']}`: {result['model']}, {result['rows']} rows, rank {result['rank']}, medians of "
            f"{result['rounds']} rounds in turns. {where}, "
            f"{record.made_at([machine])}."
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", nargs="*", default=[])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--alone", action="store_true", help="the base with one adapter for all requests, too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    most = max(options.adapters)
    slots = most if most < 64 else most + 1
    room: dict[str, Any] = {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots + 8}
    room |= {"max_lora_rank": options.rank, "lora_target_modules": tuple(options.targets)}
    with_adapters = engine(options, **room)
    executor: Any = with_adapters._core.executor
    config = executor.model.config
    targets = target_names(options.targets)
    ids = [f"{number:064x}" for number in range(1, slots + 9)]
    for number, name in enumerate(ids):
        with_adapters._adapters.add(ServedAdapter(name, random_factors(config, options.rank, targets, number)))
    rows = options.rows
    none = [""] * rows
    contenders: dict[str, Any] = {"base": (engine(options), none), "unused": (with_adapters, none)}
    contenders["mixed"] = with_adapters, [ids[row % most] if row % 2 else "" for row in range(rows)]
    for count in options.adapters:
        contenders[str(count)] = with_adapters, [ids[row % count] for row in range(rows)]
    with tempfile.TemporaryDirectory() as folder:
        stored = StoredAdapter(
            PeftSettings(options.rank, 2.0 * options.rank), random_factors(config, options.rank, targets, 0), {}
        )
        write_adapter(Path(folder), stored, config, base=options.model)
        if options.alone:
            contenders["served alone"] = engine(options, adapter=folder), none
        found: dict[str, Any] = {"disk_s": from_disk(with_adapters, Path(folder))}
    found["contenders"] = race(contenders, options)
    found["first_token"] = first_tokens(with_adapters, ids[0], ids[-7:])
    cuda = torch.cuda.is_available() and options.device != "cpu"
    found |= {name: getattr(options, name) for name in ("model", "rows", "rank", "tokens", "rounds", "quantization")}
    found |= {"targets": list(targets), "environment": record.environment()}
    found["command"] = record.command("benchmarks/engine/adapters.py")
    if cuda:
        found["device"] = torch.cuda.get_device_name()
    record.write(options.out or record.RESULTS / ("h200" if cuda else "cpu") / "adapters.json", found)


if __name__ == "__main__":
    main()
