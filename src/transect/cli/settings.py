"""Where options come from besides the command line, and how they are shown: a file, the environment, groups.

An option's value is what the command line says; else what its environment variable says (``TRANSECT_SERVE_PORT`` for
``transect serve --port``); else what the file of ``--config`` says; else its default.
"""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .environment import unknown_variables, warning

SPREAD = {"lora_modules": lambda word: "=" in word or word.startswith("{")}
"""Options that take several values after one flag, as vLLM's do: parameter to a test of words that are values."""

ARGUMENTS = "transect.arguments"
"""Key of a context's ``meta``: the words of its command line."""

SERVER, MODEL, ENGINE, GPU, REST = "Server", "Model and text", "Engine", "GPU", "Options"
GROUPS = {
    **dict.fromkeys(
        (
            *("load_format", "revision", "tokenizer", "tokenizer_revision", "chat_template", "generation_config"),
            *("override_generation_config", "dtype", "quantization", "served_model_name"),
        ),
        MODEL,
    ),
    **dict.fromkeys(
        (
            *("device", "deterministic", "async_scheduling", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
            *("max_mixed_tokens", "fill_steps", "itl_target", "kv_cache_tokens", "prefix_caching", "jump_ahead"),
            "speculative_config",
            *("threads", "native", "max_queue", "tensor_parallel_size", "pipeline_parallel_size"),
            *("data_parallel_size", "enable_expert_parallel", "check_plans"),
        ),
        ENGINE,
    ),
    **dict.fromkeys(
        (
            *("gpu_memory_utilization", "cpu_offload_gb", "offload_folder", "cuda_graphs", "fused_operators"),
            *("dependent_launch", "device_sampling"),
        ),
        GPU,
    ),
    **dict.fromkeys(("config", "help"), REST),
}
"""Parameter to the group that it is shown in; a server's others are SERVER, any other command's are REST."""


class Command(TyperCommand):
    """A command whose help shows options in groups, and says where else values may come from."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the flags of ``SPREAD`` before each of their values, which is the form that click knows."""
        ctx.meta[ARGUMENTS] = tuple(args)
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
        return list(super().parse_args(ctx, spread))

    def invoke(self, ctx: Any) -> Any:
        """Run the command, after a warning for each unknown variable of the environment."""
        commands = getattr(ctx.find_root().command, "commands", {})
        for found in unknown_variables(os.environ, ctx, commands):
            print(warning(*found), file=sys.stderr)
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then each group of options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if hasattr(param, "show_envvar"):
                param.show_envvar = False  # one line below says it for all
            record = param.get_help_record(ctx)
            if record is not None:
                rest = SERVER if self.name == "serve" else REST
                group = "Arguments" if param.param_type_name == "argument" else GROUPS.get(str(param.name), rest)
                groups.setdefault(group, []).append(record)
        last = groups.pop(REST, [])
        for title, records in (*groups.items(), (REST, last)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if ctx.auto_envvar_prefix:
            formatter.write_paragraph()
            formatter.write_text(f"Environment: each option can be given as {ctx.auto_envvar_prefix}_OPTION.")


class Group(TyperGroup):
    """The command of all commands; its help does not name an environment variable for each option."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options, then commands."""
        for param in self.get_params(ctx):
            if hasattr(param, "show_envvar"):
                param.show_envvar = False
        super().format_options(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command with the first sentence of its help, in as many lines as that takes."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        shown = [
            (name, command.get_short_help_str(1000)) for name, command in commands if command and not command.hidden
        ]
        if shown:
            with formatter.section("Commands"):
                formatter.write_dl(shown)


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values in the file the command's defaults."""
    if path is not None and not context.resilient_parsing:
        params = {param.name: param for param in context.command.params if param.name is not None}
        values = {}
        for key, value in load_config(path).items():
            name = str(key).replace("-", "_")
            if name not in params or name in ("config", "help"):
                near = difflib.get_close_matches(name, params, n=1)
                hint = f"; did you mean {near[0].replace('_', '-')!r}?" if near else ""
                raise ValueError(f"{path}: {context.command_path} has no option {key!r}{hint}")
            if value is not None:
                values[name] = _as_option(value, bool(getattr(params[name], "multiple", False)))
        context.default_map = {**(context.default_map or {}), **values}
    return path


def _as_option(value: Any, several: bool) -> Any:
    """A value of the file in the form that the command line would give it."""
    if isinstance(value, dict):
        import json

        return json.dumps(value)
    if several:
        return [str(each) for each in value] if isinstance(value, list) else [str(value)]
    return value


def load_config(path: Path) -> dict[str, Any]:
    """Option names to values, out of a YAML file, or a TOML file where its name ends so.

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
        help="A YAML or TOML file of options: `port: 8000`. The command line and the environment go over it.",
        is_eager=True,
        callback=_read_config,
        allow_from_autoenv=True,
    ),
]


def _writable(context: typer.Context, file: Path | None) -> Path | None:
    """Make the folder of a file to be written, and say now, not after a long run, that it cannot be."""
    if file is None or context.resilient_parsing:
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        reason = "a file stands where its folder would be"
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
    """An option that names a file to be written."""
    return typer.Option(*names, help=help, callback=_writable)
