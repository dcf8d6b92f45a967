"""``transect bench throughput``: many sequences of random lengths, all at once, beside their floor."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .bench_shared import EnergyGpu, Json, MeasureEnergy, Model, Runs, meter, show, spread, subject, write
from .engine_options import BUILTIN, HOW_IT_RUNS, WHERE_IT_RUNS, engine_config, engine_settings, takes

COLUMNS = (
    "sequences",
    "tokens in",
    "out",
    "seconds",
    "out tok/s",
    "all tok/s",
    "floor tok/s",
    "of floor",
    "MBU",
    "MFU",
)


@takes(
    *engine_settings("max_num_seqs", "max_num_batched_tokens", "mixed_step_limit", "longest_first", "kv_cache_tokens"),
    *engine_settings("data_parallel_size", *WHERE_IT_RUNS, *HOW_IT_RUNS),
    max_num_seqs=256,
)
def command(
    model: Model = BUILTIN,
    sequences: Annotated[int, typer.Option(min=1, help="Number of sequences.")] = 256,
    shortest: Annotated[int, typer.Option(min=1, help="Fewest tokens of a prompt and of an output.")] = 100,
    longest: Annotated[int, typer.Option(min=1, help="Most tokens of a prompt and of an output.")] = 1024,
    runs: Runs = 1,
    warm_up: Annotated[bool, typer.Option(help="Run a few sequences first.")] = True,
    energy: MeasureEnergy = False,
    energy_gpu: EnergyGpu = 0,
    json: Json = None,
    **given: Any,
) -> None:
    """Measure the throughput of many sequences, by the protocol of nano-vllm and mini-sglang.

    256 sequences, prompts and outputs of 100 to 1024 tokens (142,827 in, 133,966 out), temperature 0.6, no early end.
    Use fewer or shorter ones on small machines.
    """
    from ..bench.offline import run_all
    from ..bench.workload import throughput_protocol
    from ..costs.floors import batch_floor

    if shortest > longest:
        raise ValueError(f"--shortest {shortest} is above --longest {longest}: exchange them")
    meters = meter(energy, energy_gpu)
    settings = engine_config(
        model,
        **given,
        enable_prefix_caching=False,
        max_model_len=2 * longest,
        seed=0,
    )
    about = subject(settings, "--longest")
    work = throughput_protocol(sequences, shortest, longest, highest=min(10000, about.llm.vocab_size - 1))
    tokens_in = sum(len(each.prompt) for each in work)
    tokens_out = sum(each.output_tokens for each in work)
    if warm_up:
        run_all(about.llm, throughput_protocol(4, 1, shortest, highest=about.llm.vocab_size - 1))
    seconds, steps, joules = [], 0, []
    for _ in range(runs):
        with meters() as measuring:
            taken, steps = run_all(about.llm, work)
        seconds.append(taken)
        if measuring is not None:
            assert measuring.result is not None
            joules.append(measuring.result.per_token(tokens_in, tokens_out))
    time = spread(seconds)
    lengths = [(len(each.prompt), each.output_tokens) for each in work]
    prefill, decode = batch_floor(about.config, lengths, about.rates, about.storage, about.layout)
    floor = prefill + decode
    shares = floor.compared(time["median"], about.rates)
    rate, floor_rate = tokens_out / time["median"], tokens_out / floor.seconds
    print(f"{model}, {about.llm.kernels}; floor from {about.rates.device}")
    counts = (f"{sequences}", f"{tokens_in}", f"{tokens_out}", f"{time['median']:.2f}", f"{rate:.0f}")
    totals = (f"{(tokens_in + tokens_out) / time['median']:.0f}", f"{floor_rate:.0f}")
    show("throughput", COLUMNS, [(*counts, *totals, *(f"{shares[name]:.0%}" for name in ("of_floor", "mbu", "mfu")))])
    about.explain([shares])
    if joules:
        print(f"{spread([each['joules_per_output_token'] for each in joules])['median']:.3f} J per output token")
    print(f"median of {runs} runs, {min(seconds):.2f} - {max(seconds):.2f} s, {steps} steps")
    result = {
        "sequences": sequences,
        "input_tokens": tokens_in,
        "output_tokens": tokens_out,
        "seconds": time,
        "steps": steps,
        "output_tokens_per_second": rate,
        "floor_output_tokens_per_second": floor_rate,
        "prefill_floor_s": prefill.seconds,
        **shares,
        "energy": joules,
    }
    write(json, {"model": model, "results": [result]})
