"""An EAGLE-3 head from its files and its formulas alone, for models of ``save_tiny_llm``."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file


def naive_drafts(large: str, head: str, tokens: list[int], count: int) -> list[int]:
    """Greedy drafts after ``tokens``."""
    model = transformers.LlamaForCausalLM.from_pretrained(large, dtype=torch.float32)
    weights = load_file(f"{head}/model.safetensors")
    with torch.no_grad():
        features = list(features_of(model, head, weights, tokens))[:-1]
        drafts: list[int] = []
        entries = [*tokens[1:]]
        for _ in range(count):
            outputs = naive_layer(weights, model, torch.tensor(entries), torch.stack(features))
            logits = rms(outputs[-1], weights["norm.weight"]) @ weights["lm_head.weight"].T
            own = int(logits.argmax())
            drafts.append(own + int(weights["d2t"][own]))
            entries.append(drafts[-1])
            features.append(outputs[-1])
    return drafts


def features_of(model, head, weights, tokens):
    config = json.loads(Path(head, "config.json").read_text())
    states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    places = [layer + 1 for layer in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    return torch.cat([states[layer][0] for layer in places], -1) @ weights["fc.weight"].T


def rms(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def naive_layer(weights, model, entries, features):
    w = {name.removeprefix("midlayer."): each for name, each in weights.items()}
    x = torch.cat(
        (
            rms(model.model.embed_tokens(entries), w["input_layernorm.weight"]),
            rms(features, w["hidden_norm.weight"]),
        ),
        -1,
    )
    q, k, v = (
        (x @ w[f"self_attn.{name}_proj.weight"].T).view(len(x), heads, 16)
        for name, heads in (("q", 4), ("k", 2), ("v", 2))
    )
    angles = torch.arange(len(x))[:, None] / 10000 ** (torch.arange(0, 16, 2) / 16)

    def turned(y):
        a, b = y.chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    q, k, v = turned(q), turned(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 4
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf).softmax(-1)
    x = features + torch.einsum("hqk,khd->qhd", scores, v).flatten(1) @ w["self_attn.o_proj.weight"].T
    y = rms(x, w["post_attention_layernorm.weight"])
    gate, up, down = (w[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
