"""Writing of a model as transformers stores it: config.json and safetensors, plain or rounded, in one file or in
shards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..spec.hf import to_hf
from ..spec.model import ModelConfig
from ..spec.weights import weight_shapes
from .hf import INDEX, SINGLE, few, line, places
from .safetensors_out import shards, write_json, write_shard

if TYPE_CHECKING:
    from .quantized_grid import Grid

MAX_SHARD_BYTES = 5 * 10**9


def save_hf(
    model_state: Mapping[str, Tensor],
    config: ModelConfig,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    quantization: str | None = None,
    grids: Mapping[str, Grid] | None = None,
    group: int | None = None,
    dtype: torch.dtype | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """Write config.json and safetensors that transformers, vLLM and ``stored_hf`` read.

    Args:
        model_state: ``Decoder.state_dict()``: every weight of ``weight_shapes(config)``, in any float dtypes; with tied
            embeddings a ``head.weight`` is left out.
        directory: created if it does not exist. Each file is written beside its place and moved there when it is whole;
            config.json comes last.
        quantization: rounding of the layers' matrices, see ``quantized_out.py``; None for none.
        grids: 4-bit grids on which the matrices lie already, by canonical name; None to find them.
        group: neighbours that share a scale in 4 bits; None for as many as fit.
        dtype: data type named in config.json; None for that of the weights, if they have a single one.
        kv_scales: of keys and values in fp8, as ``quantized_out.py`` takes them.
        max_shard_bytes: a new file is begun before one grows past this; one tensor is never cut.

    Raises:
        ValueError: a weight is missing, superfluous or of the wrong shape; an architecture that config.json cannot
            express; a directory that cannot be written.
    """
    values = to_hf(config)
    tensors = _to_hf_names(model_state, config)
    dtypes = {tensor.dtype for tensor in tensors.values()} if dtype is None else {dtype}
    if len(dtypes) == 1:
        values["torch_dtype"] = str(dtypes.pop()).removeprefix("torch.")
    if quantization is not None:
        from .quantized_grid import Grid
        from .quantized_out import encoded

        scales = by_hf_name({name: grid.scale for name, grid in (grids or {}).items()}, config)
        zeros = by_hf_name({name: grid.zero for name, grid in (grids or {}).items()}, config)
        found = {name: Grid(scale, zeros[name]) for name, scale in scales.items()}
        tensors, settings = encoded(tensors, quantization, found, group, kv_scales)
        values |= settings
    cut = shards(tensors, max_shard_bytes)
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        written = {}
        for number, shard in enumerate(cut, 1):
            name = SINGLE if len(cut) == 1 else f"model-{number:05}-of-{len(cut):05}.safetensors"
            write_shard(shard, directory / name)
            written[name] = shard
        if len(cut) > 1:
            weight_map = {tensor: name for name, shard in written.items() for tensor in shard}
            total = sum(tensor.nbytes for tensor in tensors.values())
            write_json({"metadata": {"total_size": total}, "weight_map": weight_map}, directory / INDEX)
            written[INDEX] = {}
        write_json(values, directory / "config.json")
        for path in [*directory.glob("model*.safetensors"), directory / INDEX]:
            if path.name not in written:  # of a model that was here before
                path.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write the model to {directory}: {line(error)}") from None


def _to_hf_names(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    shapes = weight_shapes(config)
    superfluous = set(state) - set(shapes) - ({"head.weight"} if config.tied_embeddings else set())
    if superfluous:
        raise ValueError(f"the model has no weights {few(sorted(superfluous))}; give Decoder.state_dict()")
    for name, shape in shapes.items():
        if name not in state:
            raise ValueError(f"the weight {name!r} (shape {list(shape)}) is missing; give a whole Decoder.state_dict()")
        if tuple(state[name].shape) != shape:
            raise ValueError(f"the weight {name!r} should have shape {list(shape)} and has {list(state[name].shape)}")
    return by_hf_name(state, config)


def by_hf_name(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Combine some weights, or scales of their rows, as transformers names and stores them."""
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    transposed = {}
    interleaved: dict[str, int] = {}
    for name, place in places(config).items():  # q, k, v in this order
        if name not in state:
            continue
        whole = state[name].detach().cpu()
        if place.stacked:  # gpt-oss: gate and up take turns
            values = whole.unflatten(0, (place.stored[0], -1))
            parts.setdefault(place.tensor, []).append((place.first, values.mT if place.transposed else values))
            interleaved[place.tensor] = place.step
            continue
        if place.paired:
            whole = whole[np.argsort(place.order(len(whole)))]
        own = [whole] if not place.experts else whole.unflatten(0, (place.experts, -1)).unbind()
        for tensor, values in zip(place.tensors, own, strict=True):
            parts.setdefault(tensor, []).append((place.first, values))
            transposed[tensor] = place.transposed
    ordered = {name: [values for _, values in sorted(found, key=lambda part: part[0])] for name, found in parts.items()}
    stacks = {
        name: (torch.stack(each, -1).flatten(-2) if step == 2 else torch.cat(each, -1)).contiguous()
        for name, step, each in ((name, step, ordered.pop(name)) for name, step in interleaved.items())
    }
    joined = {name: tensors[0] if len(tensors) == 1 else torch.cat(tensors) for name, tensors in ordered.items()}
    return stacks | {name: (tensor.t() if transposed[name] else tensor).contiguous() for name, tensor in joined.items()}
