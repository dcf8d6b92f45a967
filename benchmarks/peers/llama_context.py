"""The three pieces of work of llama.cpp and its forks, through the C interface of the module that binds it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np


class LlamaContext:
    """One context over one GGUF file, with room for 16 sequences of 1,024 tokens.

    Args:
        api: the module with the C functions.
        model_params, params: made by the API's defaults; the room, batches and threads of ``params`` are set here.
    """

    def __init__(self, api: Any, path: str, threads: int, model_params: Any, params: Any) -> None:
        self._api = api
        model = api.llama_model_load_from_file(path.encode(), model_params)
        params.n_ctx, params.n_seq_max = 16 * 1024, 16
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = threads
        self._context = api.llama_init_from_model(model, params)
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self._batch = api.llama_batch_init(2048, 0, 1)

    def clear(self) -> None:
        """Empty the KV cache."""
        raise NotImplementedError

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        if self._api.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")

    def _greedy(self, row: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, float]:
        """Prefill the prompts one after another, then decode all together: (prefill s, decode s for new_tokens - 1)."""
        self.clear()
        start = time.perf_counter()
        tokens = []
        for sequence, prompt in enumerate(prompts):
            last = len(prompt) - 1
            self._decode([(int(t), i, sequence, i == last) for i, t in enumerate(prompt)])
            tokens.append(self._greedy(last))
        prefill = time.perf_counter() - start
        start = time.perf_counter()
        for step in range(new_tokens - 1):
            self._decode([(t, len(prompts[s]) + step, s, True) for s, t in enumerate(tokens)])
            tokens = [self._greedy(s) for s in range(len(prompts))]
        return prefill, time.perf_counter() - start
