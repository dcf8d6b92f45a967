"""Thousands of kernels that do nothing much."""

import torch

KIND = "launch"


@torch.inference_mode()
def faulty():
    x = torch.ones(256, 8, device="cuda")
    for row in range(256):
        for _ in range(4):
            x[row].mul_(1.001)
    torch.cuda.synchronize()


@torch.inference_mode()
def fixed():
    x = torch.ones(256, 8, device="cuda")
    for _ in range(4):
        x.mul_(1.001)
    torch.cuda.synchronize()
