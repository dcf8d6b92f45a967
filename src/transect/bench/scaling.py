"""What a model takes on n ranks: floors, and predictions to be made before anything is measured.

The floor of a rank is that of ``floors.py`` for its part of the work: matrices, heads and keys are cut evenly, the head
by the vocabulary. The prediction is made of that floor and of two things that were measured before:

    step(n) = floor(n) / of_floor(1) + (2 L + 1) sum(n, bytes) + gather(n, logits)          tensor parallelism

``of_floor(1)`` is the share of its floor that one GPU reaches with as many rows. The sums are those after o and down of
each of the L layers and after the embedding, each of the hidden states of all rows. How long a sum takes comes from
``Links``: measured between two ranks, and for n from them by what each algorithm sends (``Links.sum``). Where ranks
read each other's logits, a sum of two numbers for each 128 of them stands in the place of the gather.

Pipeline parallelism (``predicted_stages``) takes of each step the n-th part, and n steps of an n-th of the sequences
each where one GPU takes one, so weights are read as often on every rank. What goes from stage to stage is hidden. Data
parallelism (``predicted_shares``) is one GPU with an n-th of the sequences.

Source of the cost of a ring: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in
MPICH".
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..costs.floors import Floor, Rates, step_floor
from ..costs.model import Row
from ..costs.storage import Storage
from ..ops.sampling.sampling import GROUP
from ..parallel.mesh import Mesh
from ..parallel.shared_sums import graph_seconds, shared_sums
from ..parallel.world import World
from ..spec.layouts.ranks import RankLayout
from ..spec.model import ModelConfig

JOB = "transect.bench.scaling:sum_times"
REPEATS = 20
BYTES = 2
"""Size of a number in bfloat16."""
SIZES = tuple(8 << 10 + 2 * power for power in range(8))
"""Bytes, from 8 KiB to 128 MiB."""


@dataclass(frozen=True, slots=True)
class Links:
    """How long sums between two ranks take. ``seconds`` by bytes; between two sizes it is linear. ``shared``: the ranks
    read each other's logits."""

    seconds: Mapping[int, float]
    shared: bool = False

    def sum(self, ranks: int, size: float) -> float:
        """Seconds of an all-reduce of ``size`` bytes over ``ranks``, by a ring: 2 (n - 1) messages one after another of
        1 / n of the bytes, where two ranks have 2 of a half."""
        if ranks == 1:
            return 0.0
        hops = ranks - 1
        return hops * self.pair(2 * size / ranks)

    def gather(self, ranks: int, size: float) -> float:
        """Seconds of an all-gather to ``size`` bytes in the end: half of an all-reduce."""
        return self.sum(ranks, size) / 2

    def pair(self, size: float) -> float:
        """Seconds of an all-reduce of ``size`` bytes between two ranks."""
        sizes = sorted(self.seconds)
        at = bisect_left(sizes, size)
        if at == 0:
            return self.seconds[sizes[0]]
        if at == len(sizes):
            return self.seconds[sizes[-1]] * size / sizes[-1]
        low, high = sizes[at - 1], sizes[at]
        part = (size - low) / (high - low)
        return (1 - part) * self.seconds[low] + part * self.seconds[high]


def rank_floor(
    config: ModelConfig, rows: Sequence[Row], rates: Rates, ranks: int, storage: Storage | None = None
) -> Floor:
    """The floor of one step on each of ``ranks``; what goes between them is not in it.

    Raises:
        ValueError: the model cannot be cut so.
    """
    return step_floor(config, rows, rates, storage, ranks=ranks)


def batch_rank_floor(
    config: ModelConfig, lengths: Iterable[tuple[int, int]], rates: Rates, ranks: int
) -> tuple[float, float]:
    """Seconds of (prefill, decode) on each of ``ranks``, of sequences as in ``floors.batch_floor``."""
    lengths = list(lengths)
    prefill = rank_floor(config, [Row(prompt, prompt) for prompt, _ in lengths], rates, ranks).seconds
    decode = 0.0
    for drawn in range(1, max(new for _, new in lengths)):
        rows = [Row(1, prompt + drawn) for prompt, new in lengths if new > drawn]
        decode += rank_floor(config, rows, rates, ranks).seconds
    return prefill, decode


def exchange_seconds(config: ModelConfig, tokens: int, drawn: int, ranks: int, links: Links) -> float:
    """What a step of ``tokens`` tokens, of which ``drawn`` have logits, exchanges between ranks."""
    sums = 2 * config.n_layers + 1
    each = links.sum(ranks, tokens * config.dim * BYTES)
    if ranks == 1:
        return 0.0
    logits = drawn * config.vocab_size
    if links.shared:
        return sums * each + links.sum(ranks, 2 * 4 * logits / GROUP)
    return sums * each + links.gather(ranks, logits * BYTES)


