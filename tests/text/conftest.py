"""The real vocabulary of SmolLM2, and a small one trained on the spot for everything that does not need a real one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from text_samples import samples
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from transect.checkpoints.pull import pull
from transect.formats.gguf_file import GGUFFile
from transect.text import tokenizer as tokenizer_module

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def smollm2_metadata() -> dict[str, Any]:
    return GGUFFile.open(pull("smollm2-135m")).metadata


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, Any]) -> tokenizer_module.Tokenizer:
    return tokenizer_module.Tokenizer.from_gguf(smollm2_metadata)


@pytest.fixture(scope="session")
def trained() -> Tokenizer:
    """A byte-level BPE tokenizer of the `tokenizers` library: 1500 tokens, trained on samples."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=[AddedToken(special, special=True, normalized=False) for special in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(samples(600, seed=7), trainer)
    return tokenizer


@pytest.fixture(scope="session")
def toy_metadata(trained: Tokenizer) -> dict[str, Any]:
    """The trained vocabulary as a GGUF file would hold it; "<think>" is an added token that is text."""
    model = json.loads(trained.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda entry: entry[1])]
    kinds = [3 if token in SPECIALS else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, "<think>"],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.token_type": [*kinds, 4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture(scope="session")
def toy(toy_metadata: dict[str, Any]) -> tokenizer_module.Tokenizer:
    return tokenizer_module.Tokenizer.from_gguf(toy_metadata)
