"""An image is turned around and back for every operator."""

import torch

KIND = "layout"
ON_GPU = torch.get_default_device().type == "cuda"
image = torch.randn(64, 128, 128, 64) if ON_GPU else torch.randn(16, 64, 64, 32)


@torch.inference_mode()
def faulty():
    x = image
    for _ in range(12):
        x = x.permute(0, 3, 1, 2).contiguous()
        x = x + 1.0
        x = x.permute(0, 2, 3, 1).contiguous()
    return x


@torch.inference_mode()
def fixed():
    x = image
    for _ in range(12):
        x = x + 1.0
    return x
