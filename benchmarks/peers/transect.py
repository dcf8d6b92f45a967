"""Transect itself, beside its peers: its whole engine, with scheduler, paged cache and sampler."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.peer import CONTEXT, Server


class Transect:
    """An engine on a CPU with room for 16 sequences of 1,024 tokens."""

    def __init__(self, model: str, threads: int, settings: dict[str, Any] | None = None) -> None:
        from transect import LLM

        self._llm = LLM(
            model,
            threads=threads,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            enable_prefix_caching=False,
            num_kv_blocks=1024,
            **(settings or {}),
        )

    @property
    def kernels(self) -> Any:
        """The kernels that run, as the engine says."""
        return self._llm.kernels

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, float]:
        """Generate greedily, and return the seconds of the prefill and of ``new_tokens - 1`` tokens of all prompts."""
        from transect import SamplingParams

        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        start = prefilled = time.perf_counter()
        waiting = {self._llm.submit(list(prompt), params) for prompt in prompts}
        left = begun = len(prompts) * new_tokens
        while left:
            for output in self._llm.step():
                waiting.discard(output.request_id)
                left -= len(output.new_token_ids)
                if not waiting and prefilled == start:
                    prefilled, begun = time.perf_counter(), left
        # Streams that began early have decoded a few tokens by then: count what was left once all had begun.
        decoded = len(prompts) * (new_tokens - 1) / begun if new_tokens > 1 else 0.0
        return prefilled - start, (time.perf_counter() - prefilled) * decoded


def _serve(model: str, threads: int, port: int) -> list[str]:
    command = [sys.executable, "-m", "transect", "serve", model, "--port", str(port), "--threads", str(threads)]
    return [*command, "--device", "cpu", "--no-prefix-caching", "--max-model-len", str(CONTEXT)]


SERVER = Server("Transect", _serve)
PACKAGES = ("torch",)
ENGINE = Transect
