"""EAGLE-3 heads: the files of published checkpoints, in and out.

``config.json`` is described in ``spec/eagle.py``. Tensors, in ``model.safetensors`` or, as the first published heads
have them, in ``pytorch_model.bin``:

* ``fc.weight`` ``[D, 3 target_dim]``, ``norm.weight``, ``lm_head.weight`` ``[draft vocabulary, D]``
* ``midlayer.self_attn.{q,k,v}_proj.weight`` with 2 D inputs, ``o_proj``; ``midlayer.mlp.{gate,up,down}_proj.weight``
* ``midlayer.input_layernorm`` of embeddings, ``hidden_norm`` of features, ``post_attention_layernorm`` of the MLP
* ``d2t`` int64: add it to the head's token to get the target's. ``t2d``: True for the target's tokens in ``d2t``
* ``embed_tokens.weight``, if it is not the target's
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..models.eagle import EagleHead
from ..models.embedding import Embedding
from ..models.staging import Staging, dense_values
from ..models.weights.weight import Kinds, Weight
from ..ops.opset import OpSet
from ..spec.eagle import HeadConfig, head_from_json, head_to_json
from ..spec.fields import read_json_object
from .hf import SINGLE, few, line, listing
from .load import stored_weights
from .resolve import ModelSource, find_on_hub
from .safetensors_out import write_json, write_shard

PICKLED = "pytorch_model.bin"
_PATTERNS = ["config.json", "*.safetensors", "*.safetensors.index.json", PICKLED]
EMBED = "embed_tokens.weight"
PLACES = {
    "fc": "fc",
    "input_norm": "midlayer.input_layernorm",
    "hidden_norm": "midlayer.hidden_norm",
    "mlp_norm": "midlayer.post_attention_layernorm",
    **{f"attention.{name}": f"midlayer.self_attn.{name}_proj" for name in "qkvo"},
    **{f"mlp.{name}": f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down")},
    "head.norm": "norm",
    "head.lm_head": "lm_head",
}
"""Modules of ``EagleHead`` to names of tensors, without ``.weight`` and ``.bias``."""


@dataclass(frozen=True)
class HeadSource:
    """The location and description of a head."""

    path: Path
    head: HeadConfig
    name: str

    def bytes_per_token(self, element: int) -> float:
        """Return the bytes that the head keeps of a token, its feature, and keys and values of one layer, in numbers of
        ``element`` bytes."""
        return element * (self.head.model.dim + 2 * self.head.model.kv_dim)


def resolve_head(name: str, target: ModelSource, *, allow_download: bool = True) -> HeadSource:
    """Find a head for ``target``: a directory, or a hub id.

    Raises:
        ValueError: no head of that name, another kind of model, or a head of another target; the message has the
            difference.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        path = find_on_hub(name, allow_download, _PATTERNS)
    try:
        config = read_json_object(path / "config.json")
    except FileNotFoundError:
        raise ValueError(f"{path} has no config.json: give the directory or hub id of an EAGLE-3 head") from None
    try:
        source = HeadSource(path.resolve(), head_from_json(config), name)
        check_head(source, target)
    except ValueError as error:
        raise ValueError(f"the EAGLE-3 head {name}: {error}") from None
    return source


def check_head(source: HeadSource, target: ModelSource) -> None:
    """Check that a head is one of this target. Raises ValueError."""
    head, model = source.head, target.config
    if head.target_dim != model.dim:
        raise ValueError(
            f"it reads hidden states of {head.target_dim} numbers, and those of {target.name} have {model.dim}: take "
            "the head that was trained for this model"
        )
    if head.model.vocab_size != model.vocab_size:
        raise ValueError(
            f"its config.json has a vocabulary of {head.model.vocab_size} tokens, and {target.name} one of "
            f"{model.vocab_size}: take the head that was trained for this model"
        )
    if head.draft_vocab_size > model.vocab_size:
        raise ValueError(
            f"draft_vocab_size {head.draft_vocab_size} exceeds the vocabulary of {model.vocab_size} tokens: correct "
            "its config.json"
        )
    head.layers_of(model)


