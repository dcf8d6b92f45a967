"""The same file of weights is read in every step."""

import tempfile
from pathlib import Path

import torch

KIND = "file"
folder = tempfile.mkdtemp()
path = Path(folder) / "weights.pt"
torch.save([torch.randn(64, 64, device="cpu") for _ in range(60)], path)
x = torch.randn(64, 64)


@torch.inference_mode()
def faulty():
    for _ in range(25):
        weights = torch.load(path)
        result = x @ weights[0].to(x.device)
    return result


@torch.inference_mode()
def fixed():
    weights = torch.load(path)
    for _ in range(25):
        result = x @ weights[0].to(x.device)
    return result
