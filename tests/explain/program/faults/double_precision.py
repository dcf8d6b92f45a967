"""numpy's float64 has come along."""

import torch

KIND = "float64"
ON_GPU = torch.get_default_device().type == "cuda"
SIZE = 4096 if ON_GPU else 900
wide = torch.randn(SIZE, SIZE, dtype=torch.float64)
x = wide.float()


def run(numbers):
    """Products; on a GPU, which may multiply both at the same rate, sums."""
    for _ in range(40 if ON_GPU else 8):
        result = numbers + numbers if ON_GPU else numbers @ numbers
    return result


@torch.inference_mode()
def faulty():
    return run(wide)


@torch.inference_mode()
def fixed():
    return run(x)
