"""A polynomial, one row at a time."""

import torch

KIND = "launch"
x = torch.randn(1500, 8)


@torch.inference_mode()
def faulty():
    return [row * row + 2 * row + 1 for row in x]


@torch.inference_mode()
def fixed():
    return x * x + 2 * x + 1
