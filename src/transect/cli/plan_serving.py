"""``transect plan serving``: the cards that serve a load within a target, before any is rented."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .settings import output_file

if TYPE_CHECKING:
    from ..bench.traces.asked import Asked
    from ..bench.traces.mix import Mix
    from ..plan.serving import Demand

LENGTHS = "lognormal:500,0.8,4000", "lognormal:180,0.6,1500"
CONTEXT = 8192
THINK = 30.0
FORMS = "512, uniform:LOW-HIGH or lognormal:MEDIAN,SIGMA[,MOST]"

PromptTokens = Annotated[str, typer.Option(help=f"Of a user's question: {FORMS}.")]
OutputTokens = Annotated[str, typer.Option(help="Likewise, of an answer.")]
Turns = Annotated[float, typer.Option(min=1, help="Mean number of turns of a conversation.")]
Think = Annotated[float, typer.Option(min=0, help="Seconds from an answer to the same user's next question.")]
SystemTokens = Annotated[int, typer.Option(min=0, help="Tokens of a system prompt that all prompts begin with.")]
Burstiness = Annotated[
    float, typer.Option(help="Squared coefficient of variation of the gaps between arrivals; 1 is Poisson.")
]
Clients = Annotated[int, typer.Option(min=1, help="Independent senders with separate bursts.")]


def command(
    model: Annotated[str, typer.Argument(help="A built-in name or shape, a .gguf file, a directory, or a hub id.")],
    gpu: Annotated[list[str] | None, typer.Option(help="A product name or a preset file. Repeatable.")] = None,
    users: Annotated[int | None, typer.Option(min=1, help="Users who ask, read, think, and ask again.")] = None,
    think: Think = THINK,
    rate: Annotated[float | None, typer.Option(help="Requests per second of the whole service.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Requests at recorded times, in any format that bench serve --trace reads.")
    ] = None,
    speed: Annotated[float, typer.Option(help="Factor by which a trace is replayed faster.")] = 1.0,
    trace_start: Annotated[float | None, typer.Option(help="Second of a trace at which to begin.")] = None,
    requests: Annotated[
        int | None, typer.Option(min=50, help="Requests to simulate; default: 400, or 2000 of a trace.")
    ] = None,
    prompt_tokens: PromptTokens = LENGTHS[0],
    output_tokens: OutputTokens = LENGTHS[1],
    turns: Turns = 1.0,
    system_tokens: SystemTokens = 0,
    burstiness: Burstiness = 1.0,
    clients: Clients = 1,
    target: Annotated[
        str, typer.Option(help="Percentiles to keep: ttft, itl, tpot, e2e, as in the default.")
    ] = "ttft.p99=1s,itl.p99=50ms",
    tp: Annotated[str, typer.Option("--tp", help="Cards of an engine that share each layer, to try.")] = "1,2,4,8",
    pp: Annotated[str, typer.Option("--pp", help="Stages of layers, to try.")] = "1",
    quantization: Annotated[str, typer.Option(help="Formats of weights to try: bf16, fp8, int4.")] = "bf16,fp8",
    kv_cache_dtype: Annotated[str, typer.Option(help="Formats of the KV cache to try: auto, fp8, int8.")] = "auto",
    context: Annotated[
        int | None, typer.Option(min=2, help="Longest prompt and answer together; default: as needed, at least 8192.")
    ] = None,
    price: Annotated[
        list[str] | None, typer.Option(help="Dollars per hour of a card: 3.5, or h200=3.5 of several.")
    ] = None,
    speculative_config: Annotated[
        str | None, typer.Option(help="Speculative decoding, as of serve: JSON. Needs --acceptance.")
    ] = None,
    acceptance: Annotated[
        float | None, typer.Option(help="Chance that a draft is right if those before it are, 0 to 1.")
    ] = None,
    simulate: Annotated[int, typer.Option(min=1, help="Number of candidates to simulate, cheapest first.")] = 3,
    profile: Annotated[
        Path | None, typer.Option(help="A server as `transect plan calibrate` measured it, in place of cards.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of lengths and arrivals.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON; levels have the keys of bench serve.")] = False,
    page: Annotated[Path | None, output_file(help="Write a page with curves to this file (.html).")] = None,
) -> int:
    """Find the GPUs, layout and formats for a load and a latency target, with costs and limits.

    Runs the shipping scheduler on a virtual clock; nothing is loaded and no device is needed."""
    from dataclasses import replace
    from json import dumps, loads

    from ..bench.lengths import Lengths
    from ..bench.traces.mix import Mix
    from ..checkpoints.resolve import described
    from ..costs.presets import preset
    from ..engine.scheduling.drafters.registry import SpeculativeConfig
    from ..plan.choices import choices
    from ..plan.drafting import drafting_model
    from ..plan.page import page_of
    from ..plan.profile import MeasuredChoice, Profile
    from ..plan.report import as_json, lines
    from ..plan.serving import plan_serving
    from ..plan.target import LatencyTarget

    if sum(given is not None for given in (users, rate, trace)) != 1:
        raise ValueError("say how much is asked: give one of --users, --rate and --trace")
    wanted = LatencyTarget.parse(target)
    source = described(model)
    measured = None if profile is None else MeasuredChoice.of(Profile.read(profile))
    cards = [preset(name) for name in gpu or ["h200"]] if measured is None else [measured.card]
    prices = _prices(price or [], [card.name for card in cards])
    most = source.config.max_position if measured is None else measured.engine.scheduler.max_model_len
    mix = Mix(
        prompt=Lengths.parse(prompt_tokens), output=Lengths.parse(output_tokens), burstiness=burstiness,
        clients=clients, turns=turns, think=think, system=system_tokens, longest=min(context or CONTEXT, most),
    )  # fmt: skip
    demand, asked = _demand(mix, users, think, rate, trace, speed, trace_start, requests, seed)
    if (speculative_config is None) != (acceptance is None):
        raise ValueError("--speculative-config and --acceptance belong together: give both, or neither")
    if speculative_config is not None and acceptance is not None:
        speculation = SpeculativeConfig.of(loads(speculative_config))
        draft = drafting_model(speculation, source.config)
        demand = replace(demand, speculation=(speculation, acceptance), draft=draft)
    needed = max(each.prompt_tokens + each.output_tokens for each in asked)
    context = context or min(most, max(CONTEXT, needed))
    if needed > context:
        raise ValueError(f"a request has {needed} tokens and the context {context}: give --context, or shorter lengths")
    ways: list[tuple[Any, str]] = [] if measured is None else [(measured, "")]
    if measured is None:
        ways += choices(
            source.config, cards, tensor=_numbers(tp, "--tp"), pipeline=_numbers(pp, "--pp"),
            weights=_words(quantization), caches=_words(kv_cache_dtype), context=context,
        )  # fmt: skip
    plan = plan_serving(ways, demand, wanted, prices=prices, simulated=simulate)
    asks = f"{users} users, {think:g} s of thinking" if users else f"{demand.rate:.2f} requests/s"
    how = "from data sheets and coefficients of an H200, not measured" if measured is None else f"from {profile}"
    title = f"serving {source.name} to {asks}: predicted {how}"
    if json:
        settings = {"model": source.name, "seed": seed, "trace": None if trace is None else str(trace)}
        settings |= {"users": users, "think": think, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
        print(dumps(as_json(plan, settings), indent=1))
    else:
        print("\n".join(lines(plan, title)))
    if page is not None:
        page.write_text(page_of(plan, title))
    return 0


def _demand(
    mix: Mix,
    users: int | None,
    think: float,
    rate: float | None,
    trace: Path | None,
    speed: float,
    start: float | None,
    requests: int | None,
    seed: int,
) -> tuple[Demand, list[Asked]]:
    """Make the load of the service, and a sample of its requests."""
    from ..bench.traces.asked import faster, rate_of
    from ..bench.traces.reading import read_trace
    from ..plan.capacity import MixLoad, TraceLoad
    from ..plan.requests import shared_tokens
    from ..plan.serving import Demand

    if trace is None:
        load = MixLoad(mix, requests or 400, most=max(3000, requests or 0), seed=seed)
        asked = load.at(1.0)
        hits = shared_tokens(asked)
        return Demand(load=load, rate=rate or 0.0, users=users or 0, think=think, hits=hits), asked
    asked = faster(read_trace(trace, limit=requests or 2000, start=start, seed=seed), speed)
    return Demand(load=TraceLoad(asked), rate=rate_of(asked), fleet=True, hits=shared_tokens(asked)), asked


def _prices(given: list[str], cards: list[str]) -> dict[str, float]:
    from ..costs.presets import preset

    found: dict[str, float] = {}
    for text in given:
        name, separator, value = text.rpartition("=")
        if not separator and len(cards) > 1:
            raise ValueError(f"--price {text} names no card: give --price {cards[0]}={text}")
        try:
            found[preset(name).name if separator else cards[0]] = float(value)
        except ValueError as error:
            raise ValueError(f"--price {text!r} is not a price: give --price {cards[0]}=3.50 ({error})") from None
    missing = [card for card in cards if card not in found]
    if found and missing:
        raise ValueError(f"--price of {', '.join(missing)} is missing: give it too, or no price at all")
    return found


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise ValueError(f"{option} {text!r} must be numbers with commas between them, such as 1,2,4") from None
