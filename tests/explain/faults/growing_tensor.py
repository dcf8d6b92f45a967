"""A cache grows by one row a step, and is copied each time."""

import torch

KIND = "grow"
row = torch.randn(1, 2048)


@torch.inference_mode()
def faulty():
    cache = torch.empty(0, 2048)
    for _ in range(500):
        cache = torch.cat([cache, row])
    return cache


@torch.inference_mode()
def fixed():
    cache = torch.empty(500, 2048)
    for step in range(500):
        cache[step] = row
    return cache
