"""Adapters in PEFT's layout, in and out: ``adapter_config.json`` and ``adapter_model.safetensors``.

A tensor is called by the module of transformers that it stands beside: ``base_model.model.`` and then
``model.layers.0.self_attn.q_proj.lora_A.weight``. Three translations differ from one to one. Some matrices are one
module there (q, k and v of GPT-2 and Phi-3, gate and up of Phi-3): read, they share its A; written, they are one
adapter of the sum of their ranks, with B block by block, and metadata have the ranks, by which they are taken apart
again. Rows of B follow those of the file (Llama 4). And PEFT keeps the factors of an embedding transposed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..models.weights.low_rank import LowRank
from ..spec.model import ModelConfig
from ..spec.weights import weight_shapes
from .adapter import StoredAdapter
from .hf import HFPlace, places
from .peft_config import CONFIG, PREFIX, TIED, WEIGHTS, PeftSettings, read_header, read_settings
from .safetensors_out import write_with_metadata

_FACTOR = re.compile(
    r"(?P<module>.+)\.(?:lora_(?P<linear>[AB])(?:\.\w+)?\.weight|lora_embedding_(?P<embedding>[AB])(?:\.\w+)?"
    r"|lora_(?P<magnitude>magnitude_vector)(?:\.\w+)?(?:\.weight)?)"
)
_WHOLE = re.compile(r"(?P<module>.+?)(?:\.base_layer|\.modules_to_save(?:\.\w+)?|\.original_module)?\.(weight|bias)")
SCORE = "score"
"""Module of transformers that classifies by the last hidden state."""
VERSION = "0.15.0"
"""PEFT version whose names of settings are written; later versions read them."""
BLOCKS = "blocks"
"""Key of metadata: for modules that consist of several matrices, by name, the rank of each; 0 for no adapter."""


def module_names(config: ModelConfig) -> dict[str, str]:
    """Return the module of transformers of each weight, by the weight's canonical name without ``.weight``. Experts
    have none of their own."""
    found = {
        name.removesuffix(".weight"): place.tensor.removesuffix(".weight")
        for name, place in places(config).items()
        if name.endswith(".weight") and not place.experts and not place.stacked
    }
    if config.tied_embeddings:
        found["head"] = "lm_head"
    return found


# ---- in


def read_adapter(directory: Path, config: ModelConfig, *, skips_score: bool = False) -> StoredAdapter:
    """Return an adapter for a model of this configuration, which is ``adapted_config``'s. ``skips_score``: ignore the
    head of an adapter for classification.

    Raises:
        ValueError: a file is missing or damaged, or holds what does not fit the model; the message names it.
    """
    settings = read_settings(directory)
    _, about = read_header(directory)
    path = directory / WEIGHTS
    try:
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}): copy or download it again") from None
    modules: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        factor = _FACTOR.fullmatch(name)
        if factor is not None:
            kind = factor["linear"] or (factor["embedding"] and f"embedding {factor['embedding']}") or "magnitude"
            modules.setdefault(factor["module"], {})[kind] = tensor
        elif (match := _WHOLE.fullmatch(name)) is not None and skips_score and match["module"] == SCORE:
            continue
        elif match is not None:
            whole[f"{match['module']}.{match[2]}"] = tensor
        else:
            raise ValueError(f"{path}: the tensor {name!r} is of a kind of adapter that is not supported")
    try:
        factors = _factors(modules, settings, config, _blocks(about))
        replaced = _replaced(whole, config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not factors and not replaced:
        raise ValueError(f"{path} holds no adapter")
    return StoredAdapter(settings, factors, replaced)


def _blocks(about: Mapping[str, Any]) -> dict[str, list[int]]:
    found = json.loads(about.get(BLOCKS, "{}"))
    lists = found.values() if isinstance(found, dict) else [None]
    if not all(isinstance(ranks, list) and all(isinstance(r, int) and r >= 0 for r in ranks) for ranks in lists):
        raise ValueError(f"its metadata say {found!r:.60} of {BLOCKS}, and that is a list of ranks for each module")
    blocks: dict[str, list[int]] = found
    return blocks


def modules_of(config: ModelConfig) -> dict[str, list[tuple[str, HFPlace]]]:
    """List the weights in each tensor of transformers, from its first row on: three for GPT-2's q, k and v."""
    found: dict[str, list[tuple[str, HFPlace]]] = {}
    for name, place in places(config).items():
        if not place.experts and not place.stacked:
            found.setdefault(place.tensor, []).append((name, place))
    if config.tied_embeddings:
        shape = weight_shapes(config)["embed.weight"]
        found["lm_head.weight"] = [("head.weight", HFPlace("lm_head.weight", shape))]
    return {tensor: sorted(members, key=lambda member: member[1].first) for tensor, members in found.items()}


