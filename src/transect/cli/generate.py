"""``transect generate``: continue one prompt, shown as it comes."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from .engine_options import WHERE_IT_RUNS, ModelArgument, engine_config, engine_settings, takes
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

SEARCH_TEMPERATURE = 0.8
"""Temperature of branches, if none is given."""


@takes(*engine_settings(*WHERE_IT_RUNS, "adapter", "max_model_len"))
def command(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of the answer.")] = 256,
    temperature: Annotated[
        float | None, typer.Option(help="0 always takes the most likely token. Default: 0; 0.8 with --search.")
    ] = None,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens with this total probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from this number of most likely tokens; 0: from all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed, for repeatable answers.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")] = None,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the model's chat template.")] = False,
    parse_special: Annotated[bool, typer.Option(help="Read special tokens in the prompt, such as <|im_end|>.")] = True,
    search: SearchName = None,
    n: Branches = None,
    budget: BudgetOption = None,
    search_options: SearchOptions = None,
    verifier: VerifierPlaces = None,
    config: ConfigFile = None,
    **settings: Any,
) -> None:
    """Continue a prompt. The text goes to standard output, its speed to standard error."""
    from ..engine.scheduling.sampling_params import SamplingParams
    from ..text.inert import chat_tokens
    from ..text.template_worker import TemplateApart
    from .session import EngineSession

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise ValueError("the prompt is empty: give at least one character")
    asked, judges = read_search(search, n, budget, search_options, verifier)
    if temperature is None:
        temperature = 0.0 if asked is None else SEARCH_TEMPERATURE
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
    )
    with EngineSession(engine_config(model, **settings, max_num_seqs=sequences(asked))) as session:
        engine = session.engine
        messages, render = None, None
        if chat:
            if engine.chat_template is None:
                raise ValueError(f"{model} brings no chat template: leave --chat out")
            template = TemplateApart(engine.chat_template)
            messages = [{"role": "user", "content": text}]

            def render(said: Any) -> list[int]:
                return chat_tokens(template, engine.tokenizer, said)[1]

            token_ids = render(messages)
        else:
            token_ids = engine.tokenizer.encode(text, add_special_tokens=True, parse_special=parse_special)
        if asked is None:
            speed = str(session.run(session.stream(token_ids, params, _show))[1])
        else:
            shown = ShownSearch()
            more: dict[str, Any] = {"messages": messages, "question": text, "judges": judges, "render": render}
            found = session.run(session.search(asked, token_ids, params, **more, show=shown.progress))
            speed = shown.end(found)
            _show(found.text)
    print(flush=True)
    print(f"[{speed}; {engine.info.kernels}]", file=sys.stderr)


def _show(text: str) -> None:
    print(text, end="", flush=True)
