"""``EngineClient``: the methods that users call, on top of a stream of updates; the base of ``AsyncEngine`` and
``Replicas``."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from ...checkpoints.peft_config import AdapterFiles, adapter_folder
from ...text.output_processor import Update
from ...text.outputs import RequestOutput
from ..executors.pooling import PARAMS, EmbeddingOutput, Pooling, PoolingParams, embedding_output
from ..scheduling.sampling_params import SamplingParams
from . import wire
from .inputs import LoRARequest, check_params, prompt_token_ids, truncated


class EngineClient(ABC):
    """An engine that generates text and embeddings for prompts, as an asyncio object."""

    tokenizer: Any
    default_pooling: Pooling

    @property
    @abstractmethod
    def info(self) -> wire.Ready:
        """The engine's ``Ready`` message."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""

    @abstractmethod
    def default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model's files recommend."""

    @abstractmethod
    def snapshot(self, request_id: str) -> RequestOutput | None:
        """Return the current state of a request; None if it has ended and only its last update is in transit."""

    @abstractmethod
    def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[Update, None]:
        """Yield deltas of all choices until each has had its terminal update; ``options`` are the fields of
        ``RequestOptions``. Raises as ``generate`` does."""

    @abstractmethod
    async def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it; its stream gets a terminal update with ``finish_reason`` "abort"
        for each running choice that this ends."""

    async def generate(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the state of the request after each step with new output; the last one is ``finished``.

        Args:
            prompt: text, token ids, or a mapping with ``prompt`` or ``prompt_token_ids``.
            params: None for the model's own defaults (``default_sampling_params``).
            request_id: a random id if None.
            priority: lower runs earlier.
            add_special_tokens, parse_special: encoding of a text, see ``LLM.generate``.
            lora_request: the adapter; needs ``enable_lora``.

        Raises:
            ValueError: the request cannot be served as it is.
            QueueFull: too many requests wait; try again later.
            EngineDeadError: the engine has ended.
        """
        text, ids = prompt_token_ids(
            prompt, self.tokenizer, add_special_tokens=add_special_tokens, parse_special=parse_special
        )
        name = request_id or uuid.uuid4().hex
        params = self.default_sampling_params() if params is None else params
        ids = truncated(ids, check_params(params), self.max_model_len)
        adapter = None
        if lora_request is not None:
            adapter = await asyncio.to_thread(AdapterFiles.of, adapter_folder(lora_request.lora_path))
        stream = self.stream(ids, params, name, prompt=text, priority=priority, adapter=adapter)
        async with contextlib.aclosing(stream) as updates:
            async for update in updates:
                if update.final is not None:
                    yield update.final
                elif (found := self.snapshot(name)) is not None:
                    yield found

    async def embed(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        params: PoolingParams | None = None,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
        parse_special: bool = True,
    ) -> EmbeddingOutput:
        """Compute the embedding of a prompt, see ``LLM.embed``. Raises as ``generate`` does."""
        params = params or PoolingParams()
        params.check_size(self.info.hidden_size)
        _, ids = prompt_token_ids(
            prompt, self.tokenizer, add_special_tokens=add_special_tokens, parse_special=parse_special
        )
        ids = truncated(ids, PARAMS.with_(truncate_prompt_tokens=params.truncate_prompt_tokens), self.max_model_len)
        pooling = params.pooling or self.default_pooling
        stream = self.stream(ids, PARAMS, uuid.uuid4().hex, priority=priority, pooling=pooling)
        async with contextlib.aclosing(stream) as updates:
            async for update in updates:
                if update.final is not None:
                    return embedding_output(update.final, params)
        raise RuntimeError("the request was aborted")
