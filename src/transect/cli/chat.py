"""``transect chat``: talk to a model in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Any

import typer

from .engine_options import BUILTIN, WHERE_IT_RUNS, ModelArgument, engine_config, engine_settings, takes
from .searching import (
    Branches,
    BudgetOption,
    SearchName,
    SearchOptions,
    ShownSearch,
    VerifierPlaces,
    read_search,
    sequences,
)
from .settings import ConfigFile

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves"


@takes(*engine_settings(*WHERE_IT_RUNS, "adapter", "max_model_len"))
def command(
    model: ModelArgument = BUILTIN,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.")] = 512,
    temperature: Annotated[
        float | None, typer.Option(help="0 always takes the most likely token. Default: the model's, or 0.7.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the most likely tokens with this total probability. Default: the model's, or 0.95."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed, for repeatable answers.")] = None,
    search: SearchName = None,
    n: Branches = None,
    budget: BudgetOption = None,
    search_options: SearchOptions = None,
    verifier: VerifierPlaces = None,
    config: ConfigFile = None,
    **settings: Any,
) -> None:
    """Chat with a model in the terminal."""
    from ..engine.scheduling.sampling_params import SamplingParams
    from ..text.inert import chat_tokens
    from ..text.template_worker import TemplateApart
    from .session import EngineSession

    asked: dict[str, Any] = {"temperature": temperature, "top_p": top_p}
    given = {name: value for name, value in asked.items() if value is not None}
    SamplingParams(max_tokens=max_tokens, seed=seed, **given)  # says what is wrong before a model is loaded
    searched, judges = read_search(search, n, budget, search_options, verifier)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives input() line editing and history)
    with EngineSession(engine_config(model, **settings, max_num_seqs=sequences(searched))) as session:
        engine = session.engine
        template = engine.chat_template
        if template is None:
            raise ValueError(f"{model} brings no chat template: use `transect generate`")
        apart = TemplateApart(template)
        defaults: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95, **engine.sampling_defaults.values}
        params = SamplingParams(max_tokens=max_tokens, seed=seed, **(defaults | given))
        print(f"{model}, {engine.info.kernels}. {HELP}.")

        def render(said: Any) -> list[int]:
            return chat_tokens(apart, engine.tokenizer, said)[1]

        opening = [{"role": "system", "content": system}] if system else []
        messages = list(opening)
        while (line := _read()) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(opening)
                print("[forgotten]")
                continue
            if line.startswith("/"):
                print(f"[{HELP}]")
                continue
            if not line:
                continue
            messages.append({"role": "user", "content": line})
            token_ids = render(messages)
            if len(token_ids) >= engine.max_model_len:
                messages.pop()
                print(f"[the context of {engine.max_model_len} tokens is full: /reset, or ask something shorter]")
                continue
            if searched is not None:
                shown = ShownSearch()
                more: dict[str, Any] = {"messages": list(messages), "question": line, "judges": judges}
                work = session.search(searched, token_ids, params, **more, render=render, show=shown.progress)
                found = session.run(work)
                messages.append({"role": "assistant", "content": found.text})
                print(f"{found.text}\n[{shown.end(found)}]")
                continue
            text, speed = session.run(session.stream(token_ids, params, _show))
            messages.append({"role": "assistant", "content": text})
            cut = ", cut at --max-tokens or the context" if speed.finish_reason == "length" else ""
            print(f"\n[{speed}{cut}]")


def _read() -> str | None:
    """Read a line from the user; None at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
