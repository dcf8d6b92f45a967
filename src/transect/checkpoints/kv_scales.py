"""Scales for keys and values in fp8: read from a checkpoint, measured on a text, and set in a model.

What a layer does with its own is in ``models/layer_kv_scales.py``.

Shapes: L layers, K key heads, T tokens, d head size; scales float32 ``[L, 2, K]``, keys' before values'.

Source: the names are those of vLLM (``self_attn.k_scale`` and ``v_scale``, in older checkpoints ``kv_scale`` for both);
``kv_cache_scheme`` of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from ..models.context import VarlenContext
from ..models.decoder import Decoder, Layer
from ..models.layer_kv_scales import KVScales, powers_of_two
from ..spec.numbers.fp8 import FP8
from .hf import listing
from .resolve import ModelSource

ROOM = 2.0
"""Factor by which keys and values may exceed those in the calibration text."""
_PLACES = ("self_attn.{}_scale", "self_attn.attn.{}_scale", "self_attn.{}_proj.{}_scale", "self_attn.kv_scale")


def read_scales(directory: Path, layers: int, kv_heads: int) -> Tensor | None:
    """Return the scales of a checkpoint in safetensors, or None if it has none. One scale for a whole layer applies to
    all its heads.

    Raises:
        ValueError: a file is damaged, a layer has none while others do, or they are not positive numbers, one for a
            layer or for each key head; the message names the tensor.
    """
    with ExitStack() as stack:
        found = listing(directory, stack)
        if not any(name.endswith(("k_scale", "v_scale")) for name in found):
            return None
        rows = []
        for layer in range(layers):
            for which in "kv":
                names = [f"model.layers.{layer}.{place.format(which, which)}" for place in _PLACES]
                name = next((each for each in names if each in found), None)
                if name is None:
                    raise ValueError(f"{directory}: the tensor {names[0]!r} is missing, which other layers have")
                scale = found[name].file.get_tensor(found[name].name).float().flatten()
                if len(scale) not in (1, kv_heads):
                    raise ValueError(
                        f"{directory}: {name!r} has {len(scale)} scales; a cache takes one, or one for each of the "
                        f"{kv_heads} key heads"
                    )
                if not bool((scale.isfinite() & (scale > 0)).all()):
                    raise ValueError(f"{directory}: {name!r} has scales that are not positive numbers")
                rows.append(scale.expand(kv_heads))
    return torch.stack(rows).unflatten(0, (layers, 2))


def take_scales(model: Decoder, source: ModelSource, layers: slice = slice(None)) -> bool:
    """Call ``use_scales`` with those of a source's checkpoint, if it has any; ``layers``: those that ``model`` has.

    Raises:
        ValueError: see ``read_scales``.
    """
    while source.adapter is not None:
        source = source.adapter.base
    scales = read_scales(source.path, source.config.n_layers, source.config.n_kv_heads) if source.kind == "hf" else None
    if scales is not None:
        use_scales(model, scales[layers])
    return scales is not None


def use_scales(model: Decoder, scales: Tensor) -> None:
    """Set the divisors ``[L, 2, K]``, in the order of layers, of the keys and values that the layers of ``model``
    cache.

    A model that has another number of key heads is one rank's part: all its heads take the largest of a layer.
    """
    config, weight = model.config, model.norm.weight
    assert isinstance(weight, Tensor)
    for layer, own in zip((each for each in model.layers if isinstance(each, Layer)), scales, strict=True):
        if own.shape[1] != config.n_kv_heads:
            own = own.amax(1, keepdim=True).expand(2, config.n_kv_heads)
        layer.attention.kv_scales = KVScales(own, config.n_heads, weight.device, weight.dtype)


class _Peaks(VarlenContext):
    """Records the largest keys and values of each head of each layer."""

    def __init__(self, cu_seqlens: Tensor, model: Decoder) -> None:
        super().__init__(cu_seqlens, model.ops)
        self.found = torch.zeros(model.config.n_layers, 2, model.config.n_kv_heads)

    def attend(self, layer, q_THd, k_TKd, v_TKd, *how, **more):  # type: ignore[no-untyped-def]
        """Compute attention of one layer, and record the largest of k and v."""
        self.found[layer] = torch.stack([x.abs().amax((0, 2)).float().cpu() for x in (k_TKd, v_TKd)])
        return super().attend(layer, q_THd, k_TKd, v_TKd, *how, **more)


@torch.no_grad()
def measured_scales(model: Decoder, texts: Sequence[Sequence[int]]) -> Tensor:
    """Compute scales ``[L, 2, K]`` with which twice the keys and values of these texts fit into fp8.

    Args:
        model: on plain torch.
        texts: token ids; each text sees itself alone.

    Raises:
        ValueError: a layer makes infinite or NaN numbers of the text.
    """
    peaks = torch.zeros(model.config.n_layers, 2, model.config.n_kv_heads)
    for text in texts:
        context = _Peaks(torch.tensor([0, len(text)], dtype=torch.int32), model)
        model(torch.tensor(text), context.positions(), context)
        peaks = torch.maximum(peaks, context.found)
    if not bool(peaks.isfinite().all()):
        raise ValueError("a layer makes infinite or NaN keys or values of the text: it cannot be calibrated")
    return powers_of_two((ROOM * peaks / FP8.largest).clamp(min=2.0**-20))
