"""The same text is cut into words in every step."""

import re

import torch

KIND = "tokenize"
TEXT = "the quick brown fox jumps over the lazy dog " * 2000
table = torch.randn(1000, 64)


def tokenize(text):
    return [hash(word) % 1000 for word in re.findall(r"\w+", text)]


@torch.inference_mode()
def faulty(steps=20):
    for _ in range(steps):
        result = table[torch.tensor(tokenize(TEXT), device=table.device)].mean(0)
    return result


@torch.inference_mode()
def fixed(steps=20):
    ids = torch.tensor(tokenize(TEXT), device=table.device)
    for _ in range(steps):
        result = table[ids].mean(0)
    return result
