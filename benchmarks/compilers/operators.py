"""The operators of the ladder: shapes, inputs, exact results, and the least FLOPs and bytes. Needs numpy alone, so that
every peer's environment can import it.

Weights are constant between calls, as in a model, so a compiler may pack or fold them. Data changes from call to call:
``copies`` sets of it, together larger than the caches, are used in turn. Arrays are float32 here, rounded to bfloat16
where the work is in bfloat16; a peer converts them to its own type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Arrays = dict[str, np.ndarray]
EPS = 1e-5
ROTATE_BYTES = 128 << 20
"""Data of all copies together: several times a last-level cache."""
THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class Work:
    """One rung: an operator at a size, in a number format.

    Attributes:
        operator: a name of ``OPERATORS``.
        sizes: of its dimensions.
        dtype: ``float32`` or ``bfloat16``.
    """

    operator: str
    sizes: Mapping[str, int]
    dtype: str = "float32"

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def label(self) -> str:
        shape = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        return f"{self.operator.replace('_', ' ')} ({shape})"

    def cost(self) -> tuple[float, float]:
        """Return the least (FLOPs, bytes read and written)."""
        return OPERATORS[self.operator].cost(self.sizes, self.itemsize)

    def weights(self) -> Arrays:
        """Make the constant inputs."""
        return self._made(OPERATORS[self.operator].weights, 0)

    def data(self, copy: int) -> Arrays:
        """Make the inputs of one copy."""
        return self._made(OPERATORS[self.operator].data, copy + 1)

    def copies(self) -> int:
        """Count the sets of data to use in turn."""
        own = sum(array.size for array in self.data(0).values()) * self.itemsize
        return 1 if self.operator == "decoder_step" else max(2, min(8, ROTATE_BYTES // own))

    def exact(self, weights: Arrays, data: Arrays) -> np.ndarray:
        """Compute the result in float64."""
        wide = {name: array.astype(np.float64) for name, array in (weights | data).items()}
        return OPERATORS[self.operator].exact(wide)

    def _made(self, shapes: Callable[[Mapping[str, int]], Mapping[str, tuple[int, ...]]], seed: int) -> Arrays:
        random = np.random.default_rng([seed, *self.operator.encode()])
        made = {}
        for name, shape in shapes(self.sizes).items():
            array = random.standard_normal(shape, dtype=np.float32)
            if name.endswith("norm"):
                array = 1 + array / 8
            elif len(shape) == 2 and shapes is OPERATORS[self.operator].weights:
                array /= math.sqrt(shape[1])
            made[name] = array if self.dtype == "float32" else rounded(array)
        return made


def rounded(x: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, ties to even, kept as float32."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def angles(position: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cosine and sine of a position, float32 ``[head / 2]``."""
    turns = position * THETA ** (-np.arange(0, head, 2) / head)
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Operator:
    weights: Callable[[Mapping[str, int]], Mapping[str, tuple[int, ...]]]
    data: Callable[[Mapping[str, int]], Mapping[str, tuple[int, ...]]]
    exact: Callable[[Arrays], np.ndarray]
    cost: Callable[[Mapping[str, int], int], tuple[float, float]]


def _gelu(a: Arrays) -> np.ndarray:
    x = a["x"]
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def _attention(a: Arrays) -> np.ndarray:
    q, k, v = (a[name].transpose(1, 0, 2) for name in "qkv")
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    return (_softmax(scores) @ v).transpose(1, 0, 2)


