"""A tiny random Llama with a byte-level tokenizer and a chat template: a directory as transformers saves it."""

import functools
import json

import tokenizers
import torch
import transformers

EOS = 257
VOCAB = 300
CONTEXT = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_llm(directory, *, seed=0, **changes):
    """Write the directory (weights, configuration, tokenizer, chat template); returns the transformers model."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 256,
        "eos_token_id": EOS,
    }
    config = transformers.LlamaConfig(**settings | changes)
    model = transformers.LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if weight.ndim == 1 else 0.2 * noise)
    model.save_pretrained(directory)
    save_tiny_llm_text(directory)
    return model


def save_tiny_llm_text(directory, **changes):
    """Its tokenizer and chat template alone."""
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": CHAT_TEMPLATE}
    _tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | changes))


def with_a_merge(folder):
    """A file without merges is none that llama.cpp reads."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "el"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("e", "l")]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens([f"<{i}>" for i in range(259, 299)])  # a model may have a row more than that
    backend.save(str(folder / "tokenizer.json"))


@functools.cache
def _tokenizer():
    """One token for each byte, two special ones, and fillers up to the model's vocabulary."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([f"<{i}>" for i in range(258, VOCAB)])
    return tokenizer


@torch.no_grad()
def greedy_tokens(model, prompt, count):
    """``count`` greedy tokens of a transformers model, computed anew from the whole sequence each time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
