"""Options of commands, made from settings: fields of dataclasses such as ``EngineConfig`` (``spec/settings.py``)."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer

from ..engine.config import EngineConfig
from ..engine.executors.gpu.options import GPUOptions
from ..spec.settings import Setting, settings_of

BUILTIN = "smollm2-135m"

Command = TypeVar("Command", bound=Callable[..., Any])

ModelArgument = Annotated[
    str, typer.Argument(help="A built-in name, a .gguf file, a directory in Hugging Face layout, or a hub id.")
]

WHERE_IT_RUNS = (
    *("device", "dtype", "quantization", "kv_cache_dtype", "cpu_offload_gb", "offload_folder", "threads", "native"),
    *("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"),
)
"""Settings of every command with an engine."""
HOW_IT_RUNS = (
    *("load_format", "deterministic", "gpu_memory_utilization", "cuda_graphs", "async_scheduling"),
    *("fused_operators", "dependent_launch", "device_sampling", "target"),
)
"""Settings of commands that serve or measure an engine."""


def engine_settings(*names: str, without: Collection[str] = ()) -> tuple[Setting, ...]:
    """Return settings of an engine by name; without names, all that can be options except ``without``."""
    known = {each.name: each for kind in (EngineConfig, GPUOptions) for each in settings_of(kind)}
    return tuple(known[name] for name in names or [name for name in known if name not in without])


def takes(*settings: Setting, **defaults: Any) -> Callable[[Command], Command]:
    """Give a command options for settings. Their values arrive in its ``**`` parameter, by the names of the fields.

    Args:
        settings: settings that become options.
        defaults: defaults that differ from those of the fields, by the fields' names.
    """
    by_parameter = {_parameter(each): each for each in settings}
    added = [
        inspect.Parameter(
            _parameter(each), inspect.Parameter.KEYWORD_ONLY, default=_default(each, defaults), annotation=_hint(each)
        )
        for each in settings
    ]

    def add(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [each.replace(kind=each.KEYWORD_ONLY) for each in own if each.kind is not each.VAR_KEYWORD]

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            made = {}
            for name, value in values.items():
                setting = by_parameter.get(name)
                made[setting.name if setting else name] = _value(setting, value) if setting else value
            return command(**made)

        del run.__wrapped__  # typer reads the signature below
        signature = inspect.Signature(sorted([*kept, *added], key=_joins))
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
        return run  # type: ignore[return-value]

    return add


def _joins(parameter: inspect.Parameter) -> bool:
    """Return True if a command's own option joins a group of settings: it is shown after them."""
    facts = getattr(parameter.annotation, "__metadata__", ())
    return any(getattr(each, "rich_help_panel", None) for each in facts) and parameter.default is not inspect._empty


def _parameter(setting: Setting) -> str:
    return setting.option.replace("-", "_")


def _default(setting: Setting, defaults: dict[str, Any]) -> Any:
    value = defaults.get(setting.name, setting.default)
    return None if value is MISSING or isinstance(value, tuple) else value


def _hint(setting: Setting) -> Any:
    """Build the annotation that typer reads an option from."""
    kind: Any = next((each for each in (bool, int, float) if each in setting.kinds), str)
    if setting.choices and all(isinstance(each, int) for each in setting.choices):
        kind = int
    several = [get_args(each)[0] for each in setting.kinds if get_origin(each) is tuple]
    kind = list[several[0]] if several else kind  # type: ignore[valid-type]
    names = [f"--{setting.option}", *(f"--{each.replace('_', '-')}" for each in setting.about.also)]
    if kind is bool and (setting.optional or setting.default):
        names = [f"{name}/--no-{name[2:]}" for name in names]
    if setting.about.short:
        names.insert(1, setting.about.short)
    text = setting.help
    if several and isinstance(setting.default, tuple) and setting.default:
        text += f"  [default: {', '.join(setting.default)}]"
    options: dict[str, Any] = {"help": text, "rich_help_panel": setting.group or None}
    if setting.choices:
        options["metavar"] = "|".join(map(str, setting.choices))
    elif _is_table(setting):
        options["metavar"] = "JSON"
    if kind in (int, float):
        options |= {"min": setting.about.least, "max": setting.about.most}
    if setting.about.variable:
        options["envvar"] = setting.about.variable
    optional = setting.optional or several or setting.default is MISSING
    return Annotated[kind | None if optional else kind, typer.Option(*names, **options)]


def _is_table(setting: Setting) -> bool:
    return any(get_origin(each) in (dict, Mapping) for each in setting.kinds)


def _value(setting: Setting, value: Any) -> Any:
    """Convert the value of an option to the value of its field."""
    if isinstance(value, str) and _is_table(setting):
        return json_object(value, f"--{setting.option}")
    if isinstance(value, list):
        return listed(value, f"--{setting.option}")
    return value


def listed(values: list[Any], option: str) -> tuple[Any, ...]:
    """Parse an option that may be repeated, be a JSON list (as in vLLM), or be empty.

    Raises:
        ValueError: a value begins like a JSON list but is not one.
    """
    found: list[Any] = []
    for value in values:
        if isinstance(value, str) and value.startswith("["):
            try:
                found.extend(map(str, json.loads(value)))
            except ValueError as error:
                raise ValueError(f"{option} {value!r} is not a JSON list ({error})") from None
        elif value != "":
            found.append(value)
    return tuple(found)


def engine_config(model: str, **settings: Any) -> EngineConfig:
    """Build an ``EngineConfig`` of the given settings, including those of its ``gpu``; None leaves a field at its
    default.

    The model is found, and fetched if needed, before anything starts, so that Ctrl-C ends a download at once.

    Raises:
        ValueError: a setting is out of range, or there is no such model.
    """
    from ..checkpoints.resolve import resolve

    given = {name: value for name, value in settings.items() if value is not None}
    switches = {name: given.pop(name) for name in GPUOptions.__dataclass_fields__ if name in given}
    config = EngineConfig(model=model, gpu=GPUOptions(**switches), **given)
    resolve(model, load_format=config.load_format, revision=config.revision, adapter=config.adapter)
    return config


def json_object(text: str, option: str) -> dict[str, Any]:
    """Parse the JSON object in an option's value.

    Raises:
        ValueError: it is none.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option} is not JSON ({error}): write it as '{{\"name\": 1}}'") from None
    if not isinstance(value, dict):
        raise ValueError(f"{option} must be a JSON object, got {text[:60]!r}")
    return value
