"""Answers of a LoRA in training, drawn by a serving engine that has the base, and the LoRA as an adapter.

The base never changes, so the engine is built once, with the fastest kernels of the device and a cache that lasts. New
factors enter as adapters of requests do (``engine/adapters.py``): under a content id of their own, copied into a slot
between two steps. Requests that run, of the base or of earlier factors, continue on what they began with, and keys and
values in the prefix cache stay right, since a chain of blocks begins with the id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ...checkpoints.adapter_served import ServedAdapter
from ...engine.build import BuiltEngine, build_engine
from ...engine.config import EngineConfig
from ...engine.scheduling.outputs import EngineOutput
from ...engine.scheduling.sampling_params import SamplingParams
from ...models.weights.low_rank import Factors
from ..adapters.lora import trained_adapter
from ..config import TrainConfig
from ..model.build import Trainable
from .rollout import BLOCK_SIZE, SampledAnswer, draw_answers, most_running


def refusal(config: TrainConfig) -> str | None:
    """Return the reason why a run's answers cannot come from such an engine, as a clause; None if they can."""
    lora = config.lora
    if config.task != "lora":
        return f"task is {config.task!r}, and adapters of an engine are plain LoRA"
    if lora.dora:
        return "lora.dora scales whole matrices, which rows of a batch share"
    if lora.modules_to_save or config.new_tokens:
        return "modules trained in full are shared by all rows of a batch"
    if {"embed", "head", "embed_tokens", "lm_head", "wte"} & set(lora.targets):
        return "the tables are shared by all rows of a batch: take them out of lora.targets"
    if config.load_format == "dummy":
        return "load_format is dummy, so there are no files of the base"
    return None


def draws_by_adapter(config: TrainConfig, device: torch.device) -> bool:
    """Return True if a run's answers come from such an engine.

    Raises:
        ValueError: they are asked to, and cannot.
    """
    chosen, reason = config.grpo.engine, refusal(config)
    if chosen == "adapter" and reason is not None:
        raise ValueError(f'grpo.engine is "adapter", but {reason}: set it to "auto" or "shared"')
    return chosen == "adapter" or (chosen == "auto" and reason is None and device.type == "cpu")


class AdapterEngine:
    """An engine over the base of a run.

    Args:
        config: the run.
        trainable: its model, with the adapters that are trained.

    Raises:
        ValueError: the engine cannot be built; the message says what to change.
    """

    def __init__(self, config: TrainConfig, trainable: Trainable) -> None:
        assert trainable.lora is not None
        self._trainable, self._lora = trainable, trainable.lora
        source = trainable.source if trainable.source.adapter is None else trainable.source.adapter.base
        running, seq_len = most_running(config.grpo), config.data.seq_len
        factors = self._factors()
        settings = EngineConfig(
            model=str(source.path),
            device=trainable.device.type,  # type: ignore[arg-type]
            dtype="float32" if config.precision == "float32" else "auto",
            enable_lora=True,
            max_loras=2,
            max_lora_rank=max(len(low.a) for low in factors.values()),
            lora_target_modules=tuple(dict.fromkeys(name.rpartition(".")[2] for name in factors)),
            max_model_len=seq_len,
            max_num_seqs=running,
            max_num_batched_tokens=max(512, running),
            block_size=BLOCK_SIZE,
            num_kv_blocks=running * (-(-seq_len // BLOCK_SIZE) + 1),
            threads=config.threads,
            seed=config.seed,
        )
        self._threads = torch.get_num_threads()
        self.built: BuiltEngine = build_engine(settings)
        """The engine; other requests may share it."""
        self._drawing = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        self.deliver: Callable[[EngineOutput], object] = id
        """Receives outputs of requests that are not of a rollout, while one is drawn."""
        self.adapter = ""
        """Content id of the newest factors."""

    def _factors(self) -> Factors:
        return trained_adapter(self._trainable.model, self._lora).factors

    def update(self) -> str:
        """Give the engine the present factors, unless it has them. Returns their content id."""
        factors, store = self._factors(), self.built.adapters
        assert store is not None
        adapter = content_id(factors)
        if adapter != self.adapter:
            if adapter not in store:
                store.add(ServedAdapter(adapter, factors))
            if self.adapter:
                store.forget(self.adapter)
            store.shrink()
            self.adapter = adapter
        return adapter

    def draw(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, eos_token_ids: Sequence[int], seed: int
    ) -> list[SampledAnswer]:
        """Draw answers with the present factors; see ``roll_out``."""
        adapter = self.update()
        with self._few_threads():
            return draw_answers(
                self.built.core,
                prompts,
                params,
                eos_token_ids=eos_token_ids,
                seed=seed,
                adapter=adapter,
                deliver=self.deliver,
            )

    @contextmanager
    def _few_threads(self) -> Iterator[None]:
        """Give torch the threads that the engine's kernels leave it, for a while."""
        torch.set_num_threads(self._drawing)
        try:
            yield
        finally:
            torch.set_num_threads(self._threads)


def content_id(factors: Factors) -> str:
    """Compute a digest of factors, 64 hexadecimal digits."""
    found = hashlib.blake2b(digest_size=32)
    for name in sorted(factors):
        low = factors[name]
        found.update(f"{name} {low.scale!r} {list(low.a.shape)} {list(low.b.shape)}".encode())
        for tensor in (low.a, low.b):
            found.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()
