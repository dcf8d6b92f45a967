"""llama.cpp through its C interface: the same three pieces of work as ``engine/cpu_vs_llamacpp.py`` asks of
Transect."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp as llama
import numpy as np

# Every combination is tried; the best median of each figure counts.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"flash_attn_type": 0, "kv_unified": False},
    {"flash_attn_type": 1, "kv_unified": False},
    {"flash_attn_type": 0, "kv_unified": True},
    {"flash_attn_type": 1, "kv_unified": True},
)


class LlamaCpp:
    """One context over one GGUF file, with room for 16 sequences of 1,024 tokens."""

    def __init__(self, path: str, threads: int, settings: dict[str, Any]) -> None:
        self._quiet = llama.llama_log_callback(lambda *_: None)
        llama.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = 16 * 1024, 16
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = threads
        for name, value in settings.items():
            setattr(params, name, value)
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
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
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


PACKAGES = ("llama-cpp-python",)
ENGINE = LlamaCpp
