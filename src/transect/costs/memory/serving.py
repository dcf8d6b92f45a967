"""The memory of an engine: weights, tables, the largest step, what CUDA graphs keep, and the KV cache in the rest.

An engine on a GPU measures its largest step before it makes the cache; what is said of that step here is arithmetic
from the shapes, to plan with on machines one does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ...spec.layouts.ranks import RankLayout
from ...spec.layouts.shards import Shard, vocabulary_share
from ...spec.model import ModelConfig
from ..model import kv_bytes_per_token, weight_bytes
from ..storage import Storage
from ..units import gib
from .kept import Backend
from .shared import MOST_BYTES, lines_for, sums_bytes
from .streaming import StreamPlan
from .terms import Estimate, Phase, Term

GRAPH_BYTES = 4 * 2**20
"""Bytes of one captured graph beside the shared memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """A way to serve.

    Attributes:
        weights: bytes of the weights as they are held.
        element: bytes of a number in the compute dtype. kv_element: of one in the cache.
        max_num_seqs, max_num_batched_tokens: limits of a step.
        context: longest prompt and output together, in tokens.
        graphs: CUDA graphs of decode steps; 0 for none.
        share: of the budget that the engine may fill.
        most_cache: bytes that the cache takes at most; None without such a limit.
        stream: layers that stream; the device has slots for them only.
        shared: bytes that the GPUs of a tensor group read and write of each other.
    """

    weights: int
    element: int = 2
    kv_element: float = 2
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    context: int = 8192
    block_size: int = 16
    graphs: int = 0
    share: float = 0.9
    most_cache: int | None = None
    backend: Backend = "gpu"
    stream: StreamPlan | None = None
    shared: int = 0


@dataclass(frozen=True, slots=True)
class ServingEstimate:
    """The account, and the size of the cache in tokens and in ``sequences`` of the full context."""

    account: Estimate
    kv_bytes_per_token: int
    cache_tokens: int
    sequences: int
    fits: bool
    change: str
    """Smallest change that makes the plan fit; empty if it fits as it is."""


def kept_for_graphs(vocab_size: int, max_num_seqs: int, graphs: int) -> int:
    """Return the bytes kept free for CUDA graphs, and for requests with penalties or biases."""
    return 2 * max_num_seqs * vocab_size * 6 + 2 * GRAPH_BYTES * graphs


def largest_step(config: ModelConfig, plan: ServingPlan) -> int:
    """Return the bytes of a step: activations if it is full of prompt tokens, logits if it is full of sequences."""
    tokens, e = plan.max_num_batched_tokens, plan.element
    attention = 2 * config.q_dim + 2 * config.kv_dim
    mlp = (3 if config.gated_mlp else 2) * config.widest_mlp
    copies = 0 if config.moe is None else config.moe.per_token  # the outputs of each expert
    activations = e * tokens * ((3 + copies) * config.dim + max(attention, mlp))
    rows = min(plan.max_num_seqs, tokens)
    return activations + rows * config.vocab_size * (e + 4 + 4)


