"""A compiled function meets another length in every call, and is compiled for each."""

import torch

KIND = "recompilation"
DEVICE = torch.get_default_device()
SIZES = (3, 5, 7, 9, 11, 13)


def step(x):
    for _ in range(12):
        x = (x * 2 + 1).relu()
    return x


def run(sizes):
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager", dynamic=False)
    for size in sizes:
        result = compiled(torch.ones(size, device=DEVICE))
    return result


def faulty():
    return run(SIZES)


def fixed():
    return run(SIZES[:1] * len(SIZES))
