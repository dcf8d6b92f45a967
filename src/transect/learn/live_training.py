"""A training run for ``learn use``: a small model over bytes, and the pages of the ladder as its text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .registry import all_rungs

VOCABULARY = 320
END = 256
SHAPE = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 128}  # fmt: skip


def write_run(folder: Path, steps: int, settings: Mapping[str, Any]) -> Path:
    """Write a model's shape, a text and the run's file, which is returned. ``settings`` replace those of the run."""
    folder.mkdir(parents=True)
    _write_model(folder / "shape")
    text = folder / "text.txt"
    text.write_text("\n\n".join(rung.page for rung in all_rungs().values()), encoding="utf-8")
    values: dict[str, Any] = {
        "model": str(folder / "shape"),
        "task": "pretrain",
        "run_dir": str(folder / "run"),
        "steps": steps,
        "device": "cpu",
        "precision": "float32",
        "data": {"train": [str(text)], "seq_len": 64, "micro_batch": 256},
        "optimizer": {"name": "adamw", "learning_rate": 3e-3},
    }
    file = folder / "run.toml"
    file.write_text(_toml(values | dict(settings)))
    return file


def _toml(values: Mapping[str, Any]) -> str:
    """Write settings and their tables; numbers, texts and lists are written alike in JSON and TOML."""
    plain = [f"{name} = {json.dumps(value)}" for name, value in values.items() if not isinstance(value, dict)]
    for name, table in values.items():
        if isinstance(table, dict):
            plain += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(plain) + "\n"


def _write_model(folder: Path) -> None:
    """Write the configuration of a Llama, and a tokenizer whose tokens are bytes."""
    import tokenizers

    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True, "eos_token_id": END, **SHAPE,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({text: i for i, text in enumerate(letters)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
