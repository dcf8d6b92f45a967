"""The loss is read back in every step."""

import torch

KIND = "sync"


def run(read):
    x = torch.randn(512, 512, device="cuda")
    total = torch.zeros((), device="cuda")
    for _ in range(300):
        total = total + (x @ x).sum() * 1e-6
        if read:
            total.item()
    return total.item()


@torch.inference_mode()
def faulty():
    return run(True)


@torch.inference_mode()
def fixed():
    return run(False)
