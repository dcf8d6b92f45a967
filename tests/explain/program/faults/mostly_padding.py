"""Short sentences, padded to the longest one."""

import torch
from torch import nn

KIND = "padding"
torch.manual_seed(0)
ON_GPU = torch.get_default_device().type == "cuda"
ROWS, LENGTH, KEPT = 2048 if ON_GPU else 16, 512, 51
model = nn.Sequential(nn.Embedding(1000, 256, padding_idx=0), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
model.to(torch.bfloat16 if ON_GPU else torch.float32)
ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
ids[:, :KEPT] = torch.randint(1, 1000, (ROWS, KEPT))


@torch.inference_mode()
def faulty():
    return model(ids)


@torch.inference_mode()
def fixed():
    return model(ids[:, :KEPT])
