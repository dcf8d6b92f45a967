"""Settings of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .drafters.registry import SpeculativeConfig
from .policies.orders.registry import order_policy

Batching = Literal["continuous", "static"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies of a ``Scheduler``.

    Attributes:
        num_blocks: KV blocks in the pool.
        block_size: tokens per KV block.
        max_num_seqs: sequences that hold KV at the same time; a request with n choices takes n places.
        max_num_batched_tokens: tokens per step, prefill and decode together; at least ``max_num_seqs``, so that every
            running sequence gets at least one token in every step.
        max_mixed_tokens: tokens per step in which sequences decode: their next tokens wait for all of it. At least
            ``max_num_seqs``; None for ``max_num_batched_tokens``, the limit of steps without decodes.
        fill_tokens: most tokens of steps with decodes, if no prompt ends later for it (``policies/filling.py``); at
            least ``max_num_seqs``; None for no such limit.
        itl_target: seconds that a step with decodes may take, by the learned step times of the device
            (``policies/budget.py``); 0 for a multiple of the time of the decodes alone; None for no bound on time.
        graph_tokens: tokens of the largest step with prompts that the host hands over at once, as a CUDA graph. It
            takes longer to launch larger ones, so steps sized by time exceed it only if a long queue waits. None if all
            steps are launched alike.
        graph_prompts: most prompts in such a graph; a step with more prompts counts as larger. None for no bound.
        max_model_len: context length: prompt and output tokens of one sequence.
        enable_prefix_caching: keep the KV of full blocks after their owners are gone, and find them by contents.
        batching: "continuous" mixes prefill chunks and decodes, and admits in every step. "static" is there to compare
            with: admit in order of arrival (priorities are not looked at) up to ``max_num_seqs``, as far as the pool
            surely holds them to their ends, run all of them to the end, then admit the next batch.
        longest_first: of requests of the same priority, begin with those that may draw the most tokens, not with those
            that came first. Work that is all there at the start ends sooner so (the rule of the longest processing
            time, Graham 1969); where requests keep coming, short ones would wait for all longer ones. Not looked at
            where batches are static.
        scheduling_policy: a file of ``policies/orders/``: "fcfs" serves a client's requests in the order of arrival,
            and takes no priorities; "priority" the more urgent ones first. Between clients tokens are shared in all of
            them (``policies/order.py``).
        max_queue: requests that may wait for their first step; one more is refused with ``QueueFull``. None for no
            bound.
        max_queue_bytes: bytes that these may hold together, one client half of them; max_queue_wait: seconds that a new
            request may have to wait, as far as can be predicted (``policies/admission.py``). None for no bound.
        max_prefill_chunk: prompt tokens of one sequence per step at the most, so that short prompts can run beside a
            long one and steps stay short; None for as many as the token budget leaves.
        watermark: share of the pool that must stay free when a sequence is admitted beside others, so that those that
            run can grow for a while without preemption.
        speculation: speculative decoding: drafts that steps verify (``policies/speculation.py``), or its fields as a
            mapping; None for none.
        jump_ahead: take tokens that a grammar forces as given, and compute them together (``jump_ahead.py``).
        max_adapters: different adapters of sequences that run at the same time; None for no bound.
        pipeline_depth: steps that are under way at the same time. With more than 1 a step has only sequences whose last
            token is known, and at most its share of those that run, so that the others can be in the next.
        seed: requests without a seed of their own get one that depends on this number and on how many requests came
            before, so that a run can be repeated; None takes a random number.

    Raises:
        ValueError: a number is out of its range; the message says which and what to change.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_mixed_tokens: int | None = None
    fill_tokens: int | None = None
    itl_target: float | None = None
    graph_tokens: int | None = None
    graph_prompts: int | None = None
    max_model_len: int = 2048
    enable_prefix_caching: bool = True
    batching: Batching = "continuous"
    scheduling_policy: str = "fcfs"
    longest_first: bool = False
    max_queue: int | None = None
    max_queue_bytes: int | None = None
    max_queue_wait: float | None = None
    max_prefill_chunk: int | None = None
    speculation: SpeculativeConfig | Mapping[str, Any] | None = None
    jump_ahead: bool = True
    watermark: float = 0.01
    max_adapters: int | None = None
    pipeline_depth: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.speculation, Mapping):
            object.__setattr__(self, "speculation", SpeculativeConfig.of(self.speculation))
        for name in (
            "num_blocks",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "pipeline_depth",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_queue", "max_queue_bytes", "max_prefill_chunk", "graph_prompts", "max_adapters"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or None for no bound, got {value}")
        if self.max_model_len < 2:
            raise ValueError(
                f"max_model_len must leave room for a prompt and an output token, got {self.max_model_len}"
            )
        for name in ("max_num_batched_tokens", "max_mixed_tokens", "fill_tokens"):
            tokens = getattr(self, name)
            if tokens is not None and tokens < self.max_num_seqs:
                raise ValueError(
                    f"{name} ({tokens}) must be at least max_num_seqs ({self.max_num_seqs}): every running sequence "
                    "needs a token of each step"
                )
        if self.itl_target is not None and not 0.0 <= self.itl_target < float("inf"):
            raise ValueError(f"itl_target must be a number of seconds, 0 for automatic, or None, got {self.itl_target}")
        if self.max_queue_wait is not None and not self.max_queue_wait > 0:
            raise ValueError(f"max_queue_wait must be a number of seconds, or None, got {self.max_queue_wait}")
        if self.speculation is not None and self.batching == "static":
            raise ValueError(
                "speculative decoding works with continuous batching: leave out speculative_config or static batching"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")
        if self.batching not in ("continuous", "static"):
            raise ValueError(f'batching must be "continuous" or "static", got {self.batching!r}')
        order_policy(self.scheduling_policy)

    @property
    def max_rows(self) -> int:
        """Most rows of a decode step: those of sequences, and of their drafts."""
        if not isinstance(self.speculation, SpeculativeConfig):
            return self.max_num_seqs
        return self.speculation.rows(self.max_num_seqs, self.max_num_batched_tokens)
