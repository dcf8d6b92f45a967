"""The model that drafts (``speculative_config``), beside the engine's own: its checks, its memory, its executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..checkpoints.resolve import ModelSource, resolve
from ..costs.model import kv_bytes_per_token, weight_bytes
from ..costs.storage import Storage
from ..parallel.mesh import Mesh
from ..text.number_text import NumberText
from ..text.tokenizer import Tokenizer
from .config import EngineConfig
from .kv_size import KVSize
from .scheduling.batch import Clock, Executor
from .scheduling.drafters.model import ModelDrafter
from .scheduling.policies.model_speculation import ModelSpeculation
from .scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from ..checkpoints.eagle import HeadSource

LOOKED_AT = 1000
"""Tokens of two vocabularies that are compared."""
SPARED = 0.95
"""Share of a GPU's memory for KV caches that is planned before the weights are loaded: the rest is for what differs."""


def draft_source(config: EngineConfig, source: ModelSource) -> ModelSource | HeadSource | None:
    """Find the model or the head that drafts; None if none does.

    Raises:
        ValueError: it has another vocabulary than the engine's model, is not smaller, or is a head of another model.
    """
    speculation = config.speculation
    if speculation is None or not speculation.drafts_by_model:
        return None
    assert speculation.model is not None
    if speculation.reads_model:
        from ..checkpoints.eagle import resolve_head

        return resolve_head(speculation.model, source)
    found = resolve(speculation.model, load_format=config.load_format)
    check_pair(found, source)
    return found


def check_pair(draft: ModelSource, source: ModelSource) -> None:
    """Check that a model can draft for another.

    Raises:
        ValueError: it has another vocabulary, or is not smaller.
    """
    own, other = source.config.vocab_size, draft.config.vocab_size
    if own != other:
        raise ValueError(
            f"the draft model {draft.name} has a vocabulary of {other} tokens, and {source.name} one of {own}: drafts "
            "are token ids, so take a draft model with the same vocabulary"
        )
    own_bytes, draft_bytes = weight_bytes(source.config), weight_bytes(draft.config)
    if draft_bytes >= own_bytes:
        raise ValueError(
            f"the draft model {draft.name} is not smaller than {source.name} ({draft_bytes / 2**20:.0f} MiB of weights "
            f"in 16 bits, and {own_bytes / 2**20:.0f}): drafts would take longer than the tokens, so take a smaller one"
        )
    if "shape" in (draft.kind, source.kind):
        return
    ours, theirs = Tokenizer.from_source(source), Tokenizer.from_source(draft)
    if isinstance(ours, NumberText) or isinstance(theirs, NumberText):
        return
    for token in range(0, own, max(1, own // LOOKED_AT)):
        if ours.token_bytes(token) != theirs.token_bytes(token):
            raise ValueError(
                f"the draft model {draft.name} has another vocabulary than {source.name} (token {token} is "
                f"{theirs.token_bytes(token)!r} there, and {ours.token_bytes(token)!r} here): take a draft model with "
                "the same vocabulary"
            )


def draft_config(config: EngineConfig, source: ModelSource, size: KVSize) -> EngineConfig:
    """Return the settings of the drafting model; ``size``: the KV cache of the engine's model, which has as many
    tokens."""
    speculation = config.speculation
    assert speculation is not None and speculation.model is not None
    return replace(
        config,
        model=speculation.model,
        revision=None,
        adapter=None,
        enable_lora=False,
        lora_target_modules=(),
        quantization=speculation.quantization,
        speculative_config=None,
        max_model_len=min(size.max_model_len, source.config.max_position),
        num_kv_blocks=size.num_blocks,
        kv_cache_bytes=None,
        kv_cache_tokens=None,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        enable_expert_parallel=False,
        cpu_offload_gb=0.0,
        offload_folder=None,
        decision_log=None,
    )


def planned_size(
    config: EngineConfig, source: ModelSource, draft: ModelSource, free: float, storage: Storage
) -> KVSize:
    """Plan the KV cache of both models on a GPU, before either is loaded.

    Args:
        free: bytes that the engine may use.
        storage: the number formats of the engine's model.
    """
    longest = config.max_model_len or source.config.max_position
    size = config.block_size
    if config.num_kv_blocks is not None:
        return KVSize(config.num_kv_blocks, min(longest, config.num_kv_blocks * size))
    per_token = kv_bytes_per_token(source.config, storage)
    if config.kv_cache_tokens is not None:
        tokens = float(config.kv_cache_tokens)
    elif config.kv_cache_bytes is not None:
        tokens = config.kv_cache_bytes / per_token
    else:
        left = SPARED * free - weight_bytes(source.config, storage) - weight_bytes(draft.config)
        tokens = min(
            max(left, 0.0) / (per_token + kv_bytes_per_token(draft.config, Storage(kv=storage.kv))),
            float(config.limits("cuda")[0] * longest),
        )
    blocks = max(1, int(tokens // size))
    return KVSize(blocks, min(longest, blocks * size))


def attach(
    scheduler: Scheduler,
    executor: Executor,
    draft: EngineConfig | None,
    size: KVSize,
    clock: Clock,
    mesh: Mesh | None,
    limits: tuple[int, int],
) -> None:
    """Let a scheduler draft with a model, or with a head.

    Args:
        executor: runs what drafts.
        draft: the settings of the model that drafts; None for a head, whose blocks are those of the scheduler.
        size: the KV cache.
        mesh: all ranks; the first one's drafts are taken by all of them.
        limits: (sequences, tokens) of its largest batch.
    """
    speculation = scheduler.speculation
    assert isinstance(speculation, ModelSpeculation)
    agree: Callable[[dict[int, tuple[int, ...]]], dict[int, tuple[int, ...]]] | None = None
    if mesh is not None:
        world = mesh.world
        agree = lambda drafts: world.exchange(drafts)[0]  # noqa: E731
    shared: dict[str, Any] = {
        "max_rows": limits[0],
        "max_tokens": limits[1],
        "max_model_len": size.max_model_len,
        "clock": clock,
        "agree": agree,
    }
    if draft is None:
        from .scheduling.drafters.eagle import HeadDrafter

        speculation.model = HeadDrafter(executor, blocks=scheduler.blocks, **shared)
        return
    speculation.model = ModelDrafter(
        executor,
        num_blocks=size.num_blocks,
        block_size=draft.block_size,
        enable_prefix_caching=draft.enable_prefix_caching,
        **shared,
    )
