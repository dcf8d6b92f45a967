"""``transect bench``: how fast this machine runs a model. Sub-commands look at one side each."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .engine_options import BUILTIN, Dtype, Native, Threads, engine_config

if TYPE_CHECKING:
    from ..engine.config import EngineConfig
    from .session import Session, Speed

application = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Quick benchmarks on this machine.")

Model = Annotated[str, typer.Option(help="As for the other commands.")]
PromptTokens = Annotated[int, typer.Option(min=1, help="Random prompt tokens of each request.")]
NewTokens = Annotated[int, typer.Option(min=2, help="Tokens drawn for each request.")]
Runs = Annotated[int, typer.Option(min=1, help="Measured runs, after one that warms up; the median is shown.")]


@application.command("latency")
def latency(
    model: Model = BUILTIN,
    prompt_tokens: PromptTokens = 512,
    new_tokens: NewTokens = 64,
    runs: Runs = 3,
    dtype: Dtype = "auto",
    threads: Threads = None,
    native: Native = None,
) -> None:
    """One request at a time: TTFT, prefill and decode speed."""
    config = engine_config(
        model, dtype=dtype, threads=threads, native=native, enable_prefix_caching=False, max_num_seqs=1
    )
    _report(config, [1], prompt_tokens, new_tokens, runs)


@application.command("throughput")
def throughput(
    model: Model = BUILTIN,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Requests at once; may be given again.")] = None,
    prompt_tokens: PromptTokens = 128,
    new_tokens: NewTokens = 64,
    runs: Runs = 3,
    dtype: Dtype = "auto",
    threads: Threads = None,
    native: Native = None,
) -> None:
    """Several requests at once: prefill and decode speed of all together. By default 1 and 16 of them."""
    batches = batch or [1, 16]
    config = engine_config(
        model, dtype=dtype, threads=threads, native=native, enable_prefix_caching=False, max_num_seqs=max(batches)
    )
    _report(config, batches, prompt_tokens, new_tokens, runs)


def _report(config: EngineConfig, batches: list[int], prompt_tokens: int, new_tokens: int, runs: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from .session import Session

    console = Console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("requests", "prefill tok/s", "TTFT s", "decode tok/s", "min - max"):
        table.add_column(name, justify="right")
    with Session(config) as session:
        if prompt_tokens + new_tokens > session.engine.max_model_len:
            limit = session.engine.max_model_len
            raise ValueError(f"--prompt-tokens and --new-tokens together must be at most {limit}, the model's context")
        console.print(f"{config.model}, {session.engine.info.kernels}", highlight=False, soft_wrap=True)
        for batch in batches:
            results = [_measure(session, batch, prompt_tokens, new_tokens, seed) for seed in range(runs + 1)][1:]
            table.add_row(str(batch), *_row(results, batch * prompt_tokens, batch))
    console.print(table)
    console.print(
        f"{prompt_tokens} prompt tokens and {new_tokens} new ones for each request; median of {runs} runs",
        highlight=False,
        soft_wrap=True,
    )


def _row(results: list[list[Speed]], prompt_tokens: int, batch: int) -> tuple[str, ...]:
    def median(of: Callable[[list[Speed]], float]) -> float:
        return statistics.median(of(speeds) for speeds in results)

    decode = [_decode_rate(speeds) for speeds in results]
    return (
        f"{median(lambda speeds: prompt_tokens / max(speed.first_s for speed in speeds)):.0f}",
        f"{median(lambda speeds: statistics.mean(speed.first_s for speed in speeds)):.3f}",
        f"{statistics.median(decode):.0f}",
        f"{min(decode):.0f} - {max(decode):.0f}",
    )


def _decode_rate(speeds: list[Speed]) -> float:
    """Tokens per second of all requests together, each counted from its own first token to its last."""
    return sum(speed.per_second for speed in speeds)


def _measure(session: Session, batch: int, prompt_tokens: int, new_tokens: int, seed: int) -> list[Speed]:
    """Run ``batch`` requests with random prompts at once."""
    import asyncio
    import random

    from ..engine.sampling_params import SamplingParams

    random_numbers = random.Random(seed)
    vocabulary = range(session.engine.vocab_size)
    params = SamplingParams(max_tokens=new_tokens, min_tokens=new_tokens, temperature=0.0, ignore_eos=True)

    async def all_at_once() -> list[Any]:
        prompts = [random_numbers.choices(vocabulary, k=prompt_tokens) for _ in range(batch)]
        return await asyncio.gather(*(session.stream(prompt, params) for prompt in prompts))

    return [speed for _, speed in session.run(all_at_once())]
