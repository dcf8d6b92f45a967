"""The same model, the same prompt: transformers' eager ``generate`` and Transect, and where the difference goes.

    python examples/explain/generate.py [--model smollm2-135m] [--tokens 32]
    python examples/explain/generate.py --model llama-3.1-8b --dummy           # random weights: an 8B shape on a GPU

Each decodes greedily, one sequence. The time of a token is split: the floor (weights and KV read once), kernels above
it, and what the device waits for (launches, Python, synchronisation). The difference between the two is the difference
of these parts. transformers has to be installed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from transect import LLM, SamplingParams
from transect.checkpoints.resolve import resolve
from transect.costs.floors import Rates, step_floor
from transect.costs.model import Row
from transect.explain import Explain
from transect.explain.program.explain import Explanation, machine_ceilings
from transect.hardware.environment import environment
from transect.spec.hf import to_hf
from transect.spec.shapes import PRESETS

PROMPT = 32
WAITING = ("launch", "host", "sync", "copies", "loading", "recompilation")


def eager(config: dict[str, Any], device: str, tokens: int) -> Callable[[], object]:
    """transformers' ``generate`` with its defaults, on random weights of this shape."""
    import transformers

    kind = transformers.AutoConfig.for_model(
        config["model_type"], **{k: v for k, v in config.items() if k != "model_type"}
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(kind).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    ids = torch.randint(10, 10_000, (1, PROMPT), device=device)
    how = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **how)


def ours(llm: LLM, tokens: int) -> Callable[[], object]:
    """The engine, greedily."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return lambda: llm.generate([list(range(10, 10 + PROMPT))], params)


def looked_at(name: str, work: Callable[[], object], tokens: int, floor: float, **settings: Any) -> dict[str, Any]:
    """Milliseconds of a token: measured without a profiler, and the parts of a run under it, in proportion."""
    work()
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    with Explain(stacks=not torch.cuda.is_available(), **settings) as run:
        work()
    assert run.result is not None
    return divided(name, min(taken), tokens, floor, run.result)


def divided(name: str, seconds: float, tokens: int, floor: float, found: Explanation) -> dict[str, Any]:
    """The measured time of a token in parts that add up to it: the floor of the model's step, kernels above it, and
    each kind of waiting."""
    own = found.split.own
    parts = found.split.parts
    each = 1e3 * seconds / tokens
    waiting = {part: each * parts[part] / own for part in WAITING if parts[part] > 0}
    busy = each - sum(waiting.values())
    least = min(1e3 * floor, busy)
    result = {"floor": least, "kernels above it": busy - least, **waiting}
    print(f"{name:14} {1e3 / each:7.1f} tokens/s, {each:6.2f} ms a token: ", end="")
    print(", ".join(f"{part} {value:.2f}" for part, value in result.items() if value >= 0.005), flush=True)
    return {"ms_a_token": each, "parts_ms": result, "unexplained_share": found.split.share("unexplained")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dummy", action="store_true", help="random weights in the shape of the model")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if find_spec("transformers") is None:
        raise SystemExit("this is a race with transformers: pip install transformers")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = options.tokens
    ceilings = machine_ceilings()
    format_ = "dummy" if options.dummy else "auto"
    config = PRESETS[options.model] if options.dummy else resolve(options.model).config
    rates = Rates.of(ceilings, "bfloat16")
    floor = sum(step_floor(config, [Row(1, PROMPT + i)], rates).seconds for i in range(tokens)) / tokens
    print(f"floor of a token in bfloat16: {1e3 * floor:.2f} ms")
    llm = LLM(options.model, load_format=format_, max_model_len=PROMPT + tokens, max_num_seqs=1)
    found = {"transect": looked_at("transect", ours(llm, tokens), tokens, floor, decisions=llm.decisions)}
    del llm
    found["transformers"] = looked_at("transformers", eager(to_hf(config), device, tokens), tokens, floor)
    theirs, mine = found["transformers"]["parts_ms"], found["transect"]["parts_ms"]
    difference = {part: theirs.get(part, 0.0) - mine.get(part, 0.0) for part in {**theirs, **mine}}
    whole = found["transformers"]["ms_a_token"] - found["transect"]["ms_a_token"]
    print(f"{whole:.2f} ms between them: " + ", ".join(f"{part} {value:+.2f}" for part, value in difference.items()))
    if options.json:
        gpu = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}
        command = f"python examples/explain/generate.py --model {options.model}" + " --dummy" * options.dummy
        kept = {
            "model": options.model,
            "tokens": tokens,
            "floor_ms": 1e3 * floor,
            "engines": found,
            "difference_ms": difference,
        }
        options.json.write_text(
            json.dumps({"command": command, "environment": environment() | gpu, **kept}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
