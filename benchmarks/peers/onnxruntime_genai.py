"""ONNX Runtime GenAI, on a folder that its model builder wrote: 4-bit weights in blocks of 32.

The builder reads a Hugging Face folder, which ``hugging_face_folder`` writes from a GGUF file by transformers, and
needs torch and transformers beside ``onnxruntime-genai`` and ``onnx-ir``:

    python -m onnxruntime_genai.models.builder -m MODEL -i FOLDER -o OUT -p int4 -e cpu -c CACHE \\
        --extra_options hf_token=false int4_accuracy_level=4
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("onnxruntime", "onnxruntime-genai")


class OnnxRuntime:
    """A generator for each run."""

    def __init__(self, path: str, threads: int, settings: dict[str, Any]) -> None:
        import onnxruntime_genai

        config = onnxruntime_genai.Config(path)
        options = {"intra_op_num_threads": threads, **settings}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._genai, self._model = onnxruntime_genai, onnxruntime_genai.Model(config)

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, float]:
        """Prefill all prompts together, then decode all together."""
        import numpy as np

        params = self._genai.GeneratorParams(self._model)
        length = len(prompts[0]) + new_tokens
        params.set_search_options(max_length=length, min_length=length, batch_size=len(prompts), do_sample=False)
        generator = self._genai.Generator(self._model, params)
        start = time.perf_counter()
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        generator.generate_next_token()
        prefill = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(new_tokens - 1):
            generator.generate_next_token()
        return prefill, time.perf_counter() - start


def hugging_face_folder(path: Path, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face folder of float32 weights."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(folder)


ENGINE = OnnxRuntime
