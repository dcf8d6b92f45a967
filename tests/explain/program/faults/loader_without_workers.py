"""Reading takes as long as computing, and each waits for the other."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils.data import DataLoader, Dataset

KIND = "loading"
weight = torch.randn(800, 800)
READERS = max(1, (os.cpu_count() or 2) - 1)


class Slow(Dataset):
    """Each sample takes a moment to come, as from a disk or a network."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(0.008)
        return torch.full((64,), float(index), device="cpu")


def compute(batch):
    """About as long as reading."""
    for _ in range(3):
        result = weight @ weight
    return batch.to(result.device) @ result[:64]


def read(data, first):
    return torch.stack([data[first + index] for index in range(4)])


@torch.inference_mode()
def faulty():
    for batch in DataLoader(Slow(), batch_size=4, num_workers=0):
        result = compute(batch)
    return result


@torch.inference_mode()
def fixed():
    """Threads read ahead, as workers of the loader do, without the time that a process takes to start."""
    data = Slow()
    with ThreadPoolExecutor(READERS) as reader:
        coming = [reader.submit(read, data, first) for first in range(0, 24, 4)]
        for batch in coming:
            result = compute(batch.result())
    return result
