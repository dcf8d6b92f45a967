"""Size the KV cache of a GPU engine: the memory left by the weights, the largest step and CUDA graphs."""

from __future__ import annotations

from ....costs.memory.measured import MemoryAccount, refusal
from ....costs.memory.serving import kept_for_graphs
from ...kv_size import KVSize, kv_size
from .load import Loaded
from .measure import MeasuredBytes
from .setup import Setup
from .step_sizes import mixed_sizes, row_buckets, widths


def size(setup: Setup, loaded: Loaded, measured: MeasuredBytes) -> tuple[MemoryAccount, KVSize]:
    """Account for the GPU's memory, and size the KV cache by the rest.

    Raises:
        ValueError: the remaining or requested memory does not hold one sequence; the message says what to change.
    """
    account = MemoryAccount(
        total=setup.total,
        usable=int(setup.total * setup.config.gpu_memory_utilization),
        others=setup.others,
        weights=loaded.model.device_nbytes,
        tables=loaded.allocated - loaded.model.device_nbytes + measured.tables,
        largest_step=measured.largest_step,
        graphs=_graph_bytes(setup, loaded, measured),
    )
    return account, _cache_size(setup, account)


def _graph_bytes(setup: Setup, loaded: Loaded, measured: MeasuredBytes) -> int:
    """Return the bytes to keep free for CUDA graphs, and for requests with penalties or biases."""
    seqs, block = setup.limits["max_num_seqs"], setup.config.block_size
    captured = 0 if setup.config.cuda_graphs == "off" else len(row_buckets(seqs, setup.tricks["fine_rows"]))
    if captured and setup.irregular:
        most = -(-setup.limits["max_model_len"] // block)
        captured *= len(widths(block, most))
        tokens = min(setup.tricks["graph_tokens"], setup.limits["max_num_batched_tokens"])
        captured += len(mixed_sizes(tokens, block, most, seqs))
    captured *= 1 + setup.config.enable_lora
    rebuilt = max(weight.workspace for _, weight in loaded.model.projections()) if captured else 0
    share = min(1.0, setup.tricks["graph_tokens"] / setup.limits["max_num_batched_tokens"])
    return kept_for_graphs(setup.model.vocab_size, seqs, captured) + rebuilt + int(measured.largest_step * share)


def _cache_size(setup: Setup, account: MemoryAccount) -> KVSize:
    config, per_token = setup.config, setup.kv_per_token
    padding = int(per_token * config.block_size)  # of the block that padding rows write to
    left = account.for_cache - padding
    needed = int(per_token * (config.max_model_len or 1))
    if left < max(needed, padding):
        raise ValueError(refusal(account, max(needed, padding) + padding, config.max_model_len or 1, per_token))
    return kv_size(
        config,
        max_num_seqs=config.limits("cuda")[0],
        model_positions=setup.model.max_position,
        bytes_per_token=per_token,
        free_bytes=left,
        default_bytes=left,
    )
