"""``transect bench latency``: a batch of equal requests at once; prefill, and decode step by step, and their floors."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .bench_shared import (
    EnergyGpu,
    Json,
    MeasureEnergy,
    Model,
    Runs,
    Subject,
    device_type,
    meter,
    show,
    spread,
    subject,
    write,
)
from .engine_options import BUILTIN, HOW_IT_RUNS, WHERE_IT_RUNS, engine_config, engine_settings, takes

PREFILL = ("requests", "prefill ms", "min - max", "tok/s", "floor ms", "of floor", "MBU", "MFU")
DECODE = ("requests", "ms/token", "min - max", "step p99", "tok/s", "floor ms", "of floor", "MBU", "MFU")


@takes(*engine_settings("max_num_batched_tokens", *WHERE_IT_RUNS, *HOW_IT_RUNS))
def command(
    model: Model = BUILTIN,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Concurrent requests; repeatable.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random prompt tokens of each request.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=2, help="Timed decode steps.")] = 64,
    runs: Runs = 3,
    energy: MeasureEnergy = False,
    energy_gpu: EnergyGpu = 0,
    json: Json = None,
    **given: Any,
) -> None:
    """Measure prefill and decode of one or more requests, and compare with the floor."""
    from ..engine.config import EngineConfig

    batches = sorted(set(batch or [1]))
    meters = meter(energy, energy_gpu)
    _, step_tokens = EngineConfig(
        model=model, max_num_seqs=max(batches), max_num_batched_tokens=given["max_num_batched_tokens"]
    ).limits(device_type(given["device"]))
    spare = -(-max(batches) * prompt_tokens // (step_tokens - max(batches) + 1)) + 2
    longest = prompt_tokens + new_tokens + spare + 1
    blocks = -(-longest // 16) * max(batches)
    settings = engine_config(
        model,
        **{**given, "max_num_batched_tokens": step_tokens},
        enable_prefix_caching=False,
        max_num_seqs=max(batches),
        max_model_len=longest,
        num_kv_blocks=blocks,
        seed=0,
    )
    about = subject(settings, "--prompt-tokens or --new-tokens")
    results = [_measure(about, each, prompt_tokens, new_tokens, spare, runs, meters) for each in batches]
    print(f"{model}, {about.llm.kernels}; floor from {about.rates.device}")
    show(f"prefill of {prompt_tokens} tokens each", PREFILL, [_prefill_row(each) for each in results])
    show(f"decode, {new_tokens} steps after that", DECODE, [_decode_row(each) for each in results])
    about.explain(part for each in results for part in (each["prefill"], each["decode"]))
    if energy:
        rows = [(f"{each['batch']}", f"{each['energy']['joules_per_output_token']:.3f}") for each in results]
        show("energy of decode", ("requests", "J/token"), rows)
    print(f"median of {runs} runs")
    write(json, {"model": model, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "results": results})


def _measure(
    about: Subject, batch: int, prompt_tokens: int, new_tokens: int, spare: int, runs: int, meters: Any
) -> dict[str, Any]:
    from ..bench.lengths import Lengths
    from ..bench.offline import decode_steps, prefill_seconds
    from ..bench.summary import percentile
    from ..bench.workload import random_work
    from ..costs.floors import step_floor
    from ..costs.model import Row

    lengths = Lengths("uniform", prompt_tokens, prompt_tokens)
    prefills, decodes, joules = [], [], []
    for run in range(runs + 1):
        work = random_work(batch, lengths, lengths, vocab=(0, min(10000, about.llm.vocab_size - 1)), seed=run)
        prompts = [each.prompt for each in work if not isinstance(each.prompt, str)]
        prefill = prefill_seconds(about.llm, prompts)
        with meters() as measuring:
            decoded = decode_steps(about.llm, prompts, new_tokens, spare)
        if run:
            prefills.append(prefill)
            decodes.append(decoded)
            if measuring is not None:
                joules.append(measuring.result.joules)
    prefill_time, step_time = spread(prefills), spread([each.per_token for each in decodes])
    floors = {
        name: step_floor(
            about.config, rows[:: about.layout.data], about.rates, about.storage, ranks=about.layout.tensor
        )
        for name, rows in (
            ("prefill", [Row(prompt_tokens, prompt_tokens)] * batch),
            ("decode", [Row(1, n) for n in decodes[0].middle]),
        )
    }
    result = {
        "batch": batch,
        "prefill": {
            "seconds": prefill_time,
            "tokens_per_second": batch * prompt_tokens / prefill_time["median"],
            **floors["prefill"].compared(prefill_time["median"], about.rates),
        },
        "decode": {
            "seconds_per_token": step_time,
            "step_p99": percentile([step for each in decodes for step in each.steps], 99),
            "tokens_per_second": batch / step_time["median"],
            "context": sum(decodes[0].middle) / batch,
            **floors["decode"].compared(step_time["median"], about.rates),
        },
    }
    if joules:
        tokens = batch * (new_tokens + 1)
        result["energy"] = {
            "joules_per_output_token": spread([each / tokens for each in joules])["median"],
            "includes": "the prefill before the decode steps",
        }
    return result


def _prefill_row(result: dict[str, Any]) -> tuple[str, ...]:
    part = result["prefill"]
    return (f"{result['batch']}", *_times(part["seconds"]), *_rates(part))


def _decode_row(result: dict[str, Any]) -> tuple[str, ...]:
    part = result["decode"]
    return (
        f"{result['batch']}",
        *_times(part["seconds_per_token"]),
        f"{part['step_p99'] * 1e3:.2f}",
        *_rates(part),
    )


def _times(seconds: dict[str, float]) -> tuple[str, str]:
    return f"{seconds['median'] * 1e3:.2f}", f"{seconds['min'] * 1e3:.2f} - {seconds['max'] * 1e3:.2f}"


def _rates(part: dict[str, float]) -> tuple[str, ...]:
    shares = (f"{part[name]:.0%}" for name in ("of_floor", "mbu", "mfu"))
    return (f"{part['tokens_per_second']:.0f}", f"{part['floor_s'] * 1e3:.2f}", *shares)
