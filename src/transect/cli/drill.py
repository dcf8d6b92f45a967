"""``transect drill``: three replicas stream answers, one is killed, and every byte is compared with a calm run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .demo import own_server
from .engine_options import BUILTIN, ModelArgument
from .settings import output_file

if TYPE_CHECKING:
    import httpx
    from rich.table import Table

    from ..bench.same_answers import Answer

SHOWN = ("greedy", "sampled", "three choices with logprobs", "penalties", "stop strings", "a JSON schema")
BACK_WAIT_S = 300.0


def command(
    model: ModelArgument = BUILTIN,
    replicas: Annotated[int, typer.Option(min=2, help="Engines behind the server.")] = 3,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the replica (SIGSTOP), so that it hangs.")] = False,
    after: Annotated[float, typer.Option(min=0, help="Seconds of streaming before the signal.")] = 1.0,
    svg: Annotated[Path | None, output_file(help="Write a picture to this file.")] = None,
) -> int:
    """Start a server with replicas, stream answers, kill one replica in the middle, and compare every byte."""
    from rich.console import Console

    from ..checkpoints.resolve import resolve
    from .demo_picture import svg_of

    console = Console()

    def say(line: str) -> None:
        said.append(line)
        console.print(line, highlight=False, soft_wrap=True)

    said: list[Any] = []
    resolve(model)
    say(f"starting a server with {replicas} replicas of {model} ...")
    options = ("--data-parallel-size", str(replicas), "--kv-cache-tokens", "8192", "--no-prefix-caching")
    with own_server(model, *options, "--hung-after", "2") as url:
        calm, disturbed = asyncio.run(_drill(url, "STOP" if stop else "KILL", after, say))
    table = _table(calm, disturbed)
    same = sum(answer.same_as(calm[kind]) for kind, answer in disturbed.items())
    pauses = [max(each.longest_gap_s for each in answers.values()) for answers in (calm, disturbed)]
    verdict = (
        f"{same} of {len(disturbed)} answers have the same bytes; the longest pause within a stream was "
        f"{pauses[1]:.2f} s, and {pauses[0]:.2f} s without the signal"
    )
    console.print(table)
    console.print(verdict, highlight=False, soft_wrap=True)
    if svg is not None:
        svg.write_text(svg_of([*said, "", table, "", verdict], "transect drill"), encoding="utf-8")
    console.print("the server has stopped cleanly", highlight=False)
    return 0 if same == len(disturbed) else 1


async def _drill(url: str, how: str, after: float, say: Any) -> tuple[dict[str, Answer], dict[str, Answer]]:
    import httpx

    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        say(f"{len(SHOWN)} streams at once, undisturbed")
        calm = await _round(client, None)
        health = (await client.get("/health")).json()
        pid = health["engine_pids"][0]

        async def hit() -> None:
            await asyncio.sleep(after)
            os.kill(pid, getattr(signal, f"SIG{how}"))
            say(f"the same streams again; after {after:g} s: kill -{how} {pid}")

        hitting = asyncio.create_task(hit())
        began = time.perf_counter()
        disturbed = await _round(client, hitting)
        say(f"all streams have ended, {time.perf_counter() - began:.1f} s after their begin")
        while not (detail := (await client.get("/health")).json()["detail"] or "").startswith("all "):
            if time.perf_counter() - began > BACK_WAIT_S:
                raise ValueError(f"the replica did not come back within {BACK_WAIT_S:g} s: {detail}")
            await asyncio.sleep(0.1)
        say(f"{detail} again, {time.perf_counter() - began - after:.1f} s after the signal")
    return calm, disturbed


async def _round(client: httpx.AsyncClient, hitting: asyncio.Task[None] | None) -> dict[str, Answer]:
    from ..bench.same_answers import KINDS, ask

    answers = await asyncio.gather(*(ask(client, *KINDS[kind]) for kind in SHOWN))
    if hitting is not None:
        if not hitting.done():
            hitting.cancel()
            raise ValueError("all streams had ended before the signal: give a smaller --after")
        await hitting
    return dict(zip(SHOWN, answers, strict=True))


def _table(calm: dict[str, Answer], disturbed: dict[str, Answer]) -> Table:
    from rich.table import Table

    table = Table(caption="pause: the longest between two events of a stream, in both rounds", caption_justify="left")
    table.add_column("stream", no_wrap=True)
    table.add_column("its beginning", no_wrap=True)
    for name in ("pause", "when hit", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind, answer in disturbed.items():
        same = answer.same_as(calm[kind])
        gaps = (f"{each.longest_gap_s:.2f} s" for each in (calm[kind], answer))
        table.add_row(kind, repr(answer.text[:8]), *gaps, "same" if same else "DIFFER")
    return table
