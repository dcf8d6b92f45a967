"""The offline protocols: an engine in this process, all requests there from the start, times taken around its steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..engine.scheduling.outputs import EngineOutput
from ..engine.scheduling.sampling_params import SamplingParams
from .workload import Work


class OfflineEngine(Protocol):
    """The part of ``engine.llm.LLM`` that is used here."""

    def submit(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> str: ...
    def step(self) -> list[EngineOutput]: ...
    def abort(self, request_id: str) -> None: ...
    @property
    def has_work(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Decoded:
    """Steps in which every sequence of a batch decoded one token.

    Attributes:
        seconds: time of all these steps together.
        steps: the seconds of each, as seen from outside: the time between two returns of ``step``.
        middle: length of every sequence, in tokens, in the step half-way.
    """

    seconds: float
    steps: list[float]
    middle: list[int]

    @property
    def per_token(self) -> float:
        """Average seconds between tokens of a sequence."""
        return self.seconds / len(self.steps)


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def prefill_seconds(engine: OfflineEngine, prompts: Sequence[Sequence[int]]) -> float:
    """Measure the seconds from the first prompt's submission to the last prompt's first token; one token is drawn for
    each."""
    start = time.perf_counter()
    for prompt in prompts:
        engine.submit(prompt, _greedy(1))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def decode_steps(engine: OfflineEngine, prompts: Sequence[Sequence[int]], steps: int, spare: int) -> Decoded:
    """Time ``steps`` steps in which all sequences decode; their prefill before is not counted.

    Args:
        spare: tokens that a sequence may draw while others are still in prefill: at least the number of prefill steps.

    Raises:
        ValueError: the engine never ran all of them at once (too few sequences or too small a KV cache).
    """
    lengths = {engine.submit(prompt, _greedy(1 + steps + spare)): len(prompt) for prompt in prompts}
    begun: set[str] = set()
    while len(begun) < len(lengths) and engine.has_work:
        for output in engine.step():
            lengths[output.request_id] += len(output.new_token_ids)
            begun.add(output.request_id)
    taken: list[float] = []
    middle: list[int] = []
    start = last = time.perf_counter()
    while len(taken) < steps and engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        if len(outputs) < len(lengths):
            break
        for output in outputs:
            lengths[output.request_id] += len(output.new_token_ids)
        taken.append(now - last)
        last = now
        if len(taken) == (steps + 1) // 2:
            middle = list(lengths.values())
    for request_id in lengths:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    if len(taken) < steps:
        raise ValueError(
            f"the engine did not run {len(lengths)} sequences at once for {steps} steps: raise max_num_seqs or the "
            "size of the KV cache"
        )
    return Decoded(last - start, taken, middle)


def run_all(engine: OfflineEngine, work: Sequence[Work], temperature: float = 0.6) -> tuple[float, int]:
    """Submit all of the work at once; returns (seconds until the last token, number of steps that drew tokens)."""
    start = time.perf_counter()
    for each in work:
        params = SamplingParams(max_tokens=each.output_tokens, temperature=temperature, ignore_eos=True)
        assert not isinstance(each.prompt, str)
        engine.submit(each.prompt, params)
    steps = drawn = 0
    while engine.has_work:
        outputs = engine.step()
        steps += bool(outputs)
        drawn += sum(len(output.new_token_ids) for output in outputs)
    seconds = time.perf_counter() - start
    wanted = sum(each.output_tokens for each in work)
    if drawn != wanted:
        raise ValueError(f"the engine drew {drawn} tokens of {wanted}: some requests did not fit or failed")
    return seconds, steps
