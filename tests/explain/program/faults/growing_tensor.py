"""A cache grows by one row a step, and is copied each time."""

import torch

KIND = "grow"
ON_GPU = torch.get_default_device().type == "cuda"
STEPS, WIDTH = (160, 1 << 19) if ON_GPU else (500, 2048)
row = torch.randn(1, WIDTH)


@torch.inference_mode()
def faulty():
    cache = row[:0]
    for _ in range(STEPS):
        cache = torch.cat([cache, row])
    return cache


@torch.inference_mode()
def fixed():
    cache = row.new_empty(STEPS, WIDTH)
    for step in range(STEPS):
        cache[step] = row
    return cache