def check_parts(adapted: Collection[str], saved: Collection[str], config: ModelConfig, *, dora: bool) -> None:
    """Check that an adapter of a model can be written.

    Args:
        adapted, saved: weights with factors and weights saved whole, by canonical name without ``.weight``.

    Raises:
        ValueError: of matrices that are one module in PEFT's layout some are saved whole, or have magnitudes, and
            others are not.
    """
    for tensor, members in modules_of(config).items():
        names = [name.removesuffix(".weight") for name, _ in members]
        for setting, given in (("lora.modules_to_save", saved), ("lora.targets, with DoRA,", adapted if dora else ())):
            there = [name for name in names if name in given]
            if there and len(there) < len(names):
                leaves = ", ".join(name.rpartition(".")[2] for name in names)
                raise ValueError(
                    f"{there[0]} is a part of {tensor}, and {setting} must name all parts of it or none: {leaves}"
                )


def _factors(
    modules: Mapping[str, Mapping[str, Tensor]],
    settings: PeftSettings,
    config: ModelConfig,
    blocks: Mapping[str, Sequence[int]],
) -> dict[str, LowRank]:
    places_of = modules_of(config)
    shapes = weight_shapes(config)
    shapes.setdefault("head.weight", shapes["embed.weight"])
    found: dict[str, LowRank] = {}
    for module, given in modules.items():
        if f"{module}.weight" not in places_of:
            if config.moe is not None and ".experts" in module:
                raise ValueError(
                    f"it has factors for experts ({module}), and experts have no adapters here: merge it into the "
                    "model with PEFT first (merge_and_unload), or train one without experts among its targets"
                )
            raise ValueError(f"the model has no module {module!r}: the adapter is of another model")
        embedding = "embedding A" in given
        a, b = (given.get("embedding B"), given.get("embedding A")) if embedding else (given.get("A"), given.get("B"))
        if a is None or b is None:
            raise ValueError(f"of {module!r} one of the two factors is missing")
        if embedding:  # [D, r] and [r, V] there
            a, b = a.mT.contiguous(), b.mT.contiguous()
        members = places_of[f"{module}.weight"]
        names = [name for name, _ in members]
        outputs = [shapes[name][0] for name in names]
        inputs = shapes[names[0]][1]
        magnitude = given.get("magnitude")
        fits = a.ndim == b.ndim == 2 and a.shape == (b.shape[1], inputs) and b.shape[0] == sum(outputs)
        if not fits or (magnitude is not None and magnitude.numel() != sum(outputs)):
            raise ValueError(
                f"the factors of {module!r} are {list(a.shape)} and {list(b.shape)}, beside a matrix of "
                f"[{sum(outputs)}, {inputs}]: the adapter is of another model"
            )
        if settings.dora and magnitude is None:
            raise ValueError(f"of {module!r} the magnitudes are missing that use_dora asks for")
        scale = settings.scale(module, a.shape[0])
        magnitudes = [None] * len(names) if magnitude is None else magnitude.reshape(-1).split(outputs)
        ranks = blocks.get(module, ())
        apart = len(ranks) == len(names) and sum(ranks) == a.shape[0]
        first = 0
        for number, ((name, place), rows, each) in enumerate(zip(members, b.split(outputs), magnitudes, strict=True)):
            order = torch.from_numpy(place.order(len(rows)))
            own = slice(first, first + ranks[number]) if apart else slice(None)
            first = own.stop
            if not apart or ranks[number]:
                magnitude = None if each is None else each[order]
                low = LowRank(a[own].contiguous(), rows[order][:, own].contiguous(), scale, magnitude)
                found[name.removesuffix(".weight")] = low
    return found


