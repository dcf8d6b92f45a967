"""Adapters that PEFT makes on a tiny model, and what PEFT computes with one."""

import functools

import torch
import transformers

from transect.models.context import VarlenContext

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111]


def make_adapter(model, directory, **settings):
    """An adapter with random values on a transformers model's copy, saved; returns its logits for ``PROMPT``."""
    import peft  # its import takes seconds, and each worker imports every test

    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | settings)
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(directory)
    return logits_of(adapted.eval())


def peft_logits(model, directory):
    """What PEFT computes for ``PROMPT`` with an adapter that it loads; a base with more rows where it brings them."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    rows = _rows(directory)
    if rows not in (None, base.config.vocab_size):
        base.resize_token_embeddings(rows)
    from peft import PeftModel

    return logits_of(PeftModel.from_pretrained(base, directory).eval())


@torch.no_grad()
def logits_of(model):
    return model(torch.tensor([PROMPT])).logits[0]


@functools.cache
def _rows(directory):
    from safetensors import safe_open

    with safe_open(directory / "adapter_model.safetensors", "pt") as file:
        found = [file.get_slice(name).get_shape()[0] for name in file.keys() if name.endswith("embed_tokens.weight")]  # noqa: SIM118
    return found[0] if found else None


@torch.no_grad()
def logits_of_model(model):
    """Our model's logits of ``PROMPT``."""
    tokens = torch.tensor(PROMPT)
    bounds = torch.tensor([0, len(PROMPT)], dtype=torch.int32)
    return model.logits(model(tokens, torch.arange(len(PROMPT)), VarlenContext(bounds, model.ops)))
