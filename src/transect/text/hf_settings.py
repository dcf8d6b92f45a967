"""What the small JSON files beside a tokenizer.json say: special tokens, ends of an answer, the chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class HFSettings:
    """The settings that a model directory gives; None or () for what it leaves open."""

    bos_token: str | None
    eos_token: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None


def read_hf_settings(directory: Path) -> HFSettings:
    """Read tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json and the chat template.

    generation_config.json has the last word on what ends an answer and config.json speaks only where it is silent, as
    in transformers; the tokenizer's own EOS token always counts.

    Raises:
        ValueError: one of the files is not JSON of the right form; the message names it.
    """
    tokenizer = read_object(directory / "special_tokens_map.json") | read_object(directory / "tokenizer_config.json")
    model = read_object(directory / "config.json") | read_object(directory / "generation_config.json")
    ends = model.get("eos_token_id")
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    return HFSettings(
        bos_token=_content(tokenizer.get("bos_token")),
        eos_token=_content(tokenizer.get("eos_token")),
        bos_token_id=model.get("bos_token_id"),
        eos_token_ids=tuple(int(end) for end in ends),
        chat_template=_chat_template(directory, tokenizer),
    )


def _chat_template(directory: Path, tokenizer: dict[str, Any]) -> str | None:
    """chat_template.jinja if it is there, else what tokenizer_config.json holds; of several the one named "default"."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error}): download it again") from error
    template = tokenizer.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _content(token: Any) -> str | None:
    """Special tokens are written as a string or as an object with a ``content``."""
    return token.get("content") if isinstance(token, dict) else token


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file without its nulls; {} where there is no file.

    Raises:
        ValueError: it is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, found a {type(value).__name__}: download it again")
    return {key: entry for key, entry in value.items() if entry is not None}
