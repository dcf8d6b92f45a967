"""A training run as a frozen description, read from a TOML file and kept with every checkpoint.

```toml
model = "smollm2-135m"          # a name, directory or .gguf file to start from; or a directory with a config.json alone
task = "finetune"               # pretrain, finetune, lora, qlora
run_dir = "runs/chat"
steps = 200

[data]
train = ["chats.jsonl"]         # text files, JSONL chats or token files; by what they are
validation = ["held-out.jsonl"]

[optimizer]
name = "adamw"
learning_rate = 2e-5
```

An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ..models.memory.terms import parse_bytes
from .lora_config import LoRAConfig

Task = Literal["pretrain", "finetune", "lora", "qlora"]
Precision = Literal["float32", "bfloat16", "mixed"]
Checkpointing = Literal["auto", "none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The training data.

    Attributes:
        train, validation: files, by their endings: text, rows (JSON, JSON lines, CSV, parquet), directories of Hugging
            Face ``datasets``, or a ``.tokens`` directory that ``transect data tokenize`` wrote (``files.py``). Rows may
            be in any layout of ``layouts.py``; of a chat the assistant's tokens are trained on.
        on_bad_row: what a row does that cannot be used: ``stop`` the run before its first step, or be left out
            (``skip``) and counted.
        seq_len: longest document, in tokens; longer ones are cut (text) or left out with a count (chats).
        micro_batch: tokens of one forward pass; documents are packed into it and never see each other.
    """

    train: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    on_bad_row: Literal["stop", "skip"] = "stop"
    seq_len: int = 1024
    micro_batch: int = 4096

    def __post_init__(self) -> None:
        _positive(self, "seq_len", "micro_batch")
        if self.micro_batch < self.seq_len:
            raise ValueError(
                f"data.micro_batch ({self.micro_batch} tokens) is smaller than data.seq_len ({self.seq_len}): raise it "
                "to at least that"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """How gradients change weights.

    Attributes:
        name: ``adamw``; ``adamw8bit`` (moments in 8 bits, by blocks); ``muon`` (matrices of the layers by Muon, the
            rest by AdamW).
        weight_decay: decoupled, on matrices only; norms and biases have none.
        clip: largest global norm of the gradient; 0 for none.
        muon_learning_rate: for the matrices under ``muon``; ``learning_rate`` is AdamW's.
    """

    name: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    muon_learning_rate: float = 0.02
    muon_momentum: float = 0.95

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "muon_learning_rate"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"optimizer.{name} must be a number greater than 0, not {value}")
        for name in ("beta1", "beta2", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} must be at least 0 and less than 1, not {getattr(self, name)}")
        for name in ("weight_decay", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"optimizer.{name} must be 0 or greater, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the steps, as a factor of ``learning_rate``.

    Attributes:
        kind: after ``warmup`` steps from 0 to 1: ``constant``; ``cosine`` or ``linear`` down to ``final``; ``wsd``
            stays at 1 and falls linearly to ``final`` over the last ``decay`` steps (warm-up, stable, decay).
    """

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup: int = 0
    decay: int = 0
    final: float = 0.1

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.decay < 0:
            raise ValueError("schedule.warmup and schedule.decay are numbers of steps, 0 or more")
        if not 0 <= self.final <= 1:
            raise ValueError(f"schedule.final is a share of the learning rate, from 0 to 1, not {self.final}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOConfig:
    """Preference pairs: ``beta`` is how strongly the model is held to where it began."""

    beta: float = 0.1

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"dpo.beta must be greater than 0, not {self.beta}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig:
    """Reinforcement learning from rewards.

    Attributes:
        reward: ``module:function`` that is called as ``function(answer_text, record)`` and returns a number; ``record``
            is the prompt's line of the data. ``exact`` is 1 where the answer, stripped, equals the line's ``answer``.
        prompts, group: prompts of a step, and answers to each.
        max_tokens, temperature: for each answer.
        clip: how far the ratio to the model that drew the answer may leave 1 before it counts no more.
    """

    reward: str = "exact"
    prompts: int = 8
    group: int = 8
    max_tokens: int = 64
    temperature: float = 1.0
    clip: float = 0.2

    def __post_init__(self) -> None:
        _positive(self, "prompts", "max_tokens")
        if self.group < 2:
            raise ValueError(f"grpo.group must be at least 2: answers are judged against each other, not {self.group}")
        if not self.temperature > 0:
            raise ValueError(f"grpo.temperature must be greater than 0, not {self.temperature}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A whole run.

    Attributes:
        model: what ``models.resolve`` takes; for ``pretrain`` only its shape and tokenizer are used.
        load_format: ``auto``, or ``dummy``: random weights in the shape of ``model``, to measure with.
        task: ``pretrain`` from random weights, ``finetune`` all weights, ``lora``, or ``qlora`` (the base in 4 bits).
        objective: what is minimised: ``next_token``, ``dpo`` (preference pairs) or ``grpo`` (rewards of its own
            answers).
        run_dir: where logs and checkpoints go.
        steps: optimizer steps in all.
        accumulate: micro-batches to a step.
        precision: ``float32``; ``bfloat16`` for weights and optimizer alike; ``mixed``: bfloat16 weights to compute
            with and float32 master copies in the optimizer.
        checkpointing: which activations the backward pass keeps: ``none`` recomputes nothing,
            ``selective`` recomputes the MLP's inner activations, ``full`` whole layers; ``auto`` takes the first of
            these that fits.
        memory: how much of the device's memory the run may use, such as ``24GB``; empty: what is free.
        merged: run each layer on a GPU as one node with a hand-written backward pass (``merged_layers.py``), where the
            model is of that kind; false: operator by operator.
        on_spike: what happens when the loss jumps and the model, not the batch, is the cause: ``warn`` and go on,
            ``skip`` the update, or ``stop`` the run. An unusual batch alone is only told of, or skipped where that is
            asked for.
        seed: decides initial weights, the order of the data, and adapters.
        save_every, keep: steps between checkpoints (0: at the end only), and how many to keep.
        eval_every: steps between measurements of the validation loss (0: at the end only).
        device: ``auto``, ``cpu`` or ``cuda``.
        threads: CPU threads; None: all cores of this process.
    """

    model: str
    load_format: Literal["auto", "dummy"] = "auto"
    task: Task = "finetune"
    objective: Literal["next_token", "dpo", "grpo"] = "next_token"
    run_dir: str = "runs/default"
    steps: int = 100
    accumulate: int = 1
    precision: Precision = "float32"
    checkpointing: Checkpointing = "auto"
    memory: str = ""
    merged: bool = True
    on_spike: Literal["warn", "skip", "stop"] = "warn"
    seed: int = 0
    save_every: int = 500
    keep: int = 2
    eval_every: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    dpo: DPOConfig = field(default_factory=DPOConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)

    def __post_init__(self) -> None:
        _positive(self, "steps", "accumulate", "keep")
        if self.memory:
            parse_bytes(self.memory)
        for name in ("save_every", "eval_every", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or greater, not {getattr(self, name)}")

    @classmethod
    def from_toml(cls, path: str | Path) -> TrainConfig:
        """Read a file.

        Raises:
            ValueError: not readable, not TOML, an unknown key, or a value of the wrong type or out of its range.
        """
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not TOML: {error}") from None
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """From nested mappings, such as ``to_dict`` gives; errors as in ``from_toml``."""
        config: TrainConfig = _build(cls, values, "")
        return config

    def changed(self, settings: Sequence[str]) -> TrainConfig:
        """With ``key=value`` settings in place of its own, such as ``optimizer.clip=0.5``; values are TOML.

        Raises:
            ValueError: not such a setting, or as in ``from_toml``.
        """
        values = self.to_dict()
        for setting in settings:
            key, equals, text = setting.partition("=")
            if not equals:
                raise ValueError(f"--set takes key=value, such as optimizer.clip=0.5, not {setting!r}")
            try:
                value = tomllib.loads(f"value = {text}")["value"]
            except tomllib.TOMLDecodeError:
                value = text  # a bare word is a string
            *tables, name = key.strip().split(".")
            place = values
            for table in tables:
                place = place.setdefault(table, {})
                if not isinstance(place, dict):
                    raise ValueError(f"the setting {key} is not known: {table} is no table")
            place[name] = value
        return self.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values."""
        return dataclasses.asdict(self)


def _build(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    names = [item.name for item in dataclasses.fields(kind)]
    arguments = {}
    other_names: Mapping[str, str] = getattr(kind, "OTHER_NAMES", {})
    for key, value in values.items():
        key = other_names.get(key, key)
        if key in arguments:
            raise ValueError(f"the setting {where}{key} is given twice, under two names")
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f"did you mean {where}{near[0]}?" if near else f"known are {', '.join(names)}"
            raise ValueError(f"the setting {where}{key} is not known; {hint}")
        arguments[key] = _value(hints[key], value, where + key)
    missing = [
        item.name
        for item in dataclasses.fields(kind)
        if item.default is dataclasses.MISSING
        and item.default_factory is dataclasses.MISSING
        and item.name not in arguments
    ]
    if missing:
        raise ValueError(f"the setting {where}{missing[0]} is missing")
    return kind(**arguments)


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be a table, not {value!r}")
        return _build(hint, value, f"{where}.")
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(f"{where} must be one of {', '.join(map(str, get_args(hint)))}, not {value!r}")
        return value
    if get_origin(hint) is tuple:
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{where} must be a list of strings, not {value!r}")
        return tuple(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wanted = get_args(hint) or (hint,)
    if not any(type(value) is kind for kind in wanted):
        names = " or ".join(
            "a whole number" if kind is int else kind.__name__ for kind in wanted if kind is not type(None)
        )
        raise ValueError(f"{where} must be {names}, not {value!r}")
    return value


def _positive(config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(config, name)}")
