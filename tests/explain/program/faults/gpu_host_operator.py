"""Numbers are sorted on the processor, and go back to the GPU."""

import torch

KIND = "fallback"


def run(there):
    x = torch.randn(1 << 20, device="cuda")
    for _ in range(4):
        result = x.sort().values if there else x.cpu().sort().values.to("cuda")
    torch.cuda.synchronize()
    return result


@torch.inference_mode()
def faulty():
    return run(False)


@torch.inference_mode()
def fixed():
    return run(True)
