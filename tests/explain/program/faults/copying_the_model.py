"""The model is copied deep in every step, for the sake of its last weights."""

import copy

import torch
from torch import nn

KIND = "copying"
net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(40)])
kept = copy.deepcopy(net)
x = torch.randn(64, 64)


@torch.no_grad()
def faulty():
    for _ in range(40):
        copy.deepcopy(net)
        net(x)


@torch.no_grad()
def fixed():
    for _ in range(40):
        torch._foreach_copy_(list(kept.parameters()), list(net.parameters()))
        net(x)
