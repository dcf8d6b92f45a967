"""A checkpoint is written in every step."""

import io

import torch
from torch import nn

KIND = "saving"
net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(20)])
x = torch.randn(32, 256)


def faulty(every=1):
    for step in range(40):
        net(x).square().mean().backward()
        if step % every == 0:
            torch.save(net.state_dict(), io.BytesIO())


def fixed():
    faulty(40)