def predicted_step(
    config: ModelConfig, rows: Sequence[Row], rates: Rates, ranks: int, links: Links, of_floor: float
) -> float:
    """Seconds of a step; see the head of this file. ``of_floor``: of one GPU with as many rows."""
    tokens = sum(row.new for row in rows)
    return rank_floor(config, rows, rates, ranks).seconds / of_floor + exchange_seconds(
        config, tokens, len(rows), ranks, links
    )


def predicted_batch(
    config: ModelConfig,
    lengths: Iterable[tuple[int, int]],
    rates: Rates,
    ranks: int,
    links: Links,
    of_floor: float,
    step_tokens: int = 8192,
) -> float:
    """Seconds of sequences of (prompt tokens, output tokens) that all run together; prompts go in steps of
    ``step_tokens``."""
    lengths = list(lengths)
    seconds = sum(batch_rank_floor(config, lengths, rates, ranks)) / of_floor
    prompts = sum(prompt for prompt, _ in lengths)
    for start in range(0, prompts, step_tokens):
        seconds += exchange_seconds(config, min(step_tokens, prompts - start), 16, ranks, links)
    for drawn in range(1, max(new for _, new in lengths)):
        rows = sum(new > drawn for _, new in lengths)
        seconds += exchange_seconds(config, rows, rows, ranks, links)
    return seconds


def predicted_stages(
    config: ModelConfig, lengths: Iterable[tuple[int, int]], rates: Rates, stages: int, of_floor: float
) -> float:
    """Seconds of sequences as in ``predicted_batch`` over so many pipeline stages."""
    parts = _shares(lengths, stages)
    whole = [each for part in parts for each in part]
    prefill = batch_rank_floor(config, [(prompt, 1) for prompt, _ in whole], rates, 1)[0]
    decode = sum(batch_rank_floor(config, part, rates, 1)[1] for part in parts)
    return (prefill + decode) / stages / of_floor


def predicted_shares(
    config: ModelConfig, lengths: Iterable[tuple[int, int]], rates: Rates, ranks: int, of_floor: float
) -> float:
    """Seconds of sequences as in ``predicted_batch`` that so many engines share; the last to end counts."""
    return max(sum(batch_rank_floor(config, part, rates, 1)) for part in _shares(lengths, ranks)) / of_floor


def _shares(lengths: Iterable[tuple[int, int]], ranks: int) -> list[list[tuple[int, int]]]:
    """Sequences dealt out in turn."""
    lengths = list(lengths)
    return [lengths[rank::ranks] for rank in range(ranks)]


class SumTimes(NamedTuple):
    """Seconds of an all-reduce by bytes."""

    library: dict[int, float]
    """By NCCL or gloo."""
    own: dict[int, float]
    """By our kernels (``parallel/shared_sums.py``), of the sizes that they are tried at."""
    said: str
    """Why they are not there, or up to which size they are quicker."""

    def best(self) -> Links:
        """The quicker of both."""
        worst = float("inf")
        sizes = {*self.library, *self.own}
        quicker = {n: min(self.library.get(n, worst), self.own.get(n, worst)) for n in sizes}
        return Links(quicker, shared=bool(self.own))


def sum_times(world: World, sizes: Sequence[int] = SIZES) -> SumTimes:
    """The job of every rank: seconds of an all-reduce of bfloat16 by bytes, as a step has them. On GPUs that is inside
    a CUDA graph, one after another, without a launch from the host."""
    group = Mesh(world, RankLayout(tensor=world.size)).tensor
    found = {}
    for size in sizes:
        x = torch.zeros(max(1, size // 2), dtype=torch.bfloat16, device=world.device)
        repeats = max(2, min(REPEATS, (1 << 30) // size))

        def work(x: torch.Tensor = x) -> None:
            group.all_reduce(x)

        work()
        mine = graph_seconds(work, world.device, repeats) if x.is_cuda else _seconds(work)
        found[size] = max(world.exchange(mine))
    if world.device.type != "cuda":
        return SumTimes(found, {}, "our kernels are for GPUs")
    if group.ranks not in world.sums:
        world.sums[group.ranks] = shared_sums(world, group)
    sums = world.sums[group.ranks]
    own = {} if isinstance(sums, str) else {each.nbytes: each.own for each in sums.times}
    return SumTimes(found, own, str(sums))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
