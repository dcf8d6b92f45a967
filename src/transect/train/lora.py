r"""Low-rank adapters in place of ``Linear`` (Hu et al. 2021, arXiv:2106.09685).

    y = W x + (alpha / rank) B A x        A [rank, in] random, B [out, rank] zero at the start, W frozen

At the start the model is the base model exactly. ``merged_state`` gives the weights of a plain model, W + (alpha /
rank) B A, which any engine serves.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..models.decoder import Decoder
from ..models.linear import Linear
from ..ops.cpu.training import Kernels
from .adapted_product import adapted_product, cpu_kernels
from .config import LoRAConfig


class LoRALinear(nn.Module):
    """``[T, in] -> [T, out]`` as above. ``base`` is any module with that call and ``dense_weight()`` or ``weight``.

    ``native`` computes it where the base is a frozen float32 ``Linear`` on the CPU.
    """

    def __init__(
        self,
        base: nn.Module,
        inputs: int,
        outputs: int,
        rank: int,
        alpha: float,
        *,
        seed: int,
        native: Kernels | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.native = native if isinstance(base, Linear) else None
        self.scale = alpha / rank
        floating = (t for t in [*base.parameters(), *base.buffers()] if t.is_floating_point())
        example: Tensor | None = next(floating, None)
        if example is None:
            raise ValueError("an adapter needs a base with floating-point weights or scales")
        generator = torch.Generator().manual_seed(seed)
        bound = 1 / math.sqrt(inputs)
        a = torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)
        self.a = nn.Parameter(a.to(example.device, example.dtype))
        self.b = nn.Parameter(torch.zeros(outputs, rank, device=example.device, dtype=example.dtype))

    def forward(self, x_TI: Tensor) -> Tensor:
        if self.native is not None and x_TI.dtype == torch.float32:
            return adapted_product(self.native, x_TI, self.base, self.a, self.b, self.scale)
        out: Tensor = self.base(x_TI)
        return torch.addmm(out, x_TI @ self.a.mT, self.b.mT, alpha=self.scale)

    def merged(self) -> Tensor:
        """The weight ``[out, in]`` of the plain ``Linear`` that computes the same, in the base's dtype."""
        base: Any = self.base
        weight: Tensor = base.dense_weight() if hasattr(base, "dense_weight") else base.weight
        return (weight.float() + self.scale * (self.b.float() @ self.a.float())).to(weight.dtype)


def attach(model: Decoder, config: LoRAConfig, *, seed: int) -> list[str]:
    """Freeze the model and put an adapter on each matrix that ``config.targets`` names, in every layer.

    Returns:
        The names of the matrices that have one.
    """
    model.requires_grad_(False)
    names: list[str] = []
    native = cpu_kernels(model.norm.weight)
    for index, layer in enumerate(model.layers):
        for where in ("attention", "mlp"):
            part: Any = getattr(layer, where)
            for target in config.targets:
                base = getattr(part, target, None)
                if base is None:
                    continue
                inputs, outputs = base.in_features, base.out_features
                key = seed * 1_000_003 + len(names)
                adapter = LoRALinear(base, inputs, outputs, config.rank, config.alpha, seed=key, native=native)
                setattr(part, target, adapter)
                names.append(f"layers.{index}.{where}.{target}")
    if not names:
        raise ValueError(f"the model has no matrix called {', '.join(config.targets)}: correct lora.targets")
    return names


@torch.no_grad()
def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the plain model, by canonical name, on the CPU; 4-bit ones as what they stand for."""
    state: dict[str, Tensor] = {}
    replaced: list[str] = []
    for name, module in model.named_modules():
        if name.startswith(tuple(replaced)):
            continue
        plain: Any = module.base if isinstance(module, LoRALinear) else module
        if isinstance(module, LoRALinear):
            state[f"{name}.weight"] = module.merged().cpu()
        elif hasattr(module, "dense_weight"):
            state[f"{name}.weight"] = plain.dense_weight().cpu()
        else:
            continue
        replaced.append(f"{name}.")
        if plain.bias is not None:
            state[f"{name}.bias"] = plain.bias.detach().cpu().clone()
    for name, tensor in model.state_dict().items():
        if not name.startswith(tuple(replaced)):
            state[name] = tensor.detach().cpu().clone()
    return state
