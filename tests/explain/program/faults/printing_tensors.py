"""A tensor is printed in every step."""

import os

import torch

KIND = "printing"
x = torch.randn(200, 200)


@torch.inference_mode()
def faulty(say=True):
    y = x
    with open(os.devnull, "w") as file:
        for _ in range(100):
            y = (y @ x) * 0.05
            if say:
                print(y, file=file)
    return y


def fixed():
    return faulty(False)
