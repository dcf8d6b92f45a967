"""OpenVINO GenAI, which reads GGUF files of llama's and qwen's architectures by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai

PACKAGES = ("openvino", "openvino-genai")


class OpenVino:
    """A pipeline with its KV cache inside the model."""

    def __init__(self, path: str, threads: int, settings: dict[str, Any]) -> None:
        self._pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads, **settings)

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, float]:
        """Generate greedily for all prompts together, by the pipeline's own clock."""
        ids = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        metrics = self._pipeline.generate(inputs, config).perf_metrics
        first = metrics.get_ttft().mean / 1e3
        return first, metrics.get_generate_duration().mean / 1e3 - first


ENGINE = OpenVino
