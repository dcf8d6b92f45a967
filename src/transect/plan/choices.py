"""A way to serve a model (card, cards per engine, formats), and the behaviour of its engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..costs.floors import Rates
from ..costs.machine import Machine
from ..costs.memory.serving import ServingPlan, stages
from ..costs.model import kv_bytes_per_token, weight_bytes
from ..costs.presets import Preset
from ..costs.serving import HOPPER, ServingSteps, steps_on
from ..costs.steps import StepLoad, launch_bound_tokens
from ..costs.storage import Storage, storage_for
from ..costs.warmth import Slowdown
from ..engine.executors.gpu.step_sizes import FEWEST_ROWS, StepPadding, row_buckets
from ..engine.scheduling.batch import ScheduledBatch
from ..engine.scheduling.leap import DecodeSeconds
from ..engine.scheduling.scheduler_config import SchedulerConfig
from ..spec.layouts.ranks import RankLayout
from ..spec.model import ModelConfig
from ..spec.numbers.registry import cache_bits
from .fleet import EngineModel

SEQUENCES, STEP_TOKENS = 512, 8192
"""Limits of a server on a GPU by default (``EngineConfig``)."""
SHARE = 0.9
"""Share of a GPU's memory that an engine fills."""
HOPPERS = ("h100", "h200")
"""Presets of cards with kernels that take any number of rows."""
HOST_S = 150e-6
"""Seconds of the host before each step, of the engine loop on an H200's host."""
WARMING = 0.1
"""``Slowdown.gain`` of an H200: its decodes are slower by so much if prompts keep it busy (``costs/warmth.py``)."""
INTAKE_S, OUTLET_S = 5e-3, 2.5e-3
"""Seconds between a request's arrival and the engine, and between a token and the client, on that host: the difference
of measured and simulated TTFT at 8 requests/s (``benchmarks/plan/validation.py h200``)."""


