r"""AdamW with both moments in 8 bits, by blocks (Dettmers et al. 2021, arXiv:2110.02861).

A block of 256 numbers shares one float32 scale, its largest magnitude a. A code q stands for

    m:  sign(q) a (|q| / 127)^2        v:  a (q / 255)^4

Powers replace the paper's table: small numbers keep a relative precision over four orders of magnitude for m and nine
for v, and square roots alone convert between code and number. A v that would round to 0 is kept at the
smallest code, since the update divides by its root. Parameters of fewer than 4096 numbers (norms, biases) keep float32
moments: they weigh nothing, and errors there hurt most.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...costs.memory.sizes import MOMENT_BLOCK, MOMENT_BLOCKS, SMALL_PARAMETER
from .adamw import adamw_update
from .base import Optimizer


class AdamW8bit(Optimizer):
    """State: ``m`` int8 and ``v`` uint8 ``[blocks, 256]`` with ``m_scale`` and ``v_scale`` ``[blocks, 1]``."""

    def new_state(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter.numel() < SMALL_PARAMETER:
            return {kind: torch.zeros_like(parameter, dtype=torch.float32) for kind in ("m", "v")}
        blocks, device = -(-parameter.numel() // MOMENT_BLOCK), parameter.device
        return {
            "m": torch.zeros(blocks, MOMENT_BLOCK, dtype=torch.int8, device=device),
            "v": torch.zeros(blocks, MOMENT_BLOCK, dtype=torch.uint8, device=device),
            "m_scale": torch.zeros(blocks, 1, device=device),
            "v_scale": torch.zeros(blocks, 1, device=device),
        }

    def update(self, name: str, weight: Tensor, gradient: Tensor, factor: float, scale: Tensor | None) -> None:
        state = self.state[name]
        if "m_scale" not in state:
            adamw_update(self, name, weight, gradient, state["m"], state["v"], factor, scale)
            return
        numbers, gradients = weight.detach().view(-1), gradient.reshape(-1)
        decay = self.decay(name)
        for first in range(0, len(state["m"]), MOMENT_BLOCKS):
            part = {kind: tensor[first : first + MOMENT_BLOCKS] for kind, tensor in state.items()}
            m, v = decode_signed(part["m"], part["m_scale"]), decode_positive(part["v"], part["v_scale"])
            own = numbers[first * MOMENT_BLOCK : (first + MOMENT_BLOCKS) * MOMENT_BLOCK]
            flat, grad = (
                F.pad(values.float(), (0, m.numel() - len(own))).view_as(m)
                for values in (own, gradients[first * MOMENT_BLOCK : (first + MOMENT_BLOCKS) * MOMENT_BLOCK])
            )
            adamw_update(self, name, flat, grad, m, v, factor, scale, decay)
            self.keep(name, own, flat.view(-1)[: len(own)], first * MOMENT_BLOCK)
            part["m"].copy_(encode_signed(m, part["m_scale"]))
            part["v"].copy_(encode_positive(v, part["v_scale"]))


def encode_signed(x: Tensor, scale: Tensor) -> Tensor:
    """Encode float32 ``[blocks, MOMENT_BLOCK]`` to int8 codes, and set ``scale [blocks, 1]``."""
    scale.copy_(x.abs().amax(-1, keepdim=True))
    share = x.abs().div_(scale.clamp(min=torch.finfo(torch.float32).tiny))
    return share.sqrt_().mul_(127).round_().mul_(x.sign()).to(torch.int8)


def decode_signed(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode int8 codes to float32."""
    share = codes.float().div_(127)
    return share.mul_(share.abs()).mul_(scale)


def encode_positive(x: Tensor, scale: Tensor) -> Tensor:
    """Encode nonnegative float32 ``[blocks, MOMENT_BLOCK]`` to uint8 codes, and set ``scale [blocks, 1]``."""
    scale.copy_(x.amax(-1, keepdim=True))
    share = x.div(scale.clamp(min=torch.finfo(torch.float32).tiny))
    codes = share.sqrt_().sqrt_().mul_(255).round_()
    return codes.clamp_(min=1).where(x > 0, 0.0).to(torch.uint8)


def decode_positive(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode uint8 codes to float32."""
    return codes.float().div_(255).square_().square_().mul_(scale)
