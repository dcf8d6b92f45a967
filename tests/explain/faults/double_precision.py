"""numpy's float64 has come along."""

import torch

KIND = "float64"
wide = torch.randn(900, 900, dtype=torch.float64)
x = wide.float()


@torch.inference_mode()
def faulty():
    for _ in range(8):
        result = wide @ wide
    return result


@torch.inference_mode()
def fixed():
    for _ in range(8):
        result = x @ x
    return result
