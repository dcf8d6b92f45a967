"""A model directory without weights: a Llama's shape, and a tokenizer whose tokens are the 256 bytes.

With bytes for tokens a loss in nats, divided by log 2, is bits per byte: no tokenizer to train, none to argue about.
The id of a token is its byte; 256 ends a text. The vocabulary is filled up to a round number of rows, which stand for
nothing.

    python examples/pretrain/byte_model.py FOLDER --dim 128 --layers 4 --chat
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import tokenizers

CHAT = (
    "{% for m in messages %}{{ 'Question: ' if m.role == 'user' else 'Answer: ' }}{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}Answer: {% endif %}"
)
"""A chat template of plain words: a byte model has no tokens to spare for roles."""
END = 256
ROWS = 320


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; every head has keys and values of its own."""

    dim: int
    layers: int
    heads: int
    ffn: int
    context: int


def write_model(folder: Path, shape: Shape, *, chat: bool = False) -> None:
    """config.json and the tokenizer's files, as Hugging Face libraries and ``transect`` read them; with a chat template
    where that is asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": ROWS,
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.dim // shape.heads,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END,
    }
    write_json(folder / "config.json", config)
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({name: byte for byte, name in enumerate(byte_names())}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
    }
    if chat:
        settings["chat_template"] = CHAT
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "generation_config.json", {"eos_token_id": END})


def byte_names() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies since GPT-2: itself if it can be seen, else
    the next one from U+0100 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    names, others = [], 0
    for byte in range(256):
        names.append(chr(byte if byte in seen else 0x100 + others))
        others += byte not in seen
    return names


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A model directory without weights, whose tokens are bytes.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--chat", action="store_true", help="with a chat template")
    options = parser.parse_args()
    ffn = -(-options.dim * 8 // 3 // 32) * 32  # two thirds of four times the dim: SwiGLU has three matrices
    write_model(
        options.folder, Shape(options.dim, options.layers, options.heads, ffn, options.context), chat=options.chat
    )
    print(f"{options.folder}: a shape and a tokenizer, no weights")
