"""llama.cpp through its C interface: the same three pieces of work as ``engine/cpu_vs_llamacpp.py`` asks of
Transect."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp as llama

from benchmarks.peers.llama_context import LlamaContext

# Every combination is tried; the best median of each figure counts.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"flash_attn_type": 0, "kv_unified": False},
    {"flash_attn_type": 1, "kv_unified": False},
    {"flash_attn_type": 0, "kv_unified": True},
    {"flash_attn_type": 1, "kv_unified": True},
)


class LlamaCpp(LlamaContext):
    """A context of llama.cpp."""

    def __init__(self, path: str, threads: int, settings: dict[str, Any]) -> None:
        self._quiet = llama.llama_log_callback(lambda *_: None)
        llama.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama.llama_backend_init()
        params = llama.llama_context_default_params()
        for name, value in settings.items():
            setattr(params, name, value)
        super().__init__(llama, path, threads, llama.llama_model_default_params(), params)

    def clear(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)


PACKAGES = ("llama-cpp-python",)
ENGINE = LlamaCpp
