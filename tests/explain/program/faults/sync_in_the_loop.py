"""A running total is read back in every step of a loop."""

import torch

KIND = "sync"
x = torch.randn(2500, 16)


def faulty():
    total = 0.0
    for row in range(len(x)):
        total += x[row].sum().item()
    return total


def fixed():
    return x.sum().item()
