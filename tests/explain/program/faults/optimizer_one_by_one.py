"""The optimizer goes through two hundred small parameters in Python."""

import torch
from torch import nn

KIND = "optimizer"
weights = [nn.Parameter(torch.randn(32, 32)) for _ in range(200)]
for weight in weights:
    weight.grad = torch.randn(32, 32)
one_by_one = torch.optim.AdamW(weights, foreach=False, fused=False)
fused = torch.optim.AdamW(weights, fused=True)


def faulty(optimizer=one_by_one):
    for _ in range(20):
        optimizer.step()


def fixed():
    faulty(fused)
