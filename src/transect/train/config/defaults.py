"""Choose values that a configuration leaves to the task: learning rate, warm-up, weight decay."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from .objectives import objective_kind, objectives

RATES = {
    "next_token": (2e-5, 2e-4),
    "distill": (2e-5, 2e-4),
    "dpo": (1e-6, 2e-5),
    "kto": (1e-6, 2e-5),
    "orpo": (5e-6, 5e-5),
    "grpo": (1e-6, 1e-5),
}
"""Learning rates of an objective: for all weights, and for adapters."""
PRETRAINING = 3e-4
BY_TASK = ("optimizer.learning_rate", "optimizer.weight_decay", "schedule.warmup")
"""Settings whose defaults depend on the task."""

TASKS = ("pretrain", "finetune", "lora", "qlora")
MEANT_BY_TASK = {
    **{name: f'an objective: set objective to "{name}", and task to what is trained' for name in RATES},
    **dict.fromkeys(("sft", "full", "fft", "full_finetune", "cpt"), 'task = "finetune" here, or "lora"'),
}
MEANT_BY_OBJECTIVE = {
    **{name: f'a task: set task to "{name}", and objective to what is minimised' for name in TASKS},
    **dict.fromkeys(("sft", "clm", "ce", "cross_entropy", "lm"), 'objective = "next_token" here'),
}
"""Suggestions for values of ``task`` or ``objective`` that other programs use."""

MEANT = {
    "lr": "optimizer.learning_rate",
    "learning_rate": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "optim": "optimizer.name",
    "max_grad_norm": "optimizer.clip",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "lr_scheduler_type": "schedule.kind",
    "lr_scheduler": "schedule.kind",
    "warmup": "schedule.warmup",
    "warmup_steps": "schedule.warmup",
    "warmup_ratio": "schedule.warmup, a number of steps",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "max_steps": "steps",
    "num_steps": "steps",
    "iters": "steps",
    "batch_size": "data.micro_batch, in tokens",
    "micro_batch_size": "data.micro_batch, in tokens",
    "per_device_train_batch_size": "data.micro_batch, in tokens",
    "gradient_accumulation_steps": "accumulate",
    "gradient_checkpointing": "checkpointing",
    "output_dir": "run_dir",
    "model_name_or_path": "model",
    "base_model": "model",
    "save_steps": "save_every",
    "eval_steps": "eval_every",
    "save_total_limit": "keep",
    "bf16": 'precision = "bfloat16" or "mixed"',
    "dtype": "precision",
    "load_in_4bit": 'task = "qlora"',
    "adapter": 'task = "lora"',
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "max_seq_len": "data.seq_len",
    "sequence_len": "data.seq_len",
    "block_size": "data.seq_len",
    "train_file": "data.train",
    "dataset": "data.train",
    "datasets": "data.train",
    "validation_file": "data.validation",
    "early_stopping_patience": "patience",
    "r": "lora.rank",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "target_modules": "lora.targets",
    "lora_target_modules": "lora.targets",
    "num_generations": "grpo.group",
    "max_completion_length": "grpo.max_tokens",
    "reward_funcs": "grpo.reward",
    "report_to": "log_to",
}
"""Names of other trainers' settings, with the names used here."""


def hint(where: str, key: str, names: list[str]) -> str:
    """Suggest a setting for the unknown ``key`` in the table ``where`` (``""`` or ``"data."``)."""
    near = difflib.get_close_matches(key, names, 1, 0.8)
    if near:
        return f"did you mean {where}{near[0]}?"
    meant = MEANT.get(key.lower())
    if meant is not None and meant != where + key:
        return f"here it is {meant}"
    near = difflib.get_close_matches(key, names, 1)
    return f"did you mean {where}{near[0]}?" if near else f"known are {', '.join(names)}"


def _known(key: str) -> str:
    return ", ".join(TASKS if key == "task" else objectives())


def rates_of(objective: object) -> tuple[float, float]:
    """Return the learning rates of an objective: for all weights, and for adapters."""
    kind = objective_kind(objective)
    return RATES.get(str(objective), RATES["next_token"]) if kind is None else kind.rates


def by_task(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in settings that depend on the task and are unset; values of another form are unchanged."""
    filled = dict(values)
    task, objective = filled.get("task", "finetune"), filled.get("objective", "next_token")
    optimizer, schedule = filled.get("optimizer", {}), filled.get("schedule", {})
    if not isinstance(optimizer, Mapping) or not isinstance(schedule, Mapping):
        return filled
    if filled.get("steps") == 0 and not filled.get("epochs"):
        raise ValueError("steps must be at least 1, not 0")
    for key, value, meant in (("task", task, MEANT_BY_TASK), ("objective", objective, MEANT_BY_OBJECTIVE)):
        if isinstance(value, str) and value in meant:
            raise ValueError(f"{key} = {value!r}: that is {meant[value]} ({key} is one of {_known(key)})")
    adapted = task in ("lora", "qlora")
    rate = PRETRAINING if task == "pretrain" else rates_of(objective)[adapted]
    decay = 0.1 if task == "pretrain" else 0.0 if adapted else 0.01
    filled["optimizer"] = {"learning_rate": rate, "weight_decay": decay, **optimizer}
    if task != "pretrain":
        filled["schedule"] = {"warmup": -1, **schedule}
    return filled
