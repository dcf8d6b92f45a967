"""The same lines of JSON are parsed in every step."""

import json

import torch

KIND = "parse"
lines = [json.dumps([number * 0.5 for number in range(400)]) for _ in range(64)]
net = torch.nn.Linear(400, 256)
parsed = torch.tensor([json.loads(line) for line in lines])


@torch.inference_mode()
def faulty():
    for _ in range(20):
        [json.loads(line) for line in lines]
        net(parsed)


@torch.inference_mode()
def fixed():
    for _ in range(20):
        net(parsed)
