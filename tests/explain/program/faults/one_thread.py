"""torch was told to use one core."""

import torch

KIND = "threads"
CORES = 2
x = torch.randn(1200, 1200)


def run(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(6):
            result = x @ x
    finally:
        if threads > 1:
            torch.set_num_threads(before)
    return result


@torch.inference_mode()
def faulty():
    return run(1)


@torch.inference_mode()
def fixed():
    return run(2)
