"""The loss is read back in every step."""

import torch

KIND = "sync"


def run(read):
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64  # products keep their size
    y = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(60):
        y = x @ y
        if read:
            y[0, 0].item()
    return y[0, 0].item()


@torch.inference_mode()
def faulty():
    return run(True)


@torch.inference_mode()
def fixed():
    return run(False)
