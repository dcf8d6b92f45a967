"""Weights are kept in half precision and converted in every step."""

import torch

KIND = "convert"
weight = torch.randn(2048, 1024).to(torch.bfloat16)
x = torch.randn(16, 2048)


@torch.inference_mode()
def faulty():
    for _ in range(60):
        result = x @ weight.float()
    return result


@torch.inference_mode()
def fixed():
    wide = weight.float()
    for _ in range(60):
        result = x @ wide
    return result
