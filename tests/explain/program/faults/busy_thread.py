"""A thread counts in Python while the main thread works in Python."""

import threading

import torch

KIND = "gil"
x = torch.ones(8)


def work():
    total = 0
    for step in range(1_500_000):
        total += step & 3
        if not step % 100_000:
            x.add_(0.0)
    return total


def spin(stop):
    count = 0
    while not stop.is_set():
        count += 1


@torch.inference_mode()
def faulty():
    stop = threading.Event()
    thread = threading.Thread(target=spin, args=(stop,))
    thread.start()
    try:
        return work()
    finally:
        stop.set()
        thread.join()


@torch.inference_mode()
def fixed():
    return work()
