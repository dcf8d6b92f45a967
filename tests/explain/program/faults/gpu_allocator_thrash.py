"""The cache of the allocator is emptied in every step."""

import torch

KIND = "allocation"


def run(empty):
    for _ in range(40):
        result = torch.empty(1 << 26, device="cuda").fill_(1.0)
        del result
        if empty:
            torch.cuda.empty_cache()
    torch.cuda.synchronize()


def faulty():
    run(True)


def fixed():
    run(False)
