"""gc.collect() in the loop, with many objects alive."""

import gc

import torch

KIND = "collection"
alive = [{"n": [n]} for n in range(150_000)]
x = torch.randn(128, 128)


@torch.inference_mode()
def faulty():
    for _ in range(6):
        result = x @ x
        gc.collect()
    return result


@torch.inference_mode()
def fixed():
    for _ in range(6):
        result = x @ x
    return result
