"""A model's tokenizer and chat template as the files that Hugging Face libraries and ``Tokenizer.from_hf`` read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from .gguf_vocab import gguf_chat_template, gguf_chat_variants, read_gguf_vocabulary

if TYPE_CHECKING:
    from ..checkpoints.resolve import ModelSource

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
TEMPLATES = "additional_chat_templates"
"""A folder of further chat templates."""


def export_tokenizer(source: ModelSource, directory: str | Path) -> None:
    """Write what ``source`` has of a tokenizer into ``directory``, which exists.

    A model directory's own files are copied. A GGUF file's vocabulary is written as ``tokenizer.json`` with a
    ``tokenizer_config.json`` that holds the chat template and the special tokens. A shape without a tokenizer has
    nothing to write.

    Raises:
        ValueError: the source's vocabulary cannot be read.
        OSError: the directory cannot be written.
    """
    directory = Path(directory)
    folder = source.text_folder
    if folder is not None:
        for name in COPIED:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, directory / name)
        if (folder / TEMPLATES).is_dir():
            shutil.copytree(folder / TEMPLATES, directory / TEMPLATES, dirs_exist_ok=True)
        return
    vocabulary = read_gguf_vocabulary(source.gguf.metadata)
    template, _, _ = gguf_chat_template(source.gguf.metadata)
    backend = tokenizers.Tokenizer.from_str(vocabulary.backend.to_str())
    around = [*vocabulary.prefix_ids, *vocabulary.suffix_ids]
    if around:
        names = [backend.id_to_token(index) for index in around]
        before, after = names[: len(vocabulary.prefix_ids)], names[len(vocabulary.prefix_ids) :]
        backend.post_processor = TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=list(zip(names, around, strict=True))
        )
    backend.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if vocabulary.bos_token_id is not None:
        config["bos_token"] = backend.id_to_token(vocabulary.bos_token_id)
    if vocabulary.eos_token_ids:
        config["eos_token"] = backend.id_to_token(vocabulary.eos_token_ids[0])
    if template is not None:
        named = {"default": template, **gguf_chat_variants(source.gguf.metadata)}
        listed = [{"name": name, "template": text} for name, text in named.items()]
        config["chat_template"] = template if len(listed) == 1 else listed
    _write(directory / "tokenizer_config.json", config)
    if vocabulary.eos_token_ids:
        generation = {"bos_token_id": vocabulary.bos_token_id, "eos_token_id": list(vocabulary.eos_token_ids)}
        _write(directory / "generation_config.json", generation)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
