"""Runs, adapters and models as files for other programs: what ``transect export`` writes.

A checkpoint of adapters holds the adapters alone; their model is named beside them. Merged, the base is what it was
during training: the base of ``qlora`` is rounded to 4 bits and back first.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...checkpoints.adapter import merged_weights
from ...checkpoints.gguf_out import gguf_metadata, gguf_tensors, gguf_type
from ...checkpoints.hf_out import save_hf
from ...checkpoints.load import adapter_of, stored_weights
from ...checkpoints.peft_config import CONFIG, WEIGHTS
from ...checkpoints.resolve import ModelSource, resolve
from ...formats.gguf_write import write_gguf
from ...models.decoder import Decoder
from ...models.staging import dense_values
from ...models.stored import Stored, StoredWeights, Values
from ...spec.model import ModelConfig
from ...spec.weights import weight_shapes
from ...text.export import export_tokenizer
from ...text.gguf_vocab_out import gguf_vocabulary
from ..adapters.qlora import rounded
from ..config import TrainConfig
from ..loop.checkpoint import STATE, list_steps
from ..model.build import DTYPES

EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Opened:
    """Model or adapter to be exported.

    Attributes:
        adapter: the directory of an adapter; None for a plain model.
        base: function that rounds a matrix of the layers as the run's base was rounded; None if it was not.
        dtype: data type of the run; None if there is no run, or for float32.
        notes: messages for the user.
    """

    source: ModelSource
    adapter: Path | None
    base: Callable[[Tensor], Tensor] | None = None
    dtype: torch.dtype | None = None
    notes: tuple[str, ...] = ()


def opened(name: str, adapter: str | None = None) -> Opened:
    """Open a run, a checkpoint, an adapter or a model by its name.

    Raises:
        ValueError: there is no such thing.
    """
    path = Path(name).expanduser()
    if path.is_dir() and (steps := list_steps(path)):
        path = steps[-1]
    source = resolve(str(path) if path.exists() else name, adapter=adapter)
    folder = None if source.adapter is None else source.adapter.path
    config = _run_of(path)
    if config is None:
        return Opened(source, folder)
    dtype = DTYPES[config.precision]
    if config.task == "qlora" and folder is not None:
        lora = config.lora
        note = f"the base was trained over in 4 bits ({lora.base_format}): merged, it has the values of those codes"
        return Opened(source, folder, lambda weight: rounded(weight, lora, dtype), dtype, (note,))
    return Opened(source, folder, None, dtype)


def _run_of(path: Path) -> TrainConfig | None:
    """Return the configuration of a checkpoint's run; None if it has none."""
    try:
        state: Mapping[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))["state"]
        return TrainConfig.from_dict(state["config"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def export_adapter(found: Opened, output: Path) -> None:
    """Write the adapter, and its tokenizer.

    Raises:
        ValueError: ``output`` cannot be written.
    """
    assert found.adapter is not None
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG, WEIGHTS):
            shutil.copyfile(found.adapter / name, output / name)
        export_tokenizer(found.source, output)
    except OSError as error:
        raise ValueError(f"cannot write to {output}: {error.strerror}") from None


def merged(found: Opened) -> StoredWeights:
    """Yield the weights of the plain model."""
    source = found.source
    if source.adapter is None:
        return stored_weights(source)
    adapter = adapter_of(source)
    base = source.adapter.base
    weights = stored_weights(base)
    if found.base is not None:
        weights = _rounded(weights, base.config, found.base)
    return merged_weights(weights, base.config, adapter, source.config)


def _rounded(weights: StoredWeights, config: ModelConfig, rounding: Callable[[Tensor], Tensor]) -> StoredWeights:
    """Yield the weights, with those matrices rounded that ``qlora.quantize_layers`` rounds; routers are excluded."""
    matrices = {f"{name}.weight" for name, _ in Decoder(config, device="meta").weights() if name != "head"}
    for name, stored in weights:
        if name in matrices:

            def read(rows: slice, columns: slice, stored: Stored = stored) -> Values:
                return rounding(dense_values(stored.read()))[rows, columns]

            yield name, replace(stored, reader=read)
        else:
            yield name, stored


def export_model(
    found: Opened,
    output: Path,
    dtype: str = "auto",
    quantization: str | None = None,
    group: int | None = None,
    kv_scales: Tensor | None = None,
    first_layers: int | None = None,
) -> None:
    """Write a plain model in Hugging Face layout, the adapter merged, with its tokenizer.

    Args:
        dtype: ``auto``: ``export_dtype``.
        quantization: of the layers' matrices, see ``checkpoints/quantized_out.py``; None for none.
        group: neighbours that share a scale in 4 bits; None for as many as fit.
        kv_scales: of a KV cache in fp8, as ``checkpoints/quantized_out.py`` takes them.
        first_layers: leave out the layers after these: a small model to draft with, or to distill.

    Raises:
        ValueError: an unknown dtype, more layers than there are, or ``output`` cannot be written.
    """
    config = found.source.config
    if first_layers is not None:
        config = _cut(config, first_layers)
    if dtype not in ("auto", *EXPORT_DTYPES):
        raise ValueError(f"dtype must be auto, {', '.join(EXPORT_DTYPES)}, not {dtype!r}")
    wanted = EXPORT_DTYPES.get(dtype) or export_dtype(found)
    names = weight_shapes(config)
    state = {
        name: dense_values(stored.read()).to(wanted, copy=True)
        for name, stored in merged(found)
        if first_layers is None or name in names
    }
    save_hf(state, config, output, quantization=quantization, group=group, kv_scales=kv_scales)
    export_tokenizer(found.source, output)


def _cut(config: ModelConfig, layers: int) -> ModelConfig:
    """The configuration of a model's first layers."""
    if not 1 <= layers < config.n_layers:
        raise ValueError(f"first_layers must be from 1 to {config.n_layers - 1}, not {layers}")
    return replace(
        config,
        n_layers=layers,
        no_rope_layers=tuple(layer for layer in config.no_rope_layers if layer < layers),
        full_attention_layers=tuple(layer for layer in config.full_attention_layers if layer < layers),
    )


def export_dtype(found: Opened) -> torch.dtype:
    """Choose the dtype of a merged model: with an adapter that of its base, else that of the run or of the model's
    files. The dtype of a model's files is that of their embedding, or bfloat16 if that is packed."""
    if found.source.adapter is not None:
        return _dtype_of(found.source)
    return found.dtype or _dtype_of(found.source)


def export_gguf(
    found: Opened, output: Path, type_name: str = "f16", importance: Mapping[str, np.ndarray] | None = None
) -> None:
    """Write one GGUF file with tokenizer and chat template, the adapter merged.

    Args:
        type_name: of the matrices, see ``checkpoints/gguf_out.py``.
        importance: of the columns of matrices, see there.

    Raises:
        ValueError: an unknown type, a model or a tokenizer that GGUF files cannot hold, or ``output`` cannot be
            written.
    """
    config = found.source.config
    chosen = gguf_type(type_name)
    metadata = gguf_metadata(config, chosen, Path(found.source.name).name) | gguf_vocabulary(found.source)
    weights = merged(found)  # its files stay open as long as it is there
    write_gguf(output, metadata, gguf_tensors(weights, config, chosen, importance))


def _dtype_of(source: ModelSource) -> torch.dtype:
    base = source if source.adapter is None else source.adapter.base
    weights = stored_weights(base)
    values = next(stored.read(slice(0, 1)) for name, stored in weights if name == "embed.weight")
    return values.dtype if isinstance(values, Tensor) else torch.bfloat16
