"""Sources of options besides the command line (a file, the environment), and the groups in which options are shown.

An option's value is what the command line says; else what its environment variable says (``TRANSECT_SERVE_PORT`` for
``transect serve --port``); else what the file of ``--config`` says; else its default.
"""

from __future__ import annotations

import difflib
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from .environment import unknown_variables, warning

COMMANDS = {
    "Run": {
        "serve": "Serve a model over HTTP as OpenAI's API does.",
        "chat": "Talk to a model.",
        "generate": "Continue a prompt.",
        "reload": "Replace the engines of a running server.",
        "cluster": "Run a fleet of replicas on many machines.",
        "demo": "Stream eight chats from a server at once.",
        "drill": "Kill a replica in the middle of answers, and compare every byte.",
        "top": "Show what a server does now.",
    },
    "Make": {
        "train": "Train a model.",
        "sweep": "Train over a grid of settings.",
        "data": "Prepare what models are trained on.",
        "flow": "Make, judge, release and watch a model.",
        "export": "Write a run's adapter or model for other programs.",
        "quantize": "Write a model in fewer bits.",
        "pull": "Fetch a model.",
        "models": "List models.",
    },
    "Measure": {
        "bench": "Measure an engine, a server or operators against the floor.",
        "eval": "Measure how well a model predicts text and does tasks.",
        "hardware": "Show what this machine can do.",
        "memory": "Account for memory before anything runs.",
        "plan": "Find the best way to spread a run over devices.",
        "tune": "Find the fastest kernels for this device.",
    },
    "Look inside": {
        "learn": "Build each part yourself, graded on this machine.",
        "explain": "Show where the time of requests and programs goes.",
        "roofline": "Show what a device allows a model.",
        "plot": "Draw the curves of training runs.",
        "board": "Show training runs and reports in the browser.",
        "inspect": "Show what an operator's kernels compile to.",
        "trace": "Follow a kernel through Triton's interpreter.",
    },
}
"""Commands by group, each with a short description. Each is a module of this folder."""

WORDS = "transect.words"
"""Key of a context's ``meta``: the words of its command line."""

SPREAD = {"lora_modules": lambda word: "=" in word or word.startswith("{")}
"""Options that take several values after one flag, as vLLM's do: parameter to a test of words that are values."""

ARGUMENTS, REST = "Arguments", "Options"
"""Names of the groups for arguments and for options without a group."""


