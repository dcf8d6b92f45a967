"""Seconds of a serving step before it runs: from the model's shape, the layout, the machine and the work of the step.

Each term of the floor (``floors.py``) takes its least time over the share of the machine's rates that this kind of work
reaches, and a step, a layer and a row take some time each:

    step + layers + rows + products(tokens) + head(rows) + moved(tokens) + keys / bandwidth + pairs / rate + sums

for keys that decodes read, pairs of prompt tokens and positions, and bytes that norms and activations move. Kernels
reach neither bound where bytes and FLOPs take equally long: products take the p-norm of both. Few rows have kernels of
their own, which read weights faster. With ``IDEAL`` the sum is the floor.

Tensor ranks sum hidden states twice a layer, and gather logits. Stages of a pipeline compute a part of the layers each;
a step then takes the time of its slowest stage, and ``latency`` that of all stages and the messages between them.

The coefficients are few, so that one short sweep of a machine calibrates them (``fitting.fit_efficiency``). Windows of
attention are counted as if all rows were equally long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf

from ..spec.layouts.ranks import RankLayout, share
from ..spec.model import ModelConfig
from .floors import ALONE, Rates
from .links import Axis, Collectives
from .machine import Machine
from .model import Row, least_products, step_cost
from .steps import StepLoad
from .storage import Storage
from .work import Cost

BOUND = ("linear", "grouped_linear", "grouped_gate_up", "head", "paged_attention")
"""Operators with terms of their own."""
BYTES = 2
"""Bytes of a number that ranks exchange."""
GRAPH_LATENCY = 3e-6
"""Seconds of the smallest sum between GPUs of one host in a CUDA graph, measured on two H200s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Calibrated coefficients of serving steps on a kind of device.

    Attributes:
        few: share of the read bandwidth that products of at most ``few_rows`` rows reach. weights: of more rows.
        products: share of the matrix rate that products reach when their FLOPs bind.
        norm: the p of the p-norm of both bounds.
        keys: share of the read bandwidth that attention of decodes reaches.
        pairs: share of the matrix rate that attention of prompts reaches.
        moved: share of the bandwidth that norms, rotations and activations reach; they are not part of the floor.
        step: seconds of any step. layer: of each layer. row: of each row.
        sums: seconds of a collective over its measured or published time; kernels beside it wait for all ranks.
    """

    few: float
    weights: float
    products: float
    norm: float
    keys: float
    pairs: float
    moved: float
    step: float
    layer: float
    row: float
    sums: float = 1.0
    few_rows: int = 16


IDEAL = Efficiency(few=1, weights=1, products=1, norm=inf, keys=1, pairs=1, moved=inf, step=0, layer=0, row=0)
"""Coefficients of the floor."""
_BF16 = Efficiency(
    few=0.989, weights=0.871, products=0.935, norm=2.75, keys=0.973, pairs=0.6, moved=0.805,
    step=251e-6, layer=2.07e-6, row=0.259e-6, sums=2.07,
)  # fmt: skip
HOPPER: Mapping[str, Efficiency] = {
    "bf16": _BF16,
    "fp8": replace(_BF16, few=0.935, weights=0.739, products=1.46),
    "int4": replace(_BF16, few=0.868, weights=0.397, products=0.718),
}
"""Coefficients of an H200 by the format of weights, from recorded steps (``benchmarks/engine/serving_steps.py``).
``pairs`` is that of training. Above 128 rows fp8 multiplies at twice the rate of bfloat16."""


class ServingSteps:
    """Step times of one model in one layout on one machine.

    Args:
        collectives: messages between the tensor ranks of ``layout``; needed if there are several.
        hops: messages between stages; needed if there are several.

    Raises:
        ValueError: the model cannot be cut so, or messages are not known.
    """

    def __init__(
        self,
        config: ModelConfig,
        rates: Rates,
        efficiency: Efficiency,
        storage: Storage | None = None,
        layout: RankLayout = ALONE,
        collectives: Collectives | None = None,
        hops: Collectives | None = None,
    ) -> None:
        for size, given, name in ((layout.tensor, collectives, "collectives"), (layout.pipeline, hops, "hops")):
            if size > 1 and given is None:
                raise ValueError(f"a layout of {layout} sends messages between ranks: give {name}")
        self.rates, self.efficiency, self.storage = rates, efficiency, storage or Storage()
        self.layout, self._collectives, self._hops = layout, collectives, hops
        self.config = config.local(layout.tensor)
        self._first, self._last = (
            len(range(config.n_layers)[share(config.n_layers, at, layout.pipeline)]) / config.n_layers
            for at in (0, layout.pipeline - 1)
        )
        """Shares of the layers of the first stage, which is the longest, and of the last, which has the head."""
        self._moved = self._others(2) - self._others(1)
        """Bytes of a token beside products and attention."""
        self._reaches = Counter(map(config.layer_reach, range(config.n_layers)))
        self._parts: dict[tuple[int, int], tuple[float, float]] = {}

    @property
    def full_rate(self) -> float:
        """Tokens per second at which the products of the layers take all arithmetic of the device."""
        return self.rates.flops_per_second / least_products(self.config, 1, 0, self.storage)["linear"].flops

    def seconds(self, load: StepLoad) -> float:
        """Predict the time of a step: of its slowest stage, or of the host link that layers stream over."""
        layers, head = self._stage(load)
        found = self.efficiency.step + max(self._first * layers, self._last * layers + head)
        link = self.rates.host_bytes_per_second
        return found if link is None else max(found, self.storage.streamed / link)

    def parts(self, load: StepLoad) -> dict[str, float]:
        """Split the time of a step by cause; the products of the layers and the head together. Stages of a pipeline are
        summed, so the sum is that of ``latency`` without messages."""
        known, size = self.efficiency, (load.padded or load.tokens, load.rows)
        costs = least_products(self.config, *size, self.storage)
        products = self._product(costs["linear"], size[0]) + self._product(costs["head"], size[1]) / self.layout.tensor
        hidden, logits = (0.0, 0.0) if self._collectives is None else exchanged(self.config, *size, self._collectives)
        keys = self._attention(load._replace(pairs=0))
        return {
            "weights and products": products,
            "keys and values": keys,
            "attention of prompts": self._attention(load) - keys,
            "norms and activations": self._moved * size[0] / (self.rates.bytes_per_second * known.moved),
            "sums between cards": known.sums * (hidden + logits),
            "overhead": self.layout.pipeline * known.step + known.layer * self.config.n_layers + known.row * load.rows,
        }

    def latency(self, load: StepLoad) -> float:
        """Predict the time until the tokens of a step are known: of all stages in turn."""
        layers, head = self._stage(load)
        stages = self.layout.pipeline
        sent = 0.0
        if self._hops is not None and stages > 1:
            size = load.tokens * self.config.dim * BYTES
            sent = self._hops.send((stages - 1) * size, stages - 1)
        return stages * self.efficiency.step + layers + head + sent

    def _stage(self, load: StepLoad) -> tuple[float, float]:
        """Return the seconds of all layers, and of the head."""
        known = self.efficiency
        size = load.padded or load.tokens, load.rows
        found = self._parts.get(size)
        if found is None:
            costs = least_products(self.config, *size, self.storage)
            linear = self._product(costs["linear"], size[0])
            head = self._product(costs["head"], size[1]) / self.layout.tensor
            moved = self._moved * size[0] / (self.rates.bytes_per_second * known.moved)
            layers = linear + moved + known.layer * self.config.n_layers
            if self._collectives is not None:
                hidden, logits = exchanged(self.config, *size, self._collectives)
                layers, head = layers + known.sums * hidden, head + known.sums * logits
            found = self._parts[size] = layers, head + known.row * load.rows
        layers, head = found
        return layers + self._attention(load), head

    def _others(self, tokens: int) -> float:
        costs = step_cost(self.config, [Row(tokens, tokens)], storage=self.storage)
        return sum(cost.bytes for name, cost in costs.items() if name not in BOUND)

    def _product(self, cost: Cost, rows: int) -> float:
        known = self.efficiency
        share = known.few if rows <= known.few_rows else known.weights
        read = cost.bytes / (self.rates.bytes_per_second * share)
        computed = cost.flops / (self.rates.flops_per_second * known.products)
        most = max(read, computed)
        if most == 0 or known.norm == inf:
            return most
        return most * (1 + (min(read, computed) / most) ** known.norm) ** (1 / known.norm)

    def _attention(self, load: StepLoad) -> float:
        config, decodes = self.config, load.rows - load.chunks
        prompts = load.tokens - decodes
        keys = pairs = 0.0
        for (window, chunk), layers in self._reaches.items():
            reach = window if chunk is None else chunk / 2
            if reach is None:
                keys, pairs = keys + layers * load.keys, pairs + layers * load.pairs
                continue
            keys += layers * min(load.keys, decodes * reach)
            pairs += layers * min(load.pairs, prompts * reach)
        read = 2 * keys * config.kv_dim * self.storage.kv / 8
        seconds = read / (self.rates.bytes_per_second * self.efficiency.keys)
        return seconds + 4 * pairs * config.q_dim / (self.rates.flops_per_second * self.efficiency.pairs)


def steps_on(
    machine: Machine,
    config: ModelConfig,
    storage: Storage | None = None,
    layout: RankLayout = ALONE,
    *,
    dtype: str = "bfloat16",
    efficiency: Efficiency = HOPPER["bf16"],
) -> ServingSteps:
    """Make the step times of a model on a machine that is only described: rates and links of its devices, with the
    coefficients of an H200.

    Raises:
        ValueError: the model cannot be cut so, or the machine has no rate for ``dtype``.
    """
    rates, near = Rates.of(machine.ceilings, dtype), replace(machine, latency=GRAPH_LATENCY)
    sums, hops = Axis(near, layout.tensor), Axis(near, layout.pipeline, layout.tensor)
    return ServingSteps(config, rates, efficiency, storage, layout, sums, hops)


def exchanged(config: ModelConfig, tokens: int, drawn: int, collectives: Collectives) -> tuple[float, float]:
    """Return the seconds in which tensor ranks exchange hidden states of ``tokens`` tokens, and logits of ``drawn``."""
    if collectives.ranks == 1:
        return 0.0, 0.0
    sums, logits = 2 * config.n_layers + 1, drawn * config.vocab_size
    hidden = collectives.all_reduce(sums * tokens * config.dim * BYTES, sums)
    if collectives.shared:
        return hidden, collectives.all_reduce(2 * 4 * logits / collectives.shared)
    return hidden, collectives.gather(logits * BYTES)


def batch_seconds(steps: ServingSteps, lengths: Iterable[tuple[int, int]], step_tokens: int = 8192) -> float:
    """Predict the time of sequences of (prompt tokens, output tokens) that all run together.

    Prompts go in steps of about ``step_tokens``; then each step decodes the sequences that still have tokens to draw.
    Data ranks of the layout share the sequences. Stages of a pipeline have as many batches on their way, each of a part
    of the sequences.
    """
    layout, seconds = steps.layout, 0.0
    for part in range(layout.pipeline):
        mine = list(lengths)[:: layout.data][part :: layout.pipeline]
        rows: list[tuple[int, int]] = []
        for prompt, _ in mine:
            rows.append((0, prompt))
            if sum(new for _, new in rows) >= step_tokens:
                seconds += steps.seconds(StepLoad.of(rows))
                rows = []
        seconds += steps.seconds(StepLoad.of(rows)) if rows else 0.0
        for drawn in range(1, max((new for _, new in mine), default=0)):
            seconds += steps.seconds(StepLoad.of([(prompt + drawn - 1, 1) for prompt, new in mine if new > drawn]))
    return seconds
