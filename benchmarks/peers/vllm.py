"""vLLM 0.24 on an H200 of the kind that results name: measured apart, with the same work, and kept without spread."""

from __future__ import annotations

from typing import Any

LOAD: dict[str, dict[str, Any]] = {
    "8": {"output_tokens_per_second": 1172, "ttft": (34, 64), "tpot": (5.57, 6.42), "itl": 17.4, "e2e": (848, 1409)},
    "24": {
        "output_tokens_per_second": 3321,
        "ttft": (47, 113),
        "tpot": (7.91, 10.03),
        "itl": 30.1,
        "e2e": (1218, 2056),
    },
    "inf": {
        "output_tokens_per_second": 6367,
        "ttft": (3407, 6115),
        "tpot": (36.4, 95.8),
        "itl": 209,
        "e2e": (8823, 9317),
    },
}
"""By rate of ``server/load.py``, from another load generator: milliseconds; pairs are p50 and p99, ``itl`` is p99."""
LONG_PROMPTS = {"qwen2.5-7b": 3.61, "llama-3.2-3b": 1.91}
"""Seconds for the prompts of ``engine/long_prompts.py``, by model."""
STEPS = {("qwen2.5-7b", 200): 8.88e-3}
"""Seconds of a step, by model and sequences, as ``engine/shapes.py`` measures it."""
