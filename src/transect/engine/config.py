"""How an engine runs: one frozen description, the same for ``LLM``, ``AsyncEngine`` and the server."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from .scheduler_config import Policy

DEFAULT_BATCHED_TOKENS = 256
"""Tokens of a step. Decoding streams wait for the prefill chunks of others: this many keep a small CPU for 0.15 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What to run and with which limits. None leaves a choice to the engine, which prints what it chose.

    Attributes:
        model: a name for ``models.resolve.resolve``.
        load_format: ``auto``, or ``dummy``: random weights (of ``seed``, or 0) in the shape of a config.json; ``model``
            is a directory that holds one, or a name of ``models.presets``.
        dtype: ``auto`` (the file's own formats, KV cache in bfloat16), ``float32`` (exactly the dequantized model) or
            ``bfloat16`` (on torch alone).
        max_model_len: longest prompt and output together, in tokens; None: the model's, or what the cache holds.
        max_num_seqs: sequences that run at the same time.
        max_num_batched_tokens: tokens of one step, prefill and decode together; None: 256, or max_num_seqs if larger.
        block_size: tokens in a KV block.
        num_kv_blocks, kv_cache_bytes, kv_cache_tokens: size of the KV cache, in one of three units; None: a quarter of
            the memory that is free, at most 2 GiB, or what max_num_seqs sequences of max_model_len can use, if less.
        enable_prefix_caching: keep the KV of finished prompts for later ones that begin alike.
        policy: ``continuous``, or ``static`` to compare with.
        max_queue: requests that may wait; one more is refused. None: no bound.
        async_scheduling: plan a step ahead of the tokens.
        threads: CPU threads of the model; None: the cores that this process may use. They become torch's number of
            threads in this process too, or 1 where the C++ kernels run, which have their own.
        native: the C++ kernels: True insists, False forbids, None uses them if they can run.
        seed: for requests without a seed of their own; None: a random one.
        hung_after_s: silence of the engine process, in seconds, that counts as a hung step.

    Raises:
        ValueError: a value is out of its range.
    """

    model: str
    load_format: Literal["auto", "dummy"] = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_tokens: int | None = None
    enable_prefix_caching: bool = True
    policy: Policy = "continuous"
    max_queue: int | None = None
    async_scheduling: bool = False
    threads: int | None = None
    native: bool | None = None
    seed: int | None = None
    hung_after_s: float = 60.0

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype must be auto, float32 or bfloat16, not {self.dtype!r}")
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format must be auto or dummy, not {self.load_format!r}")
        for name in ("max_num_seqs", "block_size"):
            _positive(name, getattr(self, name))
        sizes = ("num_kv_blocks", "kv_cache_bytes", "kv_cache_tokens")
        for name in ("max_model_len", "max_num_batched_tokens", "max_queue", "threads", *sizes):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        given = [name for name in sizes if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"the size of the KV cache is given twice ({', '.join(given)}): give one of them")
        if self.policy not in ("continuous", "static"):
            raise ValueError(f"policy must be continuous or static, not {self.policy!r}")
        if self.batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs})"
            )
        if not self.hung_after_s > 0:
            raise ValueError(f"hung_after_s must be above 0, got {self.hung_after_s}")

    @property
    def batched_tokens(self) -> int:
        """``max_num_batched_tokens`` with its default filled in."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(DEFAULT_BATCHED_TOKENS, self.max_num_seqs)

    def __str__(self) -> str:
        """The fields that differ from their defaults, for the start-up line."""
        changed = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "model" or value != field.default:
                changed.append(f"{field.name}={value}")
        return ", ".join(changed)


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