@torch.no_grad()
def load_head(
    source: HeadSource,
    target: ModelSource,
    embed: nn.Module,
    *,
    ops: OpSet,
    device: torch.device | str,
    dtype: torch.dtype,
    kinds: Kinds | None = None,
) -> EagleHead:
    """Build a head and read its weights, for inference.

    Args:
        embed: the target's embedding, for heads that have none.
        ops, device, dtype, kinds: as in ``EagleHead``.

    Raises:
        ValueError: tensors that are missing, superfluous or of another shape.
    """
    tensors = read_tensors(source.path)
    table = tensors.pop(EMBED, None)
    config = source.head
    if table is not None:
        _expect(EMBED, table, (config.model.vocab_size, config.model.dim), source)
        own = Embedding(*table.shape, device=device, dtype=dtype)
        own.weight.copy_(table)
        embed = own.requires_grad_(False)
    elif config.model.dim != target.config.dim:
        raise ValueError(
            f"the EAGLE-3 head {source.name} has no {EMBED}, and its width is {config.model.dim}, not the "
            f"{target.config.dim} of {target.name}: take a head with an embedding"
        )
    where = torch.device(device)
    head = EagleHead(
        config, config.layers_of(target.config), embed=embed, ops=ops, device="meta", dtype=dtype, kinds=kinds
    ).to_empty(device=where)
    head.head.places_W.copy_(_places_of(tensors, source))
    with Staging(where) as staging:
        for module, name in PLACES.items():
            part: Any = head.get_submodule(module)
            bias, shape = getattr(part, "bias", None), getattr(part, "shape", None)
            if bias is not None:
                staging.copy(_taken(f"{name}.bias", tensors, tuple(bias.shape), source), bias.detach())
            if isinstance(part, Weight):
                part.load(_taken(f"{name}.weight", tensors, shape, source), staging)
            else:
                own = part.weight.detach()
                staging.copy(_taken(f"{name}.weight", tensors, tuple(own.shape), source), own)
    if tensors:
        raise ValueError(f"the EAGLE-3 head {source.name} has tensors without a use here: {few(sorted(tensors))}")
    return head.requires_grad_(False)


def _taken(name: str, tensors: dict[str, Tensor], shape: Any, source: HeadSource) -> Tensor:
    """Remove the tensor ``name`` from a file's ``tensors`` and return it after checking its shape."""
    values = tensors.pop(name, None)
    if values is None:
        raise ValueError(f"the EAGLE-3 head {source.name} lacks the tensor {name}: download it again")
    _expect(name, values, shape, source)
    return values


def _expect(name: str, values: Tensor, shape: tuple[int, ...], source: HeadSource) -> None:
    if tuple(values.shape) != tuple(shape):
        raise ValueError(
            f"the EAGLE-3 head {source.name}: {name} has shape {list(values.shape)}, and config.json and the target "
            f"need {list(shape)}: take the head that was trained for this model"
        )


def _places_of(tensors: dict[str, Tensor], source: HeadSource) -> Tensor:
    """Return the target's tokens of the head's tokens, int64 ``[W]``."""
    config, vocab = source.head, source.head.model.vocab_size
    shift = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    if shift is None:
        if config.draft_vocab_size != vocab:
            raise ValueError(
                f"the EAGLE-3 head {source.name} has {config.draft_vocab_size} of {vocab} tokens, and no tensor d2t "
                "that says which: download it again"
            )
        return torch.arange(vocab)
    _expect("d2t", shift, (config.draft_vocab_size,), source)
    places = torch.arange(len(shift)) + shift.long().cpu()
    if not bool(((places >= 0) & (places < vocab)).all()) or len(places.unique()) != len(places):
        raise ValueError(f"the EAGLE-3 head {source.name}: d2t names tokens outside of the vocabulary, or one twice")
    return places


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of a head by the names above. A ``.bin`` file is read as numbers alone: it runs no code.

    Raises:
        ValueError: files that are missing or damaged.
    """
    if not list(directory.glob("*.safetensors")) and (directory / PICKLED).is_file():
        try:
            found = torch.load(directory / PICKLED, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            path = directory / PICKLED
            raise ValueError(f"{path} is not readable as tensors ({line(error)}): save it again") from None
        return {_short(name): values for name, values in found.items() if isinstance(values, Tensor)}
    with ExitStack() as stack:
        stored = listing(directory, stack)
        return {_short(name): each.file.get_tensor(each.name) for name, each in stored.items()}


def _short(name: str) -> str:
    return re.sub(r"^layers\.\d+\.", "midlayer.", name.removeprefix("model."))


def save_head(
    state: Mapping[str, Tensor],
    places: Tensor,
    head: HeadConfig,
    directory: str | os.PathLike[str],
) -> None:
    """Write a head as published ones are stored.

    Args:
        state: ``EagleHead.state_dict()``.
        places: the target's tokens of the head's tokens, int64, ascending.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for module, name in PLACES.items():
        for leaf in ("weight", "bias"):
            if f"{module}.{leaf}" in state:
                tensors[f"{name}.{leaf}"] = state[f"{module}.{leaf}"].detach().cpu().contiguous()
    tensors["d2t"] = places.cpu() - torch.arange(len(places))
    known = torch.zeros(head.model.vocab_size, dtype=torch.bool)
    known[places.cpu()] = True
    tensors["t2d"] = known
    values = head_to_json(head) | {"torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch.")}
    write_shard(tensors, directory / SINGLE)
    write_json(values, directory / "config.json")


@torch.no_grad()
def own_table(target: ModelSource, device: torch.device | str, dtype: torch.dtype) -> Embedding:
    """Read the target's embedding of tokens, whole."""
    config = target.config
    table = Embedding(config.vocab_size, config.dim, device=device, dtype=dtype)
    for name, stored in stored_weights(target, dtype=dtype):
        if name == "embed.weight":
            table.weight.copy_(dense_values(stored.read()))
            break
    return table.requires_grad_(False)
