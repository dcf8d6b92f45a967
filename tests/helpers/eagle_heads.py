"""EAGLE-3 heads with random weights."""

from dataclasses import replace

import torch

from transect.checkpoints.eagle import save_head
from transect.checkpoints.resolve import resolve
from transect.models.eagle import EagleHead
from transect.ops.opset import resolve_ops
from transect.spec.eagle import HeadConfig

DRAFTED = 200
"""Tokens that a head can draw."""


def save_random_head(target, directory, layers=(1, 2, 3), **changes):
    model = resolve(str(target)).config
    form = HeadConfig(replace(model, n_layers=1, tied_embeddings=False), DRAFTED, model.dim, layers, **changes)
    torch.manual_seed(0)
    head = EagleHead(form, layers, embed=torch.nn.Identity(), ops=resolve_ops(), dtype=torch.float32)
    for name, parameter in head.named_parameters():
        torch.nn.init.ones_(parameter) if "norm" in name else torch.nn.init.normal_(parameter, std=0.1)
    places = torch.randperm(model.vocab_size)[:DRAFTED].sort().values
    save_head(head.state_dict(), places, form, directory)
