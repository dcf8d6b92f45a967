"""``transect bench serve``: puts load on an OpenAI-compatible server, and reports how it copes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .bench_shared import Json, show, write
from .settings import output_file

if TYPE_CHECKING:
    from ..bench.levels import Result

REQUESTS, OUTPUT_TOKENS = 100, "128"


def command(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Name of the model; default: the server's first.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the key in its first line.")] = None,
    endpoint: Annotated[str, typer.Option(help="completions, or chat (needs text prompts).")] = "completions",
    request_rate: Annotated[
        list[float] | None,
        typer.Option(
            help="Requests per second at random times (open loop); inf: all at once. Repeatable. Default: 1, unless "
            "--concurrency or --trace is given."
        ),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests in flight (closed loop). Repeatable."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Trace to replay: JSON lines, Mooncake's lines, Azure's CSV, a ServeGen folder, or output of --json."
        ),
    ] = None,
    trace_start: Annotated[
        float | None, typer.Option(help="Start second of a trace; ServeGen's default: the busiest window.")
    ] = None,
    speed: Annotated[float, typer.Option(help="Speed-up of a trace.")] = 1.0,
    burstiness: Annotated[
        float, typer.Option(help="Burstiness of arrivals: 1 is Poisson, 0 an even beat, more is bursts.")
    ] = 1.0,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests at each rate or concurrency (100), or of the trace (all). No fewer than the concurrency.",
        ),
    ] = None,
    warm_up: Annotated[int, typer.Option(min=0, help="Uncounted requests at the start.")] = 8,
    prompt_tokens: Annotated[str, typer.Option(help="512, uniform:100-1024 or lognormal:MEDIAN,SIGMA[,MOST].")] = "256",
    output_tokens: Annotated[
        str | None, typer.Option(help="Likewise. Default: 128, or the lengths of the conversations' answers.")
    ] = None,
    conversations: Annotated[
        Path | None, typer.Option(help="Prompts from this file in ShareGPT's form instead of random token ids.")
    ] = None,
    highest_id: Annotated[int, typer.Option(min=0, help="Random token ids are 0 to this.")] = 10000,
    seed: Annotated[
        int,
        typer.Option(help="Seed of prompts, lengths and arrivals. A server may have cached the prompts of a seed."),
    ] = 0,
    temperature: Annotated[float, typer.Option(help="Temperature of every request.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Generate exactly the output tokens of the workload.")] = True,
    extra_body: Annotated[str, typer.Option(help="More fields of every request, as a JSON object.")] = "{}",
    timeout: Annotated[float, typer.Option(help="Time limit of a request in seconds.")] = 600.0,
    slo: Annotated[
        str | None, typer.Option(help="Objectives for goodput, such as ttft=500ms,itl=50ms,e2e=10s.")
    ] = None,
    energy: Annotated[
        bool, typer.Option("--energy", help="Measure joules per token, if the server's GPU is in this machine.")
    ] = False,
    energy_gpu: Annotated[int, typer.Option(min=0, help="Index of that GPU in nvidia-smi.")] = 0,
    json: Json = None,
    plot: Annotated[Path | None, output_file(help="Write a picture to this file (.png, .svg, .pdf).")] = None,
) -> int:
    """Put load on any OpenAI-compatible server, and report latencies, rates and goodput.

    Exit 1 if no request succeeded.
    """
    import asyncio

    from ..bench import plots
    from ..bench.energy import EnergyMeter, Nvml
    from ..bench.lengths import Lengths
    from ..bench.levels import WorkSource, concurrency_levels, rate_levels, records_table, run_levels, trace_level
    from ..bench.objectives import Objectives
    from ..bench.target import Target, served_model
    from ..server.http.clients import keys_in

    key = api_key or (None if api_key_file is None else keys_in(api_key_file)[0].key)
    objectives = None if slo is None else Objectives.parse(slo)
    if sum(given is not None for given in (request_rate, concurrency, trace)) > 1:
        raise ValueError("give one of --request-rate, --concurrency and --trace")
    if endpoint not in ("completions", "chat"):
        raise ValueError(f"--endpoint must be completions or chat, not {endpoint!r}")
    if plot is not None:
        plots.check(plot)
    meter = EnergyMeter(Nvml(), [energy_gpu]) if energy else None
    output = None if output_tokens is None else Lengths.parse(output_tokens)
    if output is None and conversations is None:
        output = Lengths.parse(OUTPUT_TOKENS)
    source = WorkSource(Lengths.parse(prompt_tokens), output, conversations, highest_id, seed)
    if trace is not None:
        levels = [trace_level(source, trace, speed, requests, trace_start)]
    elif concurrency is not None:
        levels = concurrency_levels(source, requests or REQUESTS, concurrency)
    else:
        levels = rate_levels(source, requests or REQUESTS, request_rate or [1.0], burstiness)
    extra = _object(extra_body)
    name = model or asyncio.run(served_model(url, key))
    target = Target(url, name, key, endpoint, temperature, ignore_eos, extra, timeout)  # type: ignore[arg-type]
    before = source.draw(warm_up, "warm-up")
    counts = ", ".join(f"{len(level.work)} at {level}" for level in levels)
    print(f"{url}, model {name}, {endpoint}, seed {seed}; requests: {warm_up} to warm up, {counts}", flush=True)
    test = run_levels(target, levels, warm_up=before, objectives=objectives, meter=meter)
    results = asyncio.run(test)
    _show(results)
    if plot is not None:
        plots.plot(results, plot)
    if json is not None:
        settings = {"url": url, "model": name, "endpoint": endpoint, "seed": seed, "warm_up": warm_up}
        lengths = {"prompt_tokens": str(source.prompt), "output_tokens": str(source.output)}
        levels_json = [result.summary for result in results]
        requests_json = list(records_table(results))
        write(json, {"settings": {**settings, **lengths}, "levels": levels_json, "requests": requests_json})
    return 0 if all(result.summary["succeeded"] for result in results) else 1


def _object(text: str) -> dict[str, Any]:
    from json import JSONDecodeError, loads

    try:
        value = loads(text)
    except JSONDecodeError as error:
        raise ValueError(f"--extra-body is not JSON ({error}): give an object such as '{{\"top_k\": 20}}'") from None
    if not isinstance(value, dict):
        raise ValueError("--extra-body must be a JSON object, such as '{\"top_k\": 20}'")
    return value


def _show(results: list[Result]) -> None:
    from ..bench.summary import warnings

    summaries = {str(result.level): result.summary for result in results}
    rates = ("requests", "input_tokens", "output_tokens")
    show(
        "rates",
        ("load", "requests", "failed", "under way", "req/s", "in tok/s", "out tok/s", "generator lag p99 ms"),
        [
            (
                *(load, f"{each['requests']}", f"{each['requests'] - each['succeeded']}", f"{each['concurrency']:.1f}"),
                *(f"{each[f'{rate}_per_second']:.{2 if rate == 'requests' else 0}f}" for rate in rates),
                f"{each['generator']['lag']['p99'] * 1e3:.2f}",
            )
            for load, each in summaries.items()
        ],
    )
    titles = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "e2e"}
    show(
        "latencies in ms, from when a request was due",
        (
            "load",
            *(f"{title} p50" if share == 50 else f"p{share}" for title in titles.values() for share in (50, 95, 99)),
        ),
        [
            (load, *(_milliseconds(each[name], share) for name in titles for share in (50, 95, 99)))
            for load, each in summaries.items()
        ],
    )
    for load, each in summaries.items():
        if "goodput" in each:
            good = each["goodput"]
            met = f"{good['requests_per_second']:.2f} requests/s ({good['share']:.0%})"
            print(f"goodput at {load}: {met} within {good['objectives']}")
        if "energy" in each:
            used = each["energy"]
            print(f"energy at {load}: {used['joules_per_output_token']:.3f} J per output token, {used['watts']:.0f} W")
        for sentence in warnings(each):
            print(f"note on {load}: {sentence}")


def _milliseconds(distribution: dict[str, float] | None, share: int) -> str:
    return "-" if distribution is None else f"{distribution[f'p{share}'] * 1e3:.1f}"
