"""``transect demo``: the real server with eight concurrent chats."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .demo_view import DemoView, Gauges, Talk, summary
from .engine_options import BUILTIN, ModelArgument
from .settings import output_file

if TYPE_CHECKING:
    import httpx

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "How do plants make food?",
    "Tell me a fact about octopuses.",
    "What is a prime number?",
    "Explain gravity to a child.",
    "Name three uses for a paperclip.",
)
STOP_WAIT_S = 20.0


def command(
    model: ModelArgument = BUILTIN,
    max_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens of an answer.")] = 128,
    svg: Annotated[Path | None, output_file(help="Write a picture to this file.")] = None,
) -> None:
    """Start a server, stream eight chats at once in the terminal, and stop the server."""
    run(model, max_tokens, svg, ())


def run(
    model: str,
    max_tokens: int,
    svg: Path | None,
    options: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> None:
    """Run the demo.

    Args:
        options: further ones of ``transect serve``.
        environment: of the server; None for that of this process.
        sampling: parameters of each chat in place of the demo's.

    Raises:
        ValueError: a chat failed, or the server did.
    """
    from rich.console import Console

    from ..checkpoints.resolve import resolve
    from ..server.options import ServerOptions
    from .demo_picture import WIDTH, svg_of

    console = Console()
    resolve(model)
    console.print(f"starting the server with {model} ...", highlight=False, soft_wrap=True)
    with own_server(model, *options, environment=environment) as url:
        talks = [Talk(number, question) for number, question in enumerate(QUESTIONS, start=1)]
        gauges = Gauges()
        with DemoView(console, talks, gauges, picture_width=None if svg is None else WIDTH) as view:
            asyncio.run(_talk_all(url, talks, gauges, view, {"max_tokens": max_tokens} | dict(sampling or {})))
        table = summary(talks, gauges)
        console.print(table)
    if svg is not None:
        svg.write_text(svg_of([*view.pictures, "", table], "transect demo"), encoding="utf-8")
    console.print("the server has stopped cleanly", highlight=False)
    program = "transect" if shutil.which("transect") else sys.argv[0]
    page = f"http://{ServerOptions.host}:{ServerOptions.port}/"
    console.print(f"to chat in a browser: {program} serve {model}, then open {page}", highlight=False, soft_wrap=True)


@contextmanager
def own_server(model: str, *options: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run a server on a free port for the length of the block; yields its URL.

    Args:
        options: further ones of ``transect serve``.
        environment: of the server; None for that of this process.

    Raises:
        ValueError: it did not start, or did not stop cleanly.
    """
    arguments = [sys.executable, "-m", "transect", "serve", model, "--port", "0", *options]
    # A group of its own: Ctrl-C reaches this process alone, which then stops the server in good order.
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, process_group=0, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if " ready on " not in line:
            raise ValueError(f"the server did not start (exit code {process.wait()}); its own message is above")
        print(line.strip(), flush=True)
        yield line.split(" ready on ")[1].split()[0]
        process.terminate()
        code = process.wait(STOP_WAIT_S)
        if code != 0:
            raise ValueError(f"the server ended with exit code {code} instead of 0; its own message is above")
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_WAIT_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.kill()
                process.wait()


async def _talk_all(url: str, talks: list[Talk], gauges: Gauges, view: DemoView, sampling: Mapping[str, Any]) -> None:
    import httpx

    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        watcher = asyncio.create_task(_watch(client, gauges))
        try:
            async with asyncio.TaskGroup() as group:
                for talk in talks:
                    group.create_task(_talk(client, talk, view, sampling))
        except* ValueError as errors:
            raise errors.exceptions[0] from None
        finally:
            watcher.cancel()


async def _watch(client: httpx.AsyncClient, gauges: Gauges) -> None:
    while True:
        gauges.take((await client.get("/metrics")).text)
        await asyncio.sleep(0.2)


async def _talk(client: httpx.AsyncClient, talk: Talk, view: DemoView, sampling: Mapping[str, Any]) -> None:
    body = {
        "messages": [{"role": "user", "content": talk.question}],
        "temperature": 0.0,
        "repetition_penalty": 1.1,
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling,
    }
    talk.began = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise ValueError(f"the server answered {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _take(json.loads(line.removeprefix("data: ")), talk, view)
    view.finished(talk)


def _take(event: dict[str, Any], talk: Talk, view: DemoView) -> None:
    if "error" in event:
        raise ValueError(f"a chat failed: {event['error']['message']}")
    for choice in event["choices"]:
        text = choice["delta"].get("content")
        if text:
            first = talk.first_s is None
            talk.add(text)
            if first:
                view.started(talk)
        talk.finish_reason = choice["finish_reason"] or talk.finish_reason
    if event["usage"]:
        talk.tokens = event["usage"]["completion_tokens"]
