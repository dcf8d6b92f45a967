"""PyTorch without a compiler: each rung of ``compilers/ladder.py`` in torch's own operators (oneDNN or MKL on CPUs,
cuBLAS and cuDNN on GPUs). ``torch_inductor.py`` compiles the same modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.compilers.operators import EPS, Arrays, Work, angles
from benchmarks.peers.peer import Prepared


class Rung(nn.Module):
    """An operator over constant weights; ``forward`` takes the data by name."""

    def __init__(self, work: Work, weights: dict[str, Tensor], constants: dict[str, Tensor]) -> None:
        super().__init__()
        self.work = work
        for name, tensor in (weights | constants).items():
            self.register_parameter(f"w_{name}", nn.Parameter(tensor, requires_grad=False))
        self.run: Callable[..., Tensor] = getattr(self, work.operator)

    def forward(self, **data: Tensor) -> Tensor:
        return self.run(**data)

    def matmul(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w_w)

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    def softmax(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    def rms_norm(self, x: Tensor, norm: Tensor) -> Tensor:
        return F.rms_norm(x, norm.shape, norm, EPS)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (each.transpose(0, 1)[None] for each in (q, k, v))
        return F.scaled_dot_product_attention(*heads, is_causal=True)[0].transpose(0, 1)

    def decoder_step(self, x: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        rows, _, kv_heads, head = k_cache.shape

        def rotated(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            return torch.cat([first * self.w_cos - second * self.w_sin, second * self.w_cos + first * self.w_sin], -1)

        normed = self.rms_norm(x, self.w_attention_norm)
        q = rotated(F.linear(normed, self.w_q).view(rows, -1, 1, head))
        k_cache[:, -1] = rotated(F.linear(normed, self.w_k).view(rows, kv_heads, head))
        v_cache[:, -1] = F.linear(normed, self.w_v).view(rows, kv_heads, head)
        keys, values = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, keys, values, scale=1 / math.sqrt(head), enable_gqa=True)
        x = x + F.linear(attended.reshape(rows, -1), self.w_o)
        normed = self.rms_norm(x, self.w_mlp_norm)
        hidden = F.silu(F.linear(normed, self.w_gate)) * F.linear(normed, self.w_up)
        return x + F.linear(hidden, self.w_down)


class Torch:
    """Torch's own operators."""

    def __init__(self, device: str, threads: int, tuning: int) -> None:
        torch.set_num_threads(threads)
        self.device = device

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

    def lacks(self, work: Work) -> str | None:
        return None

    def tensors(self, arrays: Arrays, work: Work) -> dict[str, Tensor]:
        """Move arrays to the device, in the dtype of the work."""
        dtype = getattr(torch, work.dtype)
        return {name: torch.from_numpy(array).to(self.device, dtype) for name, array in arrays.items()}

    def constants(self, work: Work) -> dict[str, Tensor]:
        """Return cosine and sine of the position of a decoder step."""
        if work.operator != "decoder_step":
            return {}
        cos, sin = angles(work.sizes["context"] - 1, work.sizes["head"])
        return self.tensors({"cos": cos, "sin": sin}, work)

    def prepare(self, work: Work, weights: Arrays, data: list[Arrays]) -> Prepared:
        rung = Rung(work, self.tensors(weights, work), self.constants(work)).eval()
        return self.prepared(rung, [self.tensors(each, work) for each in data])

    def prepared(self, run: Callable[..., Tensor], data: list[dict[str, Tensor]], note: str = "") -> Prepared:
        """Wrap a function of tensors."""

        def call(copy: int) -> Tensor:
            with torch.inference_mode():
                return run(**data[copy])

        wait: Callable[[], Any] = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        return Prepared(call, wait, as_array, len(data), note)


def as_array(result: Tensor) -> np.ndarray:
    """Convert a result to float64."""
    return result.detach().double().cpu().numpy()


COMPILER = Torch
