"""JAX under ``jit``: each rung of ``compilers/ladder.py`` in plain ``jax.numpy``, compiled by XLA."""

from __future__ import annotations

import math
import os
from functools import partial
from typing import Any

import numpy as np

from benchmarks.compilers.operators import EPS, Arrays, Work, angles
from benchmarks.peers.peer import Prepared


class Jax:
    """Functions compiled for the shapes of the work."""

    def __init__(self, device: str, threads: int, tuning: int) -> None:
        os.environ["JAX_PLATFORMS"] = device
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # other peers are on the GPU too
        import jax

        self.jax, self.device, self.threads = jax, device, threads
        if len(os.sched_getaffinity(0)) > threads:  # XLA asks for as many threads as it may run on
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])

    def versions(self) -> dict[str, str]:
        import jaxlib

        return {"jax": self.jax.__version__, "jaxlib": jaxlib.__version__}

    def lacks(self, work: Work) -> str | None:
        return None

    def prepare(self, work: Work, weights: Arrays, data: list[Arrays]) -> Prepared:
        jax = self.jax
        dtype = jax.numpy.dtype(work.dtype)

        def placed(arrays: Arrays) -> dict[str, Any]:
            return {name: jax.device_put(jax.numpy.asarray(array, dtype)) for name, array in arrays.items()}

        own, sets = placed(weights), [placed(each) for each in data]
        if work.operator != "decoder_step":
            run = jax.jit(function(jax, work, self.device))
            made = run.lower(**own, **sets[0]).compile()
            last: list[Any] = [None]

            def call(copy: int) -> Any:
                last[0] = made(**own, **sets[copy])
                return last[0]

            return Prepared(call, lambda: last[0].block_until_ready(), as_array, len(sets))
        turns = placed(dict(zip(("cos", "sin"), angles(work.sizes["context"] - 1, work.sizes["head"]), strict=True)))
        run = jax.jit(partial(decoder_step, jax), donate_argnums=(0,))  # the caches are written in place
        caches = {name: sets[0].pop(name) for name in ("k_cache", "v_cache")}
        state = [caches, sets[0]["x"]]
        made = run.lower(caches, x=state[1], weights=own, **turns).compile()

        def step(_: int) -> Any:
            result, state[0] = made(state[0], x=state[1], weights=own, **turns)
            state_result[0] = result
            return result

        state_result: list[Any] = [None]
        return Prepared(step, lambda: state_result[0].block_until_ready(), as_array, 1)


def as_array(result: Any) -> np.ndarray:
    """Convert a result to float64."""
    return np.asarray(result.astype("float32")).astype(np.float64)


def rms_norm(jax: Any, x: Any, weight: Any) -> Any:
    """Normalize in float32."""
    wide = x.astype("float32")
    scale = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + EPS)
    return (wide * scale * weight.astype("float32")).astype(x.dtype)


def function(jax: Any, work: Work, device: str) -> Any:
    """Return the function of a rung; attention on a GPU is cuDNN's."""
    attention = partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="cudnn" if device == "cuda" else "xla"
    )
    return {
        "matmul": lambda x, w: x @ w.T,
        "gelu": lambda x: jax.nn.gelu(x, approximate=True),
        "softmax": lambda x: jax.nn.softmax(x, axis=-1),
        "rms_norm": lambda x, norm: rms_norm(jax, x, norm),
        "attention": lambda q, k, v: attention(q[None], k[None], v[None])[0],
    }[work.operator]


def decoder_step(jax: Any, caches: dict[str, Any], x: Any, weights: dict[str, Any], cos: Any, sin: Any) -> Any:
    """Compute one layer for one token of each row; returns the result and the caches with the token's key and value."""
    jnp = jax.numpy
    rows, _, kv_heads, head = caches["k_cache"].shape

    def rotated(y: Any) -> Any:
        first, second = jnp.split(y, 2, -1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    normed = rms_norm(jax, x, weights["attention_norm"])
    q = rotated((normed @ weights["q"].T).reshape(rows, kv_heads, -1, head))
    k_cache = caches["k_cache"].at[:, -1].set(rotated((normed @ weights["k"].T).reshape(rows, kv_heads, head)))
    v_cache = caches["v_cache"].at[:, -1].set((normed @ weights["v"].T).reshape(rows, kv_heads, head))
    p = jax.nn.softmax(jnp.einsum("bkgd,btkd->bkgt", q, k_cache).astype("float32") / math.sqrt(head), axis=-1)
    attended = jnp.einsum("bkgt,btkd->bkgd", p.astype(x.dtype), v_cache).reshape(rows, -1)
    x = x + attended @ weights["o"].T
    normed = rms_norm(jax, x, weights["mlp_norm"])
    hidden = jax.nn.silu(normed @ weights["gate"].T) * (normed @ weights["up"].T)
    return x + hidden @ weights["down"].T, {"k_cache": k_cache, "v_cache": v_cache}


COMPILER = Jax
