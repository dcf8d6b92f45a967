"""The loop polls with a pause."""

import time

import torch

KIND = "sleep"
x = torch.randn(256, 256)


@torch.inference_mode()
def faulty():
    for _ in range(40):
        result = x @ x
        time.sleep(0.005)
    return result


@torch.inference_mode()
def fixed():
    for _ in range(40):
        result = x @ x
    return result
