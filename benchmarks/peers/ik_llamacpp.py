"""ik_llama.cpp, a fork of llama.cpp with other CPU kernels, through the C interface of ``ik-llama-cpp-python``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from ik_llama_cpp import _ctypes_api as llama

PACKAGES = ("ik-llama-cpp-python",)


class IkLlamaCpp:
    """One context over one GGUF file, with room for 16 sequences of 1,024 tokens."""

    def __init__(self, path: str, threads: int, settings: dict[str, Any]) -> None:
        llama.llama_backend_init()
        model_params = llama.llama_model_default_params()
        model_params.repack_tensors = settings["repack_tensors"]
        model_params.use_mmap = not settings["repack_tensors"]
        model = llama.llama_model_load_from_file(path.encode(), model_params)
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = 16 * 1024, 16
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn = settings["flash_attn"]
        self._context = llama.llama_init_from_model(model, params)
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._batch = llama.llama_batch_init(2048, 0, 1)

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        if llama.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")

    def _greedy(self, row: int) -> int:
        logits = llama.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, float]:
        """Prefill the prompts one after another, then decode all together: (prefill s, decode s for new_tokens - 1)."""
        llama.llama_kv_cache_clear(self._context)
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


ENGINE = IkLlamaCpp
