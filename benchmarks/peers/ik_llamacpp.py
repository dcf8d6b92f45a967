"""ik_llama.cpp, a fork of llama.cpp with other CPU kernels, through the C interface of ``ik-llama-cpp-python``."""

from __future__ import annotations

from typing import Any

from ik_llama_cpp import _ctypes_api as llama

from benchmarks.peers.llama_context import LlamaContext

PACKAGES = ("ik-llama-cpp-python",)


class IkLlamaCpp(LlamaContext):
    """A context of ik_llama.cpp."""

    def __init__(self, path: str, threads: int, settings: dict[str, Any]) -> None:
        llama.llama_backend_init()
        model_params = llama.llama_model_default_params()
        model_params.repack_tensors = settings["repack_tensors"]
        model_params.use_mmap = not settings["repack_tensors"]
        params = llama.llama_context_default_params()
        params.flash_attn = settings["flash_attn"]
        super().__init__(llama, path, threads, model_params, params)

    def clear(self) -> None:
        llama.llama_kv_cache_clear(self._context)


ENGINE = IkLlamaCpp
