"""Weights are kept in half precision and converted in every step."""

import torch

KIND = "convert"
ON_GPU = torch.get_default_device().type == "cuda"
ROWS, COLUMNS = (8192, 8192) if ON_GPU else (2048, 1024)
weight = torch.randn(ROWS, COLUMNS).to(torch.bfloat16)
x = torch.randn(16, ROWS)


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
