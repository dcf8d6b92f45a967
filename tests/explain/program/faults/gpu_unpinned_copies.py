"""Batches go to the GPU from pageable memory."""

import functools

import torch

KIND = "pinned"


@functools.cache
def batch(pinned):
    return torch.randn(64, 1 << 18, pin_memory=pinned)


def run(pinned):
    for _ in range(20):
        result = batch(pinned).to("cuda", non_blocking=pinned).sum()
    torch.cuda.synchronize()
    return result


def faulty():
    return run(False)


def fixed():
    return run(True)
