"""Short sentences, padded to the longest one."""

import torch
from torch import nn

KIND = "padding"
torch.manual_seed(0)
LENGTH, KEPT = 512, 51
model = nn.Sequential(nn.Embedding(1000, 256, padding_idx=0), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
ids = torch.zeros(16, LENGTH, dtype=torch.long)
ids[:, :KEPT] = torch.randint(1, 1000, (16, KEPT))


@torch.inference_mode()
def faulty():
    return model(ids)


@torch.inference_mode()
def fixed():
    return model(ids[:, :KEPT])
