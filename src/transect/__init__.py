"""Transect: one readable codebase that covers the whole LLM stack, measured at every level against the hardware's
floor.

Each folder is a level; ``docs/understand/architecture.md`` lists them in order. Importing ``transect`` loads none of
them; the names below are loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .engine.executors.pooling import PoolingParams
    from .engine.frontends.async_engine import AsyncEngine
    from .engine.frontends.beam_search import BeamSearchParams
    from .engine.frontends.inputs import LoRARequest
    from .engine.frontends.llm import LLM
    from .engine.scheduling.sampling_params import SamplingParams
    from .search.local import Search
    from .text.grammar.params import StructuredOutputsParams
    from .text.outputs import CompletionOutput, RequestOutput

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "Search",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "LLM": "transect.engine.frontends.llm",
    "AsyncEngine": "transect.engine.frontends.async_engine",
    "BeamSearchParams": "transect.engine.frontends.beam_search",
    "LoRARequest": "transect.engine.frontends.inputs",
    "CompletionOutput": "transect.text.outputs",
    "PoolingParams": "transect.engine.executors.pooling",
    "RequestOutput": "transect.text.outputs",
    "SamplingParams": "transect.engine.scheduling.sampling_params",
    "Search": "transect.search.local",
    "StructuredOutputsParams": "transect.text.grammar.params",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'transect' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List all public names, including those not loaded yet, for ``help`` and tab completion."""
    return sorted({*globals(), *__all__})
