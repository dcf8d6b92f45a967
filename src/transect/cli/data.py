"""``transect data``: prepare training data, and inspect it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .engine_options import WHERE_IT_RUNS, engine_config, engine_settings, takes
from .searching import Branches, BudgetOption, SearchName, SearchOptions, VerifierPlaces, read_search

if TYPE_CHECKING:
    from rich.text import Text

    from ..text.tokenizer import Tokenizer
    from ..train.data.batches import Batch

MARKS = ("[[", "]]")
"""Marks around trained text in output without colours."""

AT_ONCE = 64
"""Answers that are drawn at the same time."""

Columns = Annotated[
    list[str] | None, typer.Option(metavar="KEY=HEADER", help="As data.columns of a run: question=Frage. Repeatable.")
]

application = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@application.callback()
def data() -> None:
    """Check, tokenize and show training data."""


@application.command()
def tokenize(
    inputs: Annotated[list[Path], typer.Argument(help="Text, JSON, JSON lines, CSV or parquet files, or datasets.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The token file, a directory ending in .tokens.")],
    model: Annotated[str, typer.Option(help="Whose tokenizer and chat template to use.")] = "smollm2-135m",
    workers: Annotated[int | None, typer.Option(help="Processes; default: one per core.")] = None,
    chat_template: Annotated[str, typer.Option(help="As data.chat_template of a run.")] = "auto",
    turns: Annotated[str, typer.Option(help="As data.turns of a run: auto, together or apart.")] = "auto",
    columns: Columns = None,
) -> None:
    """Tokenize files on all cores into a token file for training. Run it again to resume."""
    from rich.console import Console
    from rich.progress import Progress

    from ..train.config import DataConfig
    from ..train.config.parse import build
    from ..train.data.tokenize import tokenize

    chats = build(DataConfig, {"chat_template": chat_template, "turns": turns, "columns": _named(columns)}, "--")
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenizing")
        tokens, documents = tokenize(
            inputs,
            output,
            model,
            workers=workers,
            chats=chats,
            progress=lambda d, t: bar.update(task, completed=d, total=t),
            tell=lambda said: console.print(said, markup=False, highlight=False, soft_wrap=True),
        )
    print(f"{output}: {tokens:,} tokens in {documents:,} documents")


@application.command()
def check(
    inputs: Annotated[list[str], typer.Argument(help="Files and directories, as data.train names them.")],
    model: Annotated[str, typer.Option(help="Whose tokenizer and chat template to use.")] = "smollm2-135m",
    chat_template: Annotated[str, typer.Option(help="As data.chat_template of a run.")] = "auto",
    columns: Columns = None,
) -> None:
    """List each file's layout, rows, unusable rows with reasons, and unused keys. Exit 1 if
    any row is unusable."""
    from rich.console import Console
    from rich.table import Table

    from ..checkpoints.resolve import resolve
    from ..text.tokenizer import Tokenizer
    from ..train.config import DataConfig
    from ..train.data.chat import run_template
    from ..train.data.checks import check_files

    source = resolve(model)
    tokenizer = Tokenizer.from_source(source)
    if not isinstance(tokenizer, Tokenizer):
        raise ValueError(f"{model} brings no tokenizer: give a model that does")
    table = Table("file", "layout", "trained on", "rows", "tokens", "left out, and why")
    bad, unread = False, []
    template = run_template(
        source, tokenizer, DataConfig(chat_template=chat_template), lambda said: Console().print(said)
    )
    for found in check_files(inputs, tokenizer, template, _named(columns)):
        bad |= bool(found.problems)
        table.add_row(
            found.name, found.layout, found.trained, str(found.rows), str(found.tokens), "\n".join(found.problems)
        )
        if found.unread:
            unread.append(f"{found.name}: {found.unread}")
    Console().print(table, markup=False)
    for line in unread:
        Console().print(line, markup=False, highlight=False, soft_wrap=True)
    if bad:
        raise typer.Exit(1)


@application.command()
def show(
    config: Annotated[Path, typer.Argument(help="The TOML file of a run.")],
    batch: Annotated[int, typer.Option(min=0, help="Number of the micro-batch in the first epoch.")] = 0,
) -> None:
    """Show a packed micro-batch of a run as text, with the trained tokens highlighted."""
    from rich.console import Console

    from ..text.tokenizer import Tokenizer
    from ..train.config import TrainConfig
    from ..train.data.chat import run_template
    from ..train.data.loader import Loader, Position, load_stream
    from ..train.data.streaming import StreamingLoader
    from ..train.model.build import source_of

    settings = TrainConfig.from_toml(config)
    if settings.objective != "next_token":
        raise ValueError(
            f'transect data show is for objective = "next_token", not {settings.objective!r}: look at the rows with '
            "transect data check FILES"
        )
    source = source_of(settings)
    tokenizer = Tokenizer.from_source(source)
    if not isinstance(tokenizer, Tokenizer):
        raise ValueError(f"{settings.model} brings no tokenizer: give a model that does")
    console = Console()

    def tell(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    data, vocab_size = settings.data, source.config.vocab_size
    template = run_template(source, tokenizer, data, tell)
    loader: Loader | StreamingLoader
    if data.streaming:
        loader = StreamingLoader(data, settings.seed, vocab_size, tokenizer, template, tell=tell)
    else:
        reading: dict[str, Any] = {
            "skip": data.on_bad_row == "skip",
            "turns": data.turns,
            "columns": data.columns,
        }
        stream = load_stream(data.train, vocab_size, tokenizer, template, **reading, tell=tell)
        loader = Loader(stream, data, settings.seed)
    loader.position = Position(0, batch)
    for text in _documents(next(loader), tokenizer, *(("", "") if console.color_system else MARKS)):
        console.print(text, soft_wrap=True)


@application.command()
@takes(*engine_settings(*WHERE_IT_RUNS, "adapter", "max_model_len"))
def sample(
    inputs: Annotated[list[str], typer.Argument(help="Files of rows with a prompt, and perhaps an answer.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File of JSON lines to write.")],
    search: SearchName = "majority",
    model: Annotated[str, typer.Option(help="The model that answers.")] = "smollm2-135m",
    for_: Annotated[
        str, typer.Option("--for", metavar="dpo|grpo|sft", help="Objective that the rows are for.")
    ] = "dpo",
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="Temperature of the answers.")] = 0.8,
    seed: Annotated[int | None, typer.Option(help="Seed, for repeatable answers.")] = None,
    columns: Columns = None,
    n: Branches = None,
    budget: BudgetOption = None,
    search_options: SearchOptions = None,
    verifier: VerifierPlaces = None,
    **settings: Any,
) -> None:
    """Draw training data by searching answers to prompts: pairs for DPO, prompts with answers for GRPO, or chats."""
    from ..engine.frontends.llm import LLM
    from ..engine.scheduling.sampling_params import SamplingParams
    from ..search.local import search_locally
    from ..search.rows import KINDS, row_of
    from ..text.inert import chat_tokens
    from ..train.data.layouts import prompt_of
    from ..train.objectives.rewards import read_prompts

    kind = next((each for each in KINDS if each == for_), None)
    if kind is None:
        raise ValueError(f"--for takes {', '.join(KINDS)}, not {for_!r}")
    asked, judges = read_search(search, n, budget, search_options, verifier)
    assert asked is not None
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    config = engine_config(model, **settings, max_num_seqs=max(AT_ONCE, asked.options.n))
    llm = LLM(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
    template = llm.chat_template
    if template is None:
        raise ValueError(f"{model} brings no chat template: give a model that does")
    prompts = read_prompts(
        inputs, lambda said, _: chat_tokens(template, llm.tokenizer, said)[1], setting="INPUTS", columns=_named(columns)
    )
    group, rows, tokens = max(AT_ONCE // asked.options.n, 1), 0, 0
    with output.open("w", encoding="utf-8") as file:
        for start in range(0, len(prompts), group):
            records = [record for record, _ in prompts[start : start + group]]
            said = [prompt_of(record)[0] for record in records]
            for record, result in zip(records, search_locally(llm, said, asked, params, judges=judges), strict=True):
                tokens += result.drawn
                row = row_of(result, record, kind)
                if row is not None:
                    rows += 1
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{output}: {rows:,} rows for {kind} from {len(prompts):,} prompts, {tokens:,} tokens drawn")


def _named(columns: list[str] | None) -> dict[str, str]:
    """Parse ``KEY=HEADER`` options to ``data.columns``. Raises ValueError for one without ``=``."""
    pairs = [each.partition("=") for each in columns or ()]
    if strange := [key for key, equals, _ in pairs if not equals]:
        raise ValueError(f"--columns takes KEY=HEADER, such as question=Frage, not {strange[0]!r}")
    return {key: header for key, _, header in pairs}


def _documents(batch: Batch, tokenizer: Tokenizer, before: str, after: str) -> list[Text]:
    """Return the documents of a micro-batch; trained text is bold green, and between ``before`` and ``after``."""
    from rich.text import Text

    from ..train.data.batches import IGNORE

    bounds = batch.cu_seqlens.tolist()
    made = []
    for number, (first, last) in enumerate(itertools.pairwise(bounds), 1):
        labels = [IGNORE, *batch.labels_T[first : last - 1].tolist()]
        counted = sum(label != IGNORE for label in labels)
        legend = f", in {before} {after}" if before and counted else ""
        text = Text(f"--- document {number}: {last - first} tokens, {counted} trained on{legend}\n", style="cyan")
        told = zip(batch.tokens_T[first:last].tolist(), labels, strict=True)
        for trained, run in itertools.groupby(told, key=lambda each: each[1] != IGNORE):
            piece = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
            text.append(f"{before}{piece}{after}" if trained else piece, style="bold green" if trained else "dim")
        made.append(text)
    return made
