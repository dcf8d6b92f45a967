r"""Low-rank adapters on the matrices of a model (Hu et al. 2021, arXiv:2106.09685); only the adapters are trained.

``models/weights/adapted.py`` is a weight with an adapter. ``plain_state`` merges the adapters: it gives the weights of
the plain model that computes the same, which any engine can serve.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.decoder import Decoder
from ..models.weights.adapted import Adapted
from ..models.weights.adapted_product import cpu_kernels
from .config import LoRAConfig


def attach(model: Decoder, config: LoRAConfig, *, seed: int) -> list[str]:
    """Freeze the model and put an adapter on each matrix that ``config.targets`` names, in every layer.

    Returns:
        The names of the matrices that have one.
    """
    model.requires_grad_(False)
    native = cpu_kernels(model.norm.weight)
    found = {}
    for name, weight in model.weights():
        layer, _, target = name.rpartition(".")
        if target in config.targets and layer:
            found[name] = weight
    if not found:
        raise ValueError(f"the model has no matrix called {', '.join(config.targets)}: correct lora.targets")
    names = sorted(found, key=lambda name: _place(name, config.targets))
    for number, name in enumerate(names):
        key = seed * 1_000_003 + number
        model.replace(name, Adapted(found[name], config.rank, config.alpha, seed=key, native=native))
    return names


def _place(name: str, targets: tuple[str, ...]) -> tuple[int, str, int]:
    """The place of an adapter: by layer, attention before MLP, then in the order of the targets. Its seed follows from
    it."""
    _, layer, where, target = name.split(".")
    return int(layer), where, targets.index(target)


@torch.no_grad()
def plain_state(model: Decoder) -> dict[str, Tensor]:
    """The weights of the plain model, by canonical name, copied to the CPU. Packed weights are dequantized, adapters
    merged."""
    state: dict[str, Tensor] = {}
    replaced: list[str] = []
    for name, weight in model.weights():
        state[f"{name}.weight"] = weight.dense().detach().to("cpu", copy=True)
        if weight.bias is not None:
            state[f"{name}.bias"] = weight.bias.detach().to("cpu", copy=True)
        replaced.append(f"{name}.")
    others = model.state_dict()
    for name, tensor in others.items():
        if not name.startswith(tuple(replaced)):
            state[name] = tensor.detach().to("cpu", copy=True)
    return state