def serving(config: ModelConfig, plan: ServingPlan, budget: int | None = None) -> ServingEstimate:
    """Account for ``plan``.

    Args:
        budget: bytes of the device that are free. The cache takes the rest of ``plan.share`` of them, at most the bytes
            that all sequences can use; with None it takes that most.
    """
    per_token = int(kv_bytes_per_token(config, Storage(kv=8 * plan.kv_element)))
    block = per_token * plan.block_size
    one = -(-plan.context // plan.block_size) * block
    gpu = plan.backend == "gpu"
    stream = plan.stream
    own, how = plan.weights, "as they are held while serving"
    if stream is not None:
        own, how = own - stream.saved, f"of {stream.total} layers {stream.total - len(stream.layers)} stay, and slots"
    weights = Term("weights", own, how)
    angles = 4 * plan.context * config.head_dim if config.position == "rope" and gpu else 0
    tables = Term("tables", angles, f"cos and sin of {plan.context} positions in float32")
    step = Term(
        "largest step",
        largest_step(config, plan),
        f"{plan.max_num_batched_tokens} tokens through a layer, logits of {plan.max_num_seqs} (an engine measures it)",
    )
    kept = kept_for_graphs(config.vocab_size, plan.max_num_seqs, plan.graphs) if gpu else 0
    graphs = Term("graphs", kept, f"{plan.graphs} CUDA graphs and their pool; counts of requests with penalties")
    rest = [weights, tables, step, graphs]
    if plan.shared:
        rest.append(Term("shared memory", plan.shared, "sums between GPUs, logits that other GPUs read"))
    fixed = sum(term.bytes for term in rest)
    most = one * plan.max_num_seqs
    room = most if budget is None else int(budget * plan.share) - fixed
    if plan.most_cache is not None:
        room = min(room, plan.most_cache)
    cache = min(most, max(0, room) // block * block)
    held = cache // per_token
    kv = Term(
        "KV cache", cache, f"{held} tokens of {per_token} bytes ({config.n_layers} layers, {config.kv_dim} wide, twice)"
    )
    terms = (*rest, kv)
    margin = 0 if budget is None else budget - int(budget * plan.share)
    loaded, running = ({t.name: t.bytes for t in part} for part in ((weights, tables), terms))
    account = Estimate(
        terms,
        (Phase("loaded", loaded), Phase("serving", running)),
        Term("margin", margin, f"{1 - plan.share:.0%} of the device is left to other programs"),
    )
    fits = room >= one
    change = "" if fits or budget is None else _change(config, plan, budget, room, per_token)
    return ServingEstimate(account, per_token, held, cache // one, fits, change)


def _change(config: ModelConfig, plan: ServingPlan, budget: int, room: int, per_token: int) -> str:
    """Suggest a shorter context, else smaller steps, else a larger share, else nothing."""
    tokens = max(0, room) // (per_token * plan.block_size) * plan.block_size
    if tokens >= 256:
        return f"lower the context to {tokens} tokens"
    if plan.max_num_batched_tokens > 512:
        smaller = replace(plan, max_num_batched_tokens=512, max_num_seqs=min(plan.max_num_seqs, 16))
        found = serving(config, smaller, budget)
        if found.fits:
            return "lower max_num_batched_tokens to 512 and max_num_seqs to 16"
        if found.cache_tokens >= 256:
            return f"lower max_num_batched_tokens to 512, max_num_seqs to 16 and the context to {found.cache_tokens}"
    advice = f"take a smaller model or one with fewer bits a weight (the weights take {gib(plan.weights)})"
    return advice if plan.stream is not None else f"{advice}, or let layers stream (--cpu-offload-gb)"


# ---- several ranks --------------------------------------------------------------------------------------------------

MOST_RANKS = 64
Streams = Callable[[Mapping[str, tuple[int, ...]]], StreamPlan | None]


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """One stage of a layout: the part of its first rank, and the account of that rank."""

    shard: Shard
    estimate: ServingEstimate
    stream: StreamPlan | None = None


def stages(
    config: ModelConfig,
    layout: RankLayout,
    plan: ServingPlan,
    storage: Storage,
    budget: int | None,
    streams: Streams = lambda shapes: None,
) -> list[StageEstimate]:
    """Account for a rank of each stage.

    Ranks that differ only by their tokens of the vocabulary need the same but for a few rows, so the first rank of a
    stage stands for all.

    Args:
        plan: of the whole model; its ``weights`` are divided in proportion to ``storage``.
        budget: bytes of one device that are free.
        streams: the layers that stream of a rank with these shapes of weights.

    Raises:
        ValueError: the model cannot be cut so.
    """
    whole = weight_bytes(config, storage)
    shared = shared_bytes(config.vocab_size, layout.tensor, plan)
    found = []
    for stage in range(layout.pipeline):
        sharing = layout.tensor * layout.data if layout.expert else 1
        shard = Shard(config, 0, layout.tensor, stage, layout.pipeline, 0, sharing)
        shapes = shard.shapes()
        share = weight_bytes(config, storage, shapes) / whole
        own = replace(plan, weights=int(plan.weights * share), stream=streams(shapes), shared=shared)
        found.append(StageEstimate(shard, serving(shard.local, own, budget), own.stream))
    return found


def shared_bytes(vocab: int, tensor: int, plan: ServingPlan) -> int:
    """Return the bytes that a GPU shares with the others of its tensor group: memory for sums, and its logits."""
    if tensor == 1 or plan.backend != "gpu":
        return 0
    logits = plan.max_num_seqs * vocabulary_share(vocab, tensor) * plan.element
    return sums_bytes(lines_for(tensor, MOST_BYTES)) + logits


def smallest_sharing(
    config: ModelConfig, plan: ServingPlan, storage: Storage, budget: int, most: int = MOST_RANKS
) -> RankLayout | None:
    """Find the layout with the fewest ranks that share the experts, and then the fewest that cut the rest, that fits on
    every rank."""
    layouts = (RankLayout(cut, 1, ranks // cut, True) for ranks in range(2, most + 1) for cut in _divisors(ranks))
    return _first_that_fits(layouts, config, plan, storage, budget)


def smallest_layout(
    config: ModelConfig, plan: ServingPlan, storage: Storage, budget: int, most: int = MOST_RANKS
) -> RankLayout | None:
    """Find the layout with the fewest ranks, and then the fewest stages, in which every rank fits."""
    layouts = (RankLayout(ranks // depth, depth) for ranks in range(1, most + 1) for depth in _divisors(ranks))
    return _first_that_fits(layouts, config, plan, storage, budget)


def _divisors(ranks: int) -> list[int]:
    return [n for n in range(1, ranks + 1) if ranks % n == 0]


def _first_that_fits(
    layouts: Iterable[RankLayout], config: ModelConfig, plan: ServingPlan, storage: Storage, budget: int
) -> RankLayout | None:
    for layout in layouts:
        try:
            found = stages(config, layout, plan, storage, budget)
        except ValueError:  # the model cannot be cut like this
            continue
        if all(stage.estimate.fits for stage in found):
            return layout
    return None