def _decoder_step(a: Arrays) -> np.ndarray:
    x, (rows, context, kv_heads, head) = a["x"], a["k_cache"].shape
    cos, sin = angles(context - 1, head)

    def rotated(y: np.ndarray) -> np.ndarray:
        first, second = y[..., : head // 2], y[..., head // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    normed = _rms_norm(x, a["attention_norm"])
    q = rotated((normed @ a["q"].T).reshape(rows, kv_heads, -1, head))
    k_cache, v_cache = a["k_cache"].copy(), a["v_cache"].copy()
    k_cache[:, -1] = rotated((normed @ a["k"].T).reshape(rows, kv_heads, head))
    v_cache[:, -1] = (normed @ a["v"].T).reshape(rows, kv_heads, head)
    p = _softmax(np.einsum("bkgd,btkd->bkgt", q, k_cache) / math.sqrt(head))
    x = x + np.einsum("bkgt,btkd->bkgd", p, v_cache).reshape(rows, -1) @ a["o"].T
    normed = _rms_norm(x, a["mlp_norm"])
    gate, up = normed @ a["gate"].T, normed @ a["up"].T
    return x + (gate / (1 + np.exp(-gate)) * up) @ a["down"].T


def _layer(s: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    dim, q, kv, ffn = s["dim"], s["heads"] * s["head"], s["kv_heads"] * s["head"], s["ffn"]
    norms = {"attention_norm": (dim,), "mlp_norm": (dim,)}
    attention = {"q": (q, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, q)}
    return {**norms, **attention, "gate": (ffn, dim), "up": (ffn, dim), "down": (dim, ffn)}


def _layer_data(s: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    cache = (s["rows"], s["context"], s["kv_heads"], s["head"])
    return {"x": (s["rows"], s["dim"]), "k_cache": cache, "v_cache": cache}


def _layer_cost(s: Mapping[str, int], itemsize: int) -> tuple[float, float]:
    matrices = sum(math.prod(shape) for shape in _layer(s).values() if len(shape) == 2)
    keys = s["rows"] * s["context"] * s["head"]
    flops = 2 * s["rows"] * matrices + 4 * keys * s["heads"]
    return flops, itemsize * (matrices + 2 * keys * s["kv_heads"])


def _plane(flops: int) -> Callable[[Mapping[str, int], int], tuple[float, float]]:
    return lambda s, itemsize: (flops * s["rows"] * s["columns"], 2 * itemsize * s["rows"] * s["columns"])


def _none(_: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    return {}


def _one(s: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    return {"x": (s["rows"], s["columns"])}


OPERATORS: dict[str, _Operator] = {
    "matmul": _Operator(
        lambda s: {"w": (s["n"], s["k"])},
        lambda s: {"x": (s["m"], s["k"])},
        lambda a: a["x"] @ a["w"].T,
        lambda s, size: (
            2 * s["m"] * s["n"] * s["k"],
            size * (s["m"] * s["k"] + s["n"] * s["k"] + s["m"] * s["n"]),
        ),
    ),
    "gelu": _Operator(_none, _one, _gelu, _plane(10)),
    "softmax": _Operator(_none, _one, lambda a: _softmax(a["x"]), _plane(5)),
    "rms_norm": _Operator(
        _none,
        lambda s: {**_one(s), "norm": (s["columns"],)},
        lambda a: _rms_norm(a["x"], a["norm"]),
        _plane(4),
    ),
    "attention": _Operator(
        _none,
        lambda s: dict.fromkeys("qkv", (s["tokens"], s["heads"], s["head"])),
        _attention,
        lambda s, size: (
            2 * s["tokens"] * (s["tokens"] + 1) * s["heads"] * s["head"],
            4 * size * s["tokens"] * s["heads"] * s["head"],
        ),
    ),
    "decoder_step": _Operator(_layer, _layer_data, _decoder_step, _layer_cost),
}


def _ladder(planes: tuple[int, int], product: tuple[int, ...], tokens: int, layer: Mapping[str, int]) -> list[Work]:
    plane = dict(zip(("rows", "columns"), planes, strict=True))
    m, n, k = product
    works = [
        Work("matmul", {"m": m, "n": n, "k": k}),
        *(Work(name, plane) for name in ("gelu", "softmax", "rms_norm")),
        Work("attention", {"tokens": tokens, "heads": layer["heads"], "head": layer["head"]}),
        Work("decoder_step", {"rows": 1, **layer}),
        Work("decoder_step", {"rows": 16, **layer}),
    ]
    return [Work(work.operator, work.sizes, dtype) for work in works for dtype in ("float32", "bfloat16")]


def _sizes(dim: int, ffn: int, heads: int, kv_heads: int, head: int, context: int) -> dict[str, int]:
    return {"dim": dim, "ffn": ffn, "heads": heads, "kv_heads": kv_heads, "head": head, "context": context}


LADDERS = {
    # A layer of Llama-3.2-1B; of Llama-3.1-8B, whose work a GPU is asked for in bfloat16; and one for tests.
    "cpu": _ladder((2048, 4096), (512, 2048, 2048), 1024, _sizes(2048, 8192, 32, 8, 64, 512)),
    "cuda": [
        work
        for work in _ladder((8192, 8192), (4096, 4096, 4096), 4096, _sizes(4096, 14336, 32, 8, 128, 1024))
        if work.dtype == "bfloat16"
    ],
    "small": _ladder((64, 256), (32, 128, 64), 48, _sizes(128, 256, 4, 2, 32, 32)),
}
