"""Batches go to the GPU from pageable memory."""

import torch

KIND = "pinned"


def run(pinned):
    batch = torch.randn(64, 1 << 18, pin_memory=pinned)
    for _ in range(20):
        result = batch.to("cuda", non_blocking=pinned).sum()
    torch.cuda.synchronize()
    return result


def faulty():
    return run(False)


def fixed():
    return run(True)
