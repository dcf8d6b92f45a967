"""Another program is asked for something in every step."""

import subprocess

import torch

KIND = "process"
x = torch.randn(256, 256)


@torch.inference_mode()
def faulty(ask=True):
    y = x
    for _ in range(60):
        y = (y @ x) * 0.05
        if ask:
            subprocess.run(["true"], check=True)
    return y


def fixed():
    return faulty(False)