class Command(TyperCommand):
    """A command whose help shows options in groups, and the other sources of their values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the flags of ``SPREAD`` before each of their values, which is the form that click knows."""
        ctx.meta[WORDS] = tuple(args)
        flags = {flag: SPREAD[param.name] for param in self.params if param.name in SPREAD for flag in param.opts}
        spread: list[str] = []
        flag, values = "", 0
        for word in args:
            if word in flags:
                flag, values = word, 0
            elif flag and (values == 0 or flags[flag](word)):
                spread += [flag] if values else []
                values += 1
            else:
                flag = ""
            spread.append(word)
        try:
            return list(super().parse_args(ctx, spread))
        except Exception as error:
            flag = str(getattr(error, "option_name", ""))  # of an option that does not exist
            if given := _replacement(_named(flag).removeprefix("no_")):
                raise ValueError(f"{flag} was removed: give --{given.replace('_', '-')}") from None
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command, after a warning for each unknown variable of the environment."""
        commands = [name for group in COMMANDS.values() for name in group]
        for found in unknown_variables(os.environ, ctx, commands):
            print(warning(*found), file=sys.stderr)
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then each group of options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if hasattr(param, "show_envvar"):
                param.show_envvar = False  # `docs/serve/settings.md` has the rule
            record = param.get_help_record(ctx)
            if record is not None:
                plain = ARGUMENTS if param.param_type_name == "argument" else REST
                groups.setdefault(getattr(param, "rich_help_panel", None) or plain, []).append(record)
        first, last = groups.pop(ARGUMENTS, []), groups.pop(REST, [])
        for title, records in ((ARGUMENTS, first), *groups.items(), (REST, last)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class CommandGroup(TyperGroup):
    """A command of commands, which shows the whole first sentence of each."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options, then commands."""
        for param in self.get_params(ctx):
            if hasattr(param, "show_envvar"):
                param.show_envvar = False
        super().format_options(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each group of commands with their descriptions."""
        for title, commands in self.described(ctx).items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))

    def described(self, ctx: Any) -> dict[str, dict[str, str]]:
        """Return the commands and their descriptions by heading."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        return {"Commands": {name: each.get_short_help_str(1000) for name, each in commands if each}}


class LazyGroup(CommandGroup):
    """The command of all commands; a module is imported when its command is looked up."""

    def list_commands(self, ctx: Any) -> list[str]:
        """List the names of all commands, by group."""
        return [name for group in COMMANDS.values() for name in group]

    def get_command(self, ctx: Any, name: str) -> Any:
        """Import and return the command of this name; None if there is none."""
        if name not in self.list_commands(ctx):
            return None
        module = import_module(f".{name}", __package__)
        application = getattr(module, "application", None)
        if application is not None:
            application.info.name, application.info.cls = name, CommandGroup
            return typer.main.get_group(application)
        application = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        application.command(name, cls=Command)(module.command)
        return typer.main.get_command(application)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; an unknown name is an error with the nearest one, without an import of the others."""
        if args[0] not in self.list_commands(ctx) and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], self.list_commands(ctx))
            hint = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def described(self, ctx: Any) -> dict[str, dict[str, str]]:
        """Return ``COMMANDS``."""
        return COMMANDS


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values in the file the command's defaults."""
    if path is not None and not context.resilient_parsing:
        params = {_named(flag): param for param in context.command.params for flag in param.opts}
        values = {}
        for key, value in load_config(path).items():
            name = str(key).replace("-", "_")
            param = params.get(name)
            if param is None or name in ("config", "help"):
                if given := _replacement(name):
                    raise ValueError(f"{path}: {key} was removed: give {given}")
                near = difflib.get_close_matches(name, params, n=1)
                hint = f"; did you mean {near[0].replace('_', '-')!r}?" if near else ""
                raise ValueError(f"{path}: {context.command_path} has no option {key!r}{hint}")
            if value is not None:
                values[str(param.name)] = _as_option(value, bool(getattr(param, "multiple", False)))
        context.default_map = {**(context.default_map or {}), **values}
    return path


def _named(flag: str) -> str:
    """Convert ``--max-num-seqs`` to ``max_num_seqs``."""
    return flag.lstrip("-").replace("-", "_")


def _replacement(name: str) -> str:
    """Name the setting that replaces one of an earlier version; empty if it is none."""
    from ..engine.config import EngineConfig

    return EngineConfig.REPLACED.get(name, "")


def _as_option(value: Any, several: bool) -> Any:
    """Convert a value of the file to the form of the command line."""
    if isinstance(value, dict):
        import json

        return json.dumps(value)
    if several:
        return [str(each) for each in value] if isinstance(value, list) else [str(value)]
    return value


def load_config(path: Path) -> dict[str, Any]:
    """Read option names and values from a YAML file, or a TOML file by its suffix.

    Raises:
        ValueError: it cannot be read, or does not hold a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--config {path} cannot be read ({reason}): give a YAML or TOML file") from None
    try:
        if path.suffix.lower() == ".toml":
            import tomllib

            values: Any = tomllib.loads(text)
        else:
            import yaml

            values = yaml.safe_load(text)
    except Exception as error:  # each library has errors of its own
        raise ValueError(f"--config {path} is not valid {path.suffix[1:] or 'YAML'} ({error})") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"--config {path} must hold option names and values, such as `port: 8000`")
    return values


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A YAML or TOML file of options: `port: 8000`. The command line and the environment override it.",
        is_eager=True,
        callback=_read_config,
        allow_from_autoenv=True,
    ),
]


def _writable(context: typer.Context, file: Path | None) -> Path | None:
    """Create the folder of an output file, and check before the run that the file can be written."""
    if file is None or context.resilient_parsing:
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        reason = "a file has the path of its folder"
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        reason = "it is a folder" if file.is_dir() else ""
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            reason = "no permission to write there"
    if reason:
        raise ValueError(f"{file} cannot be written ({reason}): choose another file")
    return file


def output_file(*names: str, help: str) -> Any:
    """Build an option that names an output file."""
    return typer.Option(*names, help=help, callback=_writable)
