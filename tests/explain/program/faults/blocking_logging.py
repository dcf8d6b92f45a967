"""Every step logs all of its numbers."""

import io
import logging

import torch

KIND = "logging"
x = torch.randn(64, 64)
log = logging.Logger("step")
log.addHandler(logging.StreamHandler(io.StringIO()))


def run(often):
    for step in range(100):
        result = x @ x
        if often:
            for number in range(100):
                log.info("step %d, number %d", step, number)
    return result


@torch.inference_mode()
def faulty():
    return run(True)


@torch.inference_mode()
def fixed():
    return run(False)
