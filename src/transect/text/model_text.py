"""Everything of a model that concerns text (tokenizer, chat template, sampling defaults), as chosen by settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.resolve import tokenizer_files
from ..formats.gguf_file import GGUFFile
from .chat_template import ChatTemplate
from .number_text import NumberText
from .sampling_defaults import SamplingDefaults, sampling_defaults
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..checkpoints.resolve import ModelSource


@dataclass(frozen=True)
class ModelText:
    """The text side of one model.

    Attributes:
        tokenizer: encodes and decodes.
        chat_template: None where there is none.
        defaults: values for unset parameters of a request.
        eos_token_ids: tokens that end an answer: those of the model's configuration, then further ones.
    """

    tokenizer: Tokenizer | NumberText
    chat_template: ChatTemplate | None
    defaults: SamplingDefaults
    eos_token_ids: tuple[int, ...]


def load_text(
    source: ModelSource,
    *,
    tokenizer: str | None = None,
    tokenizer_revision: str | None = None,
    chat_template: str | None = None,
    generation_config: str = "auto",
    override_generation_config: Mapping[str, Any] | None = None,
) -> ModelText:
    """Load the text side of a resolved model, with the settings that replace parts of it.

    Args:
        tokenizer: a directory, a GGUF file, a built-in name or a hub id to take the tokenizer, and its chat template,
            from.
        tokenizer_revision: of that hub id.
        chat_template: a file with a Jinja template, or the template itself.
        generation_config, override_generation_config: see ``sampling_defaults``.

    Raises:
        ValueError: something is missing, damaged or does not fit the model.
    """
    tokens, template = _tokenizer(source, tokenizer, tokenizer_revision)
    if tokenizer is not None and tokens.vocab_size > source.config.vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer!r} has {tokens.vocab_size} tokens and the model {source.config.vocab_size}: it "
            "is another model's"
        )
    if chat_template is not None:
        text = template_text(chat_template)
        marks = template if template is not None else ChatTemplate("", *special_marks(tokens))
        template = marks.with_source(text)
    defaults = sampling_defaults(source, generation_config, override_generation_config)
    too_high = [end for end in defaults.eos_token_ids if end >= source.config.vocab_size]
    if too_high:
        raise ValueError(
            f"{defaults.origin}: eos_token_id holds {too_high[0]}, and the model has ids 0 to "
            f"{source.config.vocab_size - 1}"
        )
    own = tuple(end for end in tokens.eos_token_ids if end < source.config.vocab_size)
    ends = tuple(dict.fromkeys((*source.config.eos_token_ids, *own, *defaults.eos_token_ids)))
    return ModelText(tokens, template, defaults, ends)


def _tokenizer(
    source: ModelSource, name: str | None, revision: str | None
) -> tuple[Tokenizer | NumberText, ChatTemplate | None]:
    if name is None:
        if revision is not None:
            raise ValueError("tokenizer_revision needs tokenizer, the hub id that it is a revision of")
        return Tokenizer.from_source(source), ChatTemplate.from_source(source)
    path = tokenizer_files(name, revision=revision)
    if path.is_dir():
        return Tokenizer.from_hf(path), ChatTemplate.from_hf(path)
    metadata = GGUFFile.open(path).metadata
    return Tokenizer.from_gguf(metadata), ChatTemplate.from_gguf(metadata)


def template_text(given: str) -> str:
    """Return the template: the text of a file, or the given text, if it can only be Jinja.

    Raises:
        ValueError: there is no such file.
    """
    if "{{" in given or "{%" in given or "\n" in given:
        return given
    path = Path(given).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(
            f"chat_template {given[:80]!r} cannot be read ({error}): give a file with a Jinja template, or the "
            "template itself"
        ) from None


def special_marks(tokens: Tokenizer | NumberText) -> tuple[str, str]:
    """Return the texts of the tokens that begin and end a text."""
    begin, ends = tokens.bos_token_id, tokens.eos_token_ids
    return "" if begin is None else tokens.token_text(begin), tokens.token_text(ends[0]) if ends else ""


def text_settings(config: Any) -> dict[str, Any]:
    """Return the arguments of ``load_text`` out of an ``EngineConfig``."""
    names = ("tokenizer", "tokenizer_revision", "chat_template", "generation_config", "override_generation_config")
    return {name: getattr(config, name) for name in names}
