"""Products in full float32."""

import torch

KIND = "float32 products"


def run(precision):
    torch.set_float32_matmul_precision(precision)
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        result = x @ x
    torch.cuda.synchronize()
    torch.set_float32_matmul_precision("highest")
    return result


@torch.inference_mode()
def faulty():
    return run("highest")


@torch.inference_mode()
def fixed():
    return run("high")
