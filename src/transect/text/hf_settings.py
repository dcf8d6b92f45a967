"""Read the small JSON files beside a tokenizer.json: special tokens, ends of an answer, the chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..spec.fields import Fields, read_json_object, shown


@dataclass(frozen=True, slots=True)
class HFSettings:
    """The settings of a model directory; None or () for unset ones."""

    bos_token: str | None
    eos_token: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    chat_variants: dict[str, str]
    """Further chat templates by name."""


def read_hf_settings(directory: Path) -> HFSettings:
    """Read tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json and the chat template.

    generation_config.json has the last word on what ends an answer and config.json speaks only where it is silent, as
    in transformers; the tokenizer's own EOS token always counts.

    Raises:
        ValueError: one of the files is not JSON of the right form; the message names it.
    """
    tokenizer = read_object(directory / "special_tokens_map.json") | read_object(directory / "tokenizer_config.json")
    model = read_object(directory / "config.json") | read_object(directory / "generation_config.json")
    read = Fields(model, f"config.json or generation_config.json of {directory}")
    bos = read.token_ids("bos_token_id")
    return HFSettings(
        bos_token=_content(tokenizer, "bos_token", directory),
        eos_token=_content(tokenizer, "eos_token", directory),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=read.token_ids("eos_token_id"),
        chat_template=_chat_template(directory, tokenizer),
        chat_variants=_chat_variants(directory, tokenizer),
    )


def _chat_template(directory: Path, tokenizer: dict[str, Any]) -> str | None:
    """Return chat_template.jinja if it exists, else the template of tokenizer_config.json; of several the one named
    "default"."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return _text(path)
    template = tokenizer.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"'chat_template' in tokenizer_config.json of {directory} must be a string or a list of objects with "
            f"'name' and 'template', not {shown(template)}"
        )
    return template


def _chat_variants(directory: Path, tokenizer: dict[str, Any]) -> dict[str, str]:
    """Return the files of additional_chat_templates beside chat_template.jinja; without that, those that
    tokenizer_config.json lists beside "default"."""
    if (directory / "chat_template.jinja").is_file():
        return {path.stem: _text(path) for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    listed = tokenizer.get("chat_template")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    named = [(entry.get("name"), entry.get("template")) for entry in entries]
    return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str) and name != "default"}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): download it again") from error


def _content(tokenizer: dict[str, Any], key: str, directory: Path) -> str | None:
    """Return a special token, given as a string or as an object with a ``content``."""
    token = tokenizer.get(key)
    content = token.get("content") if isinstance(token, dict) else token
    if content is not None and not isinstance(content, str):
        raise ValueError(
            f"{key!r} in tokenizer_config.json or special_tokens_map.json of {directory} must be a string or an object "
            f"with a 'content', not {shown(token)}"
        )
    return content


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file without its nulls; {} if there is no file.

    Raises:
        ValueError: it is not JSON object.
    """
    if not path.is_file():
        return {}
    return {key: entry for key, entry in read_json_object(path).items() if entry is not None}