@dataclass(frozen=True)
class CardChoice:
    """One engine: ``layout.size`` cards.

    Attributes:
        weights: format of the layers' matrices: ``bf16``, ``fp8`` or ``int4``.
        cache: format of the KV cache: ``auto`` (bfloat16), ``fp8`` or ``int8``.
        context: longest prompt and answer together, in tokens.
    """

    model: ModelConfig
    card: Preset
    layout: RankLayout
    weights: str
    cache: str
    context: int

    @property
    def cards(self) -> int:
        """Cards of one engine."""
        return self.layout.size

    @property
    def how(self) -> str:
        """Layout and formats in words."""
        parts = [f"tp {self.layout.tensor}"]
        parts += [f"pp {self.layout.pipeline}"] if self.layout.pipeline > 1 else []
        cache = "bf16" if self.cache == "auto" else self.cache
        return ", ".join([*parts, f"{self.weights} weights", f"{cache} KV"])

    def __str__(self) -> str:
        return f"{self.cards} x {self.card.name}, {self.how}"

    @cached_property
    def storage(self) -> Storage:
        """Bits of the numbers of weights and cache."""
        found = storage_for(2, None if self.weights == "bf16" else self.weights)
        return replace(found, kv=cache_bits(self.cache, 16.0, self.model.head_dim))

    @cached_property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds; 0 if the model does not fit.

        Raises:
            ValueError: the model cannot be cut so.
        """
        graphs = len(row_buckets(SEQUENCES))
        plan = ServingPlan(
            weights=int(weight_bytes(self.model, self.storage)), kv_element=self.storage.kv / 8, share=SHARE,
            max_num_seqs=SEQUENCES, max_num_batched_tokens=STEP_TOKENS, context=self.context, graphs=graphs,
        )  # fmt: skip
        found = stages(self.model, self.layout, plan, self.storage, self.card.memory_bytes)
        if not all(stage.estimate.fits for stage in found):
            return 0
        return min(stage.estimate.cache_tokens for stage in found)

    @cached_property
    def steps(self) -> ServingSteps:
        """Step times.

        Raises:
            ValueError: the card cannot compute in bfloat16.
        """
        return steps_on(
            Machine.of(self.card), self.model, self.storage, self.layout, efficiency=HOPPER[self.weights]
        )  # fmt: skip

    @cached_property
    def engine(self) -> EngineModel:
        """The engine as a server starts it on a GPU."""
        depth, graph = self.layout.pipeline, launch_bound_tokens(self.model)
        limits = SchedulerConfig(
            num_blocks=self.kv_tokens // 16, block_size=16, max_num_seqs=SEQUENCES, max_num_batched_tokens=STEP_TOKENS,
            itl_target=0.0, graph_tokens=graph, graph_prompts=FEWEST_ROWS, max_model_len=self.context,
            pipeline_depth=depth, seed=0,
        )  # fmt: skip
        hopper = self.card.name.startswith(HOPPERS)
        padding = StepPadding(graph_tokens=graph, fine=hopper, rows=SEQUENCES, context=self.context)
        timed = TimedSteps(self.steps, padding)
        return EngineModel(
            scheduler=limits, seconds=timed, by_load=timed.by_load, latency=timed.latency if depth > 1 else None,
            lag=max(1, depth - 1), host=HOST_S, intake=INTAKE_S, outlet=OUTLET_S,
            warming=Slowdown(WARMING, self.steps.full_rate) if depth == 1 else None,
        )  # fmt: skip

    def engine_beside(self, draft: ModelConfig) -> EngineModel:
        """Return the engine with the memory that a model that drafts leaves: its weights on every card, and keys and
        values of as many tokens."""
        own = kv_bytes_per_token(self.model, self.storage) / self.cards
        other = kv_bytes_per_token(draft, storage_for(2, None))
        tokens = (self.kv_tokens * own - weight_bytes(draft)) / (own + other)
        engine = self.engine
        limits = replace(engine.scheduler, num_blocks=max(1, int(tokens // engine.scheduler.block_size)))
        return replace(engine, scheduler=limits)

    def seconds_of(self, draft: ModelConfig) -> DecodeSeconds:
        """Return the step times of a model that drafts, whole on one card, in bfloat16."""
        return replace(self, model=draft, layout=RankLayout(), weights="bf16").engine.by_load


class TimedSteps:
    """Step times of batches, with the sizes that a GPU pads them to."""

    def __init__(self, steps: ServingSteps, padding: StepPadding | None = None) -> None:
        self.steps, self.padding = steps, padding

    def __call__(self, batch: ScheduledBatch) -> float:
        return self.steps.seconds(self.load(batch))

    def latency(self, batch: ScheduledBatch) -> float:
        """Return the seconds until the tokens of a batch are known, of all stages."""
        return self.steps.latency(self.load(batch))

    def by_load(self, load: StepLoad) -> float:
        """Return the seconds of a step with this work; prompts in it are taken to be short."""
        if self.padding is not None:
            load = load._replace(padded=self.padding.tokens(load.tokens, load.rows, load.chunks, 1))
        return self.steps.seconds(load)

    def load(self, batch: ScheduledBatch) -> StepLoad:
        """Count the work of a batch, padding included."""
        found = StepLoad.of(batch.spans())
        if self.padding is None:
            return found
        longest = max(row.start + row.num_tokens for row in batch.rows)
        return found._replace(padded=self.padding.tokens(found.tokens, found.rows, found.chunks, longest))


def choices(
    model: ModelConfig,
    cards: Sequence[Preset],
    *,
    tensor: Sequence[int] = (1, 2, 4, 8),
    pipeline: Sequence[int] = (1,),
    weights: Sequence[str] = ("bf16", "fp8", "int4"),
    caches: Sequence[str] = ("auto", "fp8"),
    context: int,
) -> Iterator[tuple[CardChoice, str]]:
    """Yield every way to serve ``model``, each with why it cannot be; empty if it can."""
    for card in cards:
        for size in tensor:
            for depth in pipeline:
                for form in weights:
                    for cache in caches:
                        choice = CardChoice(model, card, RankLayout(size, depth), form, cache, context)
                        yield choice, _refusal(choice)


def _refusal(choice: CardChoice) -> str:
    if choice.weights not in HOPPER:
        return f"the cost model has no coefficients for {choice.weights}: it knows {', '.join(HOPPER)}"
    try:
        fits = choice.kv_tokens > 0
        Rates.of(Machine.of(choice.card).ceilings, "bfloat16")
    except ValueError as error:
        return str(error)
    return "" if fits else f"the model and one sequence of {choice.context} tokens do not fit"
