"""Autograd's search for anomalies was left on."""

import torch
from torch import nn

KIND = "stacks"
net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
x = torch.randn(32, 64)


def faulty():
    with torch.autograd.set_detect_anomaly(True):
        fixed()


def fixed():
    for _ in range(60):
        net(x).square().mean().backward()
