"""A whole run."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from ...costs.units import parse_bytes
from ...spec.settings import About
from .adapters import LoRAConfig
from .data import DataConfig
from .defaults import by_task
from .objectives import (
    DistillConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    ORPOConfig,
    check_objective,
    objective_kind,
    objectives,
)
from .optim import OptimizerConfig, ScheduleConfig
from .parallel import ParallelConfig
from .parse import build, overridden, positive
from .router import RouterConfig
from .watching import SamplesConfig

Task = Literal["pretrain", "finetune", "lora", "qlora"]
Precision = Literal["float32", "bfloat16", "mixed"]
PLACES = ("tensorboard", "wandb", "mlflow")
Checkpointing = Literal["auto", "none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Configuration of a whole run.

    Attributes:
        model: name or path of a model; ``pretrain`` uses only its shape and tokenizer.
        load_format: ``auto``, or ``dummy``: random weights in the shape of ``model``, for measurements.
        task: ``pretrain`` from random weights, ``finetune`` all weights, ``lora``, or ``qlora`` (the base in 4 bits).
        objective: loss to minimize: ``next_token``, ``dpo``, ``orpo``, ``kto``, ``grpo`` or ``distill``. ``dpo`` and
            ``orpo`` take preference pairs, ``kto`` answers that are good or bad, ``grpo`` rewards of the model's own
            answers, ``distill`` a larger model's distribution. Each has a table of its name.
        new_tokens: tokens to add to the vocabulary, such as ``<tool>``; embedding and head grow by a row for each,
            and with adapters both are trained whole. Tokens written ``<|like this|>`` become special.
        run_dir: folder of logs and checkpoints.
        steps: number of optimizer steps; 100 if neither this nor ``epochs`` is given.
        epochs: number of passes over the data, in place of ``steps``, such as ``1.5``.
        accumulate: micro-batches per step.
        precision: ``float32``; ``bfloat16`` for weights and optimizer alike; ``mixed``: bfloat16 weights to compute
            with and float32 master copies in the optimizer.
        checkpointing: activations to recompute: ``none``, ``selective`` (inside each MLP), ``full`` (whole layers), or
            ``auto``: the first of these that fits.
        memory: device memory that the run may use, such as ``24GB``; empty for the free memory.
        layer_keep: share of the last layers that run towards the end; below 1, steps skip layers, more often later
            layers and later in the run (progressive layer dropping). Layers then run operator by operator.
        merged: run each layer on a GPU as one node with a hand-written backward pass
            (``train/model/merged_layers.py``), if the model supports it; false: operator by operator.
        on_spike: action when the loss jumps because of the model, not the batch: ``warn`` and continue, ``skip`` the
            update, or ``stop`` the run. An unusual batch is only reported, or skipped with ``skip``.
        seed: seed of initial weights, the order of the data, and adapters.
        save_every, keep: steps between checkpoints (0: at the end only), and how many to keep.
        eval_every: steps between measurements of the validation loss (0: at the end only). At the lowest loss so far
            a checkpoint is saved and kept, and ``RUN/best`` points to it.
        patience: stop after this number of measurements in a row without a better loss (0: never).
        min_gain: smallest decrease of the loss, in nats, that counts as better.
        log_to: further targets of metrics, in addition to ``RUN/log.jsonl``: any of ``tensorboard`` (if installed),
            ``wandb`` and ``mlflow``.
        project: name of the project or experiment in ``wandb`` and ``mlflow``.
        device: ``auto``, ``cpu`` or ``cuda``.
        threads: CPU threads; None for all cores of this process, or OMP_NUM_THREADS.
        own: settings of an objective that is one file (``train/objectives/``), from the table of its name.
    """

    model: str
    load_format: Literal["auto", "dummy"] = "auto"
    task: Task = "finetune"
    objective: Annotated[str, About(choices=objectives)] = "next_token"
    new_tokens: tuple[str, ...] = ()
    run_dir: str = "runs/default"
    steps: int = 0
    epochs: float = 0.0
    accumulate: int = 1
    precision: Precision = "float32"
    checkpointing: Checkpointing = "auto"
    memory: str = ""
    layer_keep: float = 1.0
    merged: bool = True
    on_spike: Literal["warn", "skip", "stop"] = "warn"
    seed: int = 0
    save_every: int = 500
    keep: int = 2
    eval_every: int = 0
    patience: int = 0
    min_gain: float = 0.0
    log_to: tuple[str, ...] = ("tensorboard",)
    project: str = "transect"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    dpo: DPOConfig = field(default_factory=DPOConfig)
    kto: KTOConfig = field(default_factory=KTOConfig)
    orpo: ORPOConfig = field(default_factory=ORPOConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    own: Any = None

    def __post_init__(self) -> None:
        check_objective(self.objective)
        if self.own is not None and objective_kind(self.objective) is None:
            raise ValueError(f"own holds settings, and objective = {self.objective!r} has a table of its name")
        if self.epochs < 0 or not math.isfinite(self.epochs):
            raise ValueError(f"epochs must be 0 or greater, not {self.epochs}")
        if self.epochs and self.steps:
            raise ValueError("give steps or epochs, not both")
        if not self.epochs and not self.steps:
            object.__setattr__(self, "steps", 100)
        if not 0 < self.layer_keep <= 1:
            raise ValueError(f"layer_keep is a share, more than 0 and at most 1, not {self.layer_keep}")
        positive(self, "accumulate", "keep", *([] if self.epochs else ["steps"]))
        if unknown := sorted(set(self.log_to) - set(PLACES)):
            raise ValueError(f"log_to knows {', '.join(PLACES)}, not {', '.join(unknown)}")
        if self.data.weights and self.objective not in ("next_token", "distill"):
            raise ValueError(f'data.weights is for objective = "next_token" or "distill", not {self.objective!r}')
        if self.data.streaming and self.objective not in ("next_token", "distill"):
            raise ValueError(
                f"data.streaming reads text and chats as the run goes; objective = {self.objective!r} needs all of its "
                "rows before the first step: leave data.streaming out"
            )
        if self.patience and not (self.eval_every and self.data.validation):
            raise ValueError("patience counts measurements on data.validation: set that, and eval_every")
        if self.memory:
            parse_bytes(self.memory)
        if self.threads is not None:
            positive(self, "threads")
        if self.seed >= 2**63:
            raise ValueError(f"seed must be less than 2 ** 63, not {self.seed}")
        if self.lora.start and self.task not in ("lora", "qlora"):
            raise ValueError(
                f'lora.start is where adapters begin, and task = {self.task!r} trains none: set task to "lora", or '
                "model to that adapter, to train all weights from it on"
            )
        for name in ("save_every", "eval_every", "patience", "min_gain", "seed"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or greater, not {getattr(self, name)}")

    @property
    def compares(self) -> bool:
        """True if the loss compares with the model as it was at the start of the run."""
        kind = objective_kind(self.objective)
        if kind is not None:
            return kind.compares
        return self.objective in ("dpo", "kto") or (self.objective == "grpo" and self.grpo.beta > 0)

    @property
    def freezes(self) -> bool:
        """True if the model's own weights are frozen: only adapters, or a part such as a draft head, are trained."""
        kind = objective_kind(self.objective)
        return self.task in ("lora", "qlora") or (kind is not None and kind.part is not None)

    def unused(self) -> list[str]:
        """List tables that are filled in but have no effect for this task and objective."""
        used = {self.objective, *(["lora"] if self.task in ("lora", "qlora") else [])}
        tables = {"lora": LoRAConfig(), "dpo": DPOConfig(), "kto": KTOConfig(), "orpo": ORPOConfig(),
                  "grpo": GRPOConfig(), "distill": DistillConfig()}  # fmt: skip
        return [name for name, plain in tables.items() if name not in used and getattr(self, name) != plain]

    @classmethod
    def from_toml(cls, path: str | Path, settings: Sequence[str] = ()) -> TrainConfig:
        """Read a file.

        Args:
            settings: ``key=value``, which go over the file's; see ``changed``.

        Raises:
            ValueError: not readable, not TOML, an unknown key, or a value of the wrong type or out of its range.
        """
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not TOML: {error}") from None
        return cls.from_dict(values, settings)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], settings: Sequence[str] = ()) -> TrainConfig:
        """Build the configuration from nested mappings, such as those of ``to_dict``; missing settings that depend on
        the task are filled in (``defaults.py``). ``settings`` and errors are as in ``from_toml``."""
        made = by_task(_overridden(values, settings))
        name = made.get("objective", "next_token")
        check_objective(name)
        kind = objective_kind(name)
        if kind is not None:
            table = {**(made.get("own") or {}), **made.pop(str(name), {})}
            made["own"] = build(kind.settings, table, f"{name}.")
        config: TrainConfig = build(cls, made, "")
        return config

    def changed(self, settings: Sequence[str]) -> TrainConfig:
        """Return a copy with ``key=value`` settings applied, such as ``optimizer.clip=0.5``; values are TOML.

        Raises:
            ValueError: not such a setting, or as in ``from_toml``.
        """
        return self.from_dict(self.to_dict(), settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as nested plain values."""
        return dataclasses.asdict(self)


def _overridden(values: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Apply settings like ``parse.overridden``; ``steps`` replaces the file's ``epochs``, and vice versa."""
    made = overridden(values, settings)
    given = {setting.partition("=")[0].strip() for setting in settings}
    for name, other in (("steps", "epochs"), ("epochs", "steps")):
        if name in given and other not in given and made[name]:
            made.pop(other, None)
    return made
