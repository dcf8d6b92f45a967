"""Batches come from a thread that makes one at a time, and too slowly."""

import queue
import threading
import time

import torch

KIND = "wait"
x = torch.randn(384, 384)


def make(batches, pause):
    for _ in range(30):
        time.sleep(pause)
        batches.put(x)
    batches.put(None)


@torch.inference_mode()
def faulty(pause=0.01):
    batches = queue.Queue(2)
    threading.Thread(target=make, args=(batches, pause)).start()
    while (batch := batches.get()) is not None:
        (batch @ batch).tanh_()


def fixed():
    faulty(0.0)
