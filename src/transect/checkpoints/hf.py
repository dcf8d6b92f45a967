"""Weights as safetensors in the layout of Hugging Face: one file or several; ``hf_out.py`` writes them.

The names of ``spec/weights.py`` and those of transformers are translated one to one, but for GPT-2, whose linear layers
are stored ``[in, out]`` (``Conv1D``) and whose q, k and v are one matrix.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..models.rope import half_rotation_rows
from ..models.stored import ALL, Stored, StoredWeights, is_whole, within
from ..spec.families.family import Family
from ..spec.families.names import HF_NAMES
from ..spec.families.registry import family
from ..spec.fields import read_json_object
from ..spec.hf import text_part
from ..spec.model import ModelConfig
from ..spec.moe import MoEConfig
from ..spec.weights import weight_shapes, within_joined
from .quantized import experts_reader, packed_reader, stack_reader, with_values

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_NOT_WEIGHTS = re.compile(r".*\.rotary_emb\.inv_freq|.*\.attn\.(bias|masked_bias)")
"""Buffers of old checkpoints: rotary frequencies and GPT-2's causal masks."""
_OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|vision_model|multi_modal_projector)\..*")
"""Weights of a vision model beside its language model."""


@dataclass(frozen=True)
class HFPlace:
    """Location of a weight in transformers' files.

    The weight is ``size`` rows from ``first`` on of ``tensor``, after transposing if ``transposed``; ``stored`` is the
    file's shape. With ``experts`` it is that number of tensors, concatenated along rows: ``tensor`` has ``{}`` for the
    expert, and
    ``stored`` is the shape of one. ``stacked``: one tensor holds all experts; ``step`` 2: of each, every other row from
    ``first`` on (gpt-oss). ``paired``: the head size of rows that stand in the order that rotates neighbouring pairs
    (Llama 4); here they stand in that of halves.
    """

    tensor: str
    stored: tuple[int, ...]
    transposed: bool = False
    first: int = 0
    size: int | None = None
    experts: int = 0
    stacked: bool = False
    step: int = 1
    paired: int = 0

    @property
    def tensors(self) -> list[str]:
        """Names of all its tensors."""
        return [self.tensor.format(expert) for expert in range(self.experts)] if self.experts else [self.tensor]

    @property
    def rows(self) -> slice:
        """Rows of the weight in the tensor."""
        end = None if self.size is None else self.first + self.size * self.step
        return slice(self.first, end, self.step)

    def order(self, rows: int) -> np.ndarray:
        """Return the index in the tensor of each of the weight's ``rows`` rows, within its part."""
        return half_rotation_rows(rows // self.paired, self.paired) if self.paired else np.arange(rows)


def places(config: ModelConfig) -> dict[str, HFPlace]:
    """Map canonical names to places, for every weight of ``weight_shapes(config)``."""
    record = family(config.architecture)
    names = HF_NAMES | record.hf_names
    out = {}
    for name, shape in weight_shapes(config).items():
        module, kind = name.rsplit(".", 1)
        if not module.startswith("layers."):
            out[name] = HFPlace(f"{names[module]}.{kind}", shape)
            continue
        _, layer, inner = module.split(".", 2)
        stack = f"{names['layers']}.{layer}"
        moe = config.layer_moe(int(layer))
        if moe is not None and inner.startswith("mlp.experts_"):
            if record.hf_stacked is not None:
                out[name] = _stacked_place(stack, inner, kind, config, moe, record)
            else:
                one = (shape[0] // moe.experts, *shape[1:])
                out[name] = HFPlace(f"{stack}.{names[inner]}.{kind}", one, experts=moe.experts)
            continue
        kind = "e_score_correction_bias" if kind == "score_bias" else kind
        transposed = record.hf_transposed and len(shape) == 2
        first, whole = within_joined(config, inner, shape[0], record.joined)
        stored = (whole, *shape[1:])
        size = None if whole == shape[0] else shape[0]
        paired = config.head_dim if record.hf_paired and inner in ("attention.q", "attention.k") else 0
        tensor = f"{stack}.{names[inner]}.{kind}"
        out[name] = HFPlace(tensor, stored[::-1] if transposed else stored, transposed, first, size, paired=paired)
    return out


def _stacked_place(layer: str, inner: str, kind: str, config: ModelConfig, moe: MoEConfig, record: Family) -> HFPlace:
    """Return the place of stacked experts: one tensor ``[E, inputs, outputs]``, in which gate and up alternate
    (gpt-oss) or are concatenated (Llama 4)."""
    turns = record.hf_stacked == "turns"
    up = inner.endswith("_up")
    down = inner.endswith("_down")
    width, inputs = (config.dim, moe.expert_dim) if down else (2 * moe.expert_dim, config.dim)
    matrix = f"{'down_proj' if down else 'gate_up_proj'}{'_bias' if kind == 'bias' else ''}"
    shape = (moe.experts, width) if kind == "bias" else (moe.experts, inputs, width)
    first = int(up) * (1 if turns else moe.expert_dim)
    step = 2 if turns and not down else 1
    tensor = f"{layer}.{(HF_NAMES | record.hf_names)['mlp.experts']}.{matrix}"
    return HFPlace(tensor, shape, transposed=kind != "bias", first=first, stacked=True, step=step)


# ---- in


def stored_hf(directory: str | os.PathLike[str], config: ModelConfig) -> StoredWeights:
    """Yield every weight of ``weight_shapes(config)`` once, in the dtype of the file.

    Raises:
        ValueError: no safetensors, a file missing or damaged, a tensor missing, superfluous, of the wrong shape or an
            unsupported type; the message names file and tensor. All is found before the first weight is handed out,
            but for damage that only reading shows.
    """
    directory = Path(directory)
    stack = ExitStack()
    try:
        found = listing(directory, stack)
        settings = _quantization(directory)
        if settings is not None:
            found = with_values(found, settings, _Stored)
        if config.n_layers > len(found):  # before a list of billions of names is made
            raise ValueError(
                f"{directory}: {len(found)} tensors cannot be the {config.n_layers} layers of config.json; config.json "
                "and weights do not belong together"
            )
        plan = places(config)
        for place in plan.values():
            for tensor in place.tensors:
                _check(directory, found, place, tensor)
        _refuse_superfluous(directory, found, plan, config)
    except BaseException:
        stack.close()
        raise
    return _weights(found, plan, stack, config)


def _weights(
    found: dict[str, _Stored], plan: dict[str, HFPlace], stack: ExitStack, config: ModelConfig
) -> StoredWeights:
    with stack:
        for name, shape in weight_shapes(config).items():
            place, where = plan[name], found[plan[name].tensors[0]]
            packed: tuple[Any, Any]  # its layout, and what reads it so
            if place.experts:
                one = (shape[0] // place.experts, *shape[1:])
                stack_of = [found[tensor] for tensor in place.tensors]
                read, packed = partial(_read_experts, stack_of, place, one), experts_reader(stack_of, one[0])
            elif place.stacked:
                read = partial(_read_stack, where, place, shape)
                packed = stack_reader(where, place.stored[0], place.first, place.step, shape[0])
            else:
                read = partial(_read, where, place, shape)
                packed = packed_reader(where, place.first, shape[0], place.transposed or bool(place.paired))
            yield name, Stored(shape, read, *packed)


def _read_stack(where: _Stored, place: HFPlace, shape: tuple[int, ...], rows: slice, columns: slice) -> Tensor:
    """Read some rows of the experts in one tensor of gpt-oss, expert by expert."""
    wanted, each = within(shape[0], rows), shape[0] // place.stored[0]
    parts = []
    try:
        tensor = where.file.get_slice(where.name)
        for expert in range(wanted.start // each, -(-wanted.stop // each)):
            first = max(0, wanted.start - expert * each)
            last = min(each, wanted.stop - expert * each)
            # From the first to the last of these rows, and those of the other matrix between them.
            near = slice(place.step * first, min(place.stored[-1], place.step * last))
            if place.step == 1:
                near = slice(place.first + first, place.first + last)
            one = tensor[expert, columns, near].t() if place.transposed else tensor[expert, near]
            parts.append(one[place.first :: place.step] if place.step > 1 else one)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise _damaged(where.path, error) from None
    return torch.cat(parts)


def _read_experts(stack: list[_Stored], place: HFPlace, shape: tuple[int, ...], rows: slice, columns: slice) -> Tensor:
    """Read some rows of the concatenated matrices of all experts; experts without such rows are not read."""
    wanted, each = within(len(stack) * shape[0], rows), shape[0]
    parts = []
    for expert in range(wanted.start // each, -(-wanted.stop // each)):
        own = slice(max(0, wanted.start - expert * each), min(each, wanted.stop - expert * each))
        parts.append(_read(stack[expert], place, shape, own, columns))
    return torch.cat(parts)


def _read(where: _Stored, place: HFPlace, shape: tuple[int, ...], rows: slice, columns: slice) -> Tensor:
    if place.paired:
        whole = _read(where, replace(place, paired=0), shape, ALL, columns)
        return whole[place.order(shape[0])[within(shape[0], rows)]]
    parts = [within(size, part) for size, part in zip(shape, (rows, columns), strict=False)]
    if place.size is not None:
        parts[0] = slice(place.first + parts[0].start, place.first + parts[0].stop)
    if place.transposed:
        parts.reverse()
    try:
        if all(is_whole(size, part) for size, part in zip(place.stored, parts, strict=True)):
            tensor = where.file.get_tensor(where.name)
        else:
            tensor = where.file.get_slice(where.name)[tuple(parts)]
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise _damaged(where.path, error) from None
    return tensor.t() if place.transposed else tensor


@dataclass(frozen=True)
class _Stored:
    """A tensor of an open safetensors file, under its name there."""

    file: Any
    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def listing(directory: Path, stack: ExitStack) -> dict[str, _Stored]:
    """List every tensor of a checkpoint by its full transformers name; ``stack`` closes the files.

    Raises:
        ValueError: there are no safetensors, or a file is damaged.
    """
    found: dict[str, _Stored] = {}
    for path in _files(directory):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118  (a safetensors file is not a mapping)
                view = file.get_slice(name)
                stored = _Stored(file, path, name, tuple(view.get_shape()), str(view.get_dtype()))
                if _OTHER_PARTS.fullmatch(name):
                    continue
                if found.setdefault(_full_name(name), stored) is not stored:
                    raise ValueError(f"the tensor {name!r} is in two files")
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise _damaged(path, error) from None
    return found


def _quantization(directory: Path) -> Any:
    """Read ``quantization_config`` of config.json; None if there is none."""
    path = directory / "config.json"
    return text_part(read_json_object(path)).get("quantization_config") if path.is_file() else None


def _full_name(name: str) -> str:
    """Complete a tensor's name: checkpoints of a bare model (without the language-model head) lack the leading
    ``model.`` or ``transformer.``; those of a model of several parts contain ``language_model.``."""
    name = name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
    if name.startswith(("layers.", "embed_tokens.", "norm.")):
        return f"model.{name}"
    if name.startswith(("h.", "wte.", "wpe.", "ln_f.")):
        return f"transformer.{name}"
    return name


def _files(directory: Path) -> list[Path]:
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    index = directory / INDEX
    if not index.is_file():
        only = sorted(directory.glob("*.safetensors"))
        if len(only) == 1:
            return only
        other = "; it has PyTorch .bin files, which are not read: save it again as safetensors"
        hint = other if list(directory.glob("*.bin")) else ""
        raise ValueError(f"{directory} has neither {SINGLE} nor {INDEX}{hint or '; download the model again'}")
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        names = sorted(set(shards))
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError("its weight_map must map tensor names to file names")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not a readable index ({line(error)}); download it again") from None
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ValueError(f"{directory} lacks {len(missing)} of {len(names)} shards ({few(missing)}); download them")
    return [directory / name for name in names]


def _check(directory: Path, found: dict[str, _Stored], place: HFPlace, tensor: str) -> None:
    stored = found.get(tensor)
    shape = list(place.stored)
    if stored is None:
        raise ValueError(f"{directory}: the tensor {tensor!r} (shape {shape}) is missing; download it again")
    if stored.shape != place.stored:
        raise ValueError(
            f"{stored.path}: the tensor {tensor!r} should have shape {shape} and has {list(stored.shape)}; "
            "config.json and weights do not belong together"
        )
    if stored.dtype not in _TYPES:
        raise ValueError(
            f"{stored.path}: the tensor {tensor!r} is of unsupported type {stored.dtype}; supported: "
            f"{', '.join(_TYPES)}. Take an unquantized model or a GGUF file"
        )


def _refuse_superfluous(
    directory: Path, found: dict[str, _Stored], plan: dict[str, HFPlace], config: ModelConfig
) -> None:
    used = {tensor for place in plan.values() for tensor in place.tensors}
    if config.tied_embeddings:
        used.add("lm_head.weight")  # some files hold the shared table twice
    extra = [name for name in found if name not in used and not _NOT_WEIGHTS.fullmatch(name)]
    if extra:
        raise ValueError(
            f"{directory}: a {config.architecture} model with this config.json has no use for {len(extra)} of the "
            f"tensors ({few(extra)}); config.json and weights do not belong together"
        )


def _damaged(path: Path, error: BaseException) -> ValueError:
    return ValueError(f"{path} is truncated or corrupt ({line(error)}); download it again")


def line(error: BaseException) -> str:
    return getattr(error, "strerror", None) or (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def few(names: list[str]) -> str:
    named = (name if name.isprintable() else repr(name) for name in names[:3])
    return ", ".join(named) + (", ..." if len(names) > 3 else "")
