"""The same weights are sent to the GPU in every step."""

import functools

import torch

KIND = "upload"


@functools.cache
def weight():
    return torch.randn(4096, 2048, pin_memory=True)


def run(once):
    x = torch.randn(64, 4096, device="cuda")
    there = weight().to("cuda")
    for _ in range(40):
        result = x @ (there if once else weight().to("cuda", non_blocking=True))
    torch.cuda.synchronize()
    return result


@torch.inference_mode()
def faulty():
    return run(False)


@torch.inference_mode()
def fixed():
    return run(True)