def _replaced(whole: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    places_of = modules_of(config)
    found: dict[str, Tensor] = {}
    for tensor, given in whole.items():
        if tensor not in places_of:
            raise ValueError(f"the model has no weight {tensor!r}: the adapter is of another model")
        first = places_of[tensor][0][1]
        if tuple(given.shape) != first.stored:
            raise ValueError(f"{tensor!r} is {list(given.shape)} and the model's {list(first.stored)}")
        values = given.t() if first.transposed else given
        for name, place in places_of[tensor]:
            part = values[place.rows]
            part = part[torch.from_numpy(place.order(len(part)))]
            if name != "head.weight" or not config.tied_embeddings:  # one table, as embed.weight
                found[name] = part.contiguous()
    return found


# ---- out


def write_adapter(
    directory: Path, adapter: StoredAdapter, config: ModelConfig, *, base: str, revision: str | None = None
) -> None:
    """Write an adapter of a model of this configuration into ``directory``, which exists.

    Args:
        base: origin from which PEFT loads the model: a directory or a hub id.
    """
    names, places_of, shapes = module_names(config), modules_of(config), weight_shapes(config)
    shapes.setdefault("head.weight", shapes["embed.weight"])
    joined: dict[str, LowRank] = {}
    ranks: dict[str, list[int]] = {}
    for module in dict.fromkeys(names[name] for name in adapter.factors):
        members = places_of[f"{module}.weight"]
        parts = [(adapter.factors.get(name.removesuffix(".weight")), place, shapes[name]) for name, place in members]
        joined[module] = _joined(parts)
        if len(parts) > 1:
            ranks[module] = [0 if low is None else low.a.shape[0] for low, _, _ in parts]
    tensors: dict[str, Tensor] = {}
    for module, low in joined.items():
        if module.endswith(("embed_tokens", "wte")):
            tensors |= {f"{module}.lora_embedding_A": low.b.mT, f"{module}.lora_embedding_B": low.a.mT}
        else:
            tensors |= {f"{module}.lora_A.weight": low.a, f"{module}.lora_B.weight": low.b}
        if low.magnitude is not None:
            tensors[f"{module}.lora_magnitude_vector"] = low.magnitude
    whole = _whole(adapter.replaced, config, set(joined))
    tensors |= whole
    one_table = config.tied_embeddings and not {"embed", "head"} & adapter.factors.keys()
    metadata = {"format": "pt"} | ({TIED: "true"} if one_table else {}) | ({BLOCKS: json.dumps(ranks)} if ranks else {})
    kept = {f"{PREFIX}{name}": tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    write_with_metadata(kept, directory / WEIGHTS, metadata)
    saved = sorted({name.rpartition(".")[0] for name in whole if ".base_layer." not in name})
    values = _settings(adapter.settings, joined, saved, list(names.values()))
    values |= {"base_model_name_or_path": base, "revision": revision}
    (directory / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _joined(parts: Sequence[tuple[LowRank | None, HFPlace, tuple[int, ...]]]) -> LowRank:
    """Join the factors of matrices that are one module, each with its place and shape: A's concatenated, B's block by
    block, rows of zeros if a matrix has none."""
    there = [low for low, _, _ in parts if low is not None]
    blocks = [_in_file(low.b, place) if low is not None else torch.zeros(shape[0], 0) for low, place, shape in parts]
    magnitudes = [_in_file(low.magnitude, place) for low, place, _ in parts if low and low.magnitude is not None]
    return LowRank(
        torch.cat([low.a for low in there]),
        torch.block_diag(*blocks),
        there[0].scale,
        torch.cat(magnitudes) if magnitudes else None,
    )


def _in_file(rows: Tensor, place: HFPlace) -> Tensor:
    """Reorder values that belong to the rows of a weight to the order of the file."""
    return rows[torch.from_numpy(np.argsort(place.order(len(rows))))]


def _whole(replaced: Mapping[str, Tensor], config: ModelConfig, adapted: set[str]) -> dict[str, Tensor]:
    """Collect fully trained weights of the adapter, by the names of transformers. A module that has factors too keeps
    its weight as that of its base layer."""
    found: dict[str, Tensor] = {}
    for tensor, members in modules_of(config).items():
        given = [_in_file(replaced[name], place) for name, place in members if name in replaced]
        if not given:
            continue
        if len(given) < len(members):
            raise ValueError(f"{tensor} is one tensor in PEFT's layout: save all parts of it, or none")
        values = torch.cat(given)
        found[tensor] = values.t() if members[0][1].transposed else values
    if config.tied_embeddings and "embed.weight" in replaced:
        found["lm_head.weight"] = replaced["embed.weight"]
    return {
        f"{module}.base_layer.{leaf}" if (module := name.rpartition(".")[0]) in adapted else name: tensor
        for name, tensor in found.items()
        for leaf in [name.rpartition(".")[2]]
    }


def _settings(
    settings: PeftSettings, joined: Mapping[str, LowRank], saved: list[str], modules: list[str]
) -> dict[str, Any]:
    """Build ``adapter_config.json``, with patterns for modules whose rank or scale is not the common one."""
    ranks = {module: low.a.shape[0] for module, low in joined.items()}
    alphas = {
        module: low.scale * (math.sqrt(ranks[module]) if settings.rank_stabilized else ranks[module])
        for module, low in joined.items()
    }
    rank, alpha = settings.rank, settings.alpha
    return {
        "peft_type": "LORA",
        "peft_version": VERSION,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _short(alpha),
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rank_stabilized,
        "use_dora": settings.dora,
        "target_modules": _targets(set(joined), modules),
        "modules_to_save": saved or None,
        "rank_pattern": {re.escape(module): own for module, own in ranks.items() if own != rank},
        "alpha_pattern": {
            re.escape(module): _short(own)
            for module, own in alphas.items()
            if not math.isclose(own, alpha, rel_tol=1e-6)
        },
        "bias": "none",
        "fan_in_fan_out": any(".attn.c_attn" in module or ".c_proj" in module for module in joined),
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
    }


def _targets(adapted: set[str], modules: list[str]) -> list[str]:
    """Return the last parts of the modules' names where all modules of that name are meant, else the whole names."""
    by_leaf: dict[str, set[str]] = {}
    for module in modules:
        by_leaf.setdefault(module.rpartition(".")[2], set()).add(module)
    found: list[str] = []
    for leaf, every in by_leaf.items():
        own = every & adapted
        found += [leaf] if own == every else sorted(own)
    return found


def _short(value: float) -> int | float:
    return int(value) if value == int(value) else value
