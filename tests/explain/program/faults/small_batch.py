"""One question at a time, where all could be asked at once."""

import torch

KIND = "small batch"
ON_GPU = torch.get_default_device().type == "cuda"
SIZE, DTYPE = (12288, torch.bfloat16) if ON_GPU else (2048, torch.float32)
weight = torch.randn(SIZE, SIZE, dtype=DTYPE)
rows = torch.randn(96, SIZE, dtype=DTYPE)


@torch.inference_mode()
def faulty():
    return [row[None] @ weight for row in rows]


@torch.inference_mode()
def fixed():
    return rows @ weight
