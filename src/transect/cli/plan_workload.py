"""``transect plan workload``: write a generated or recorded load as a trace, to simulate and to replay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .plan_serving import Burstiness, Clients, OutputTokens, PromptTokens, SystemTokens, Think, Turns


def command(
    out: Annotated[Path, typer.Argument(help="The file to write: JSON lines.")],
    rate: Annotated[float, typer.Option(help="Requests per second on average.")] = 1.0,
    requests: Annotated[int, typer.Option(min=1, help="Requests.")] = 100,
    trace: Annotated[
        Path | None, typer.Option(help="Convert this trace, in any format that bench serve --trace reads.")
    ] = None,
    trace_start: Annotated[float | None, typer.Option(help="Second of the trace at which to begin.")] = None,
    prompt_tokens: PromptTokens = "uniform:100-400",
    output_tokens: OutputTokens = "uniform:20-80",
    turns: Turns = 1.0,
    think: Think = 30.0,
    system_tokens: SystemTokens = 0,
    systems: Annotated[int, typer.Option(min=1, help="Number of different system prompts.")] = 1,
    burstiness: Burstiness = 1.0,
    clients: Clients = 1,
    longest: Annotated[int | None, typer.Option(min=2, help="Tokens at which a conversation ends.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of lengths and arrivals.")] = 0,
) -> int:
    """Write a load as JSON lines: times, lengths and shared beginnings of requests.

    `transect bench serve --trace` replays the file against a server, `transect plan serving --trace` simulates it.
    """
    from ..bench.lengths import Lengths
    from ..bench.traces.asked import rate_of
    from ..bench.traces.json_lines import write_lines
    from ..bench.traces.mix import Mix
    from ..bench.traces.reading import read_trace

    if trace is not None:
        asked = read_trace(trace, limit=requests, start=trace_start, seed=seed)
    else:
        mix = Mix(
            prompt=Lengths.parse(prompt_tokens), output=Lengths.parse(output_tokens), burstiness=burstiness,
            clients=clients, turns=turns, think=think, system=system_tokens, systems=systems, longest=longest,
        )  # fmt: skip
        asked = mix.generate(rate, requests, seed)
    write_lines(asked, out)
    tokens_in, tokens_out = sum(each.prompt_tokens for each in asked), sum(each.output_tokens for each in asked)
    when = f"{len(asked)} requests in {asked[-1].at:.1f} s ({rate_of(asked):.2f}/s)"
    print(f"{out}: {when}, {tokens_in} tokens in, {tokens_out} out")
    return 0
