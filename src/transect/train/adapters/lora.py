r"""Adapters on a model: attach them, and read and write their files. Only the added weights are trained.

``models/weights/adapted.py`` is a weight with an adapter. ``trained_adapter`` is what a checkpoint keeps.
``plain_state`` merges: it gives the weights of the plain model that computes the same.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...checkpoints.adapter import StoredAdapter
from ...checkpoints.adapter_peft import check_parts, module_names
from ...checkpoints.peft_config import PeftSettings, adapter_folder, read_settings
from ...models.decoder import Decoder
from ...models.weights.adapted import Adapted
from ...models.weights.adapted_embedding import AdaptedEmbedding
from ...models.weights.adapted_product import cpu_kernels
from ...models.weights.dropout import Dropout, Moment
from ...spec.model import ModelConfig
from ...spec.weights import linear_shapes
from ..config.adapters import MATRICES, LoRAConfig

log = logging.getLogger(__name__)


def selected(entries: Iterable[str], names: Iterable[str], config: ModelConfig, setting: str) -> dict[str, int]:
    """Find the weights that the entries of a setting name.

    Args:
        names: canonical, without ``.weight``.
        setting: for the message.

    Returns:
        Name to the place of the first entry that means it.

    Raises:
        ValueError: an entry means none.
    """
    modules = module_names(config)
    found: dict[str, int] = {}
    names = list(names)
    for place, entry in enumerate(entries):
        if entry == "all-linear":
            own = [name for name in names if name.startswith("layers.") and "norm" not in name]
        else:
            own = [name for name in names if _means(entry, name) or _means(entry, modules[name])]
        if not own:
            known = sorted({name.rpartition(".")[2] for name in names})
            if config.moe is not None and re.search(r"\b(gate|up|down|experts\w*|w[123])(_proj)?$", entry):
                raise ValueError(
                    f"lora.{setting} names {entry}, and experts have no adapters: leave it out, or set it to some of "
                    f"{', '.join(known)}"
                )
            raise ValueError(
                f"the model has nothing called {entry}: correct lora.{setting}, which knows {', '.join(known)} here"
            )
        for name in own:
            found.setdefault(name, place)
    return found


def _means(entry: str, name: str) -> bool:
    """Return True if ``entry`` is the name, ends it, or is a regular expression for it."""
    return name == entry or name.endswith(f".{entry}") or re.fullmatch(entry, name) is not None


def matrices(config: ModelConfig) -> list[str]:
    """List the matrices that can have an adapter: those of the layers except experts, the embedding and the head."""
    inner = [f"layers.{layer}.{name}" for layer in range(config.n_layers) for name in linear_shapes(config, layer)]
    modules = module_names(config)
    return [*(name for name in inner if name in modules), "embed", "head"]


def adapted(lora: LoRAConfig, config: ModelConfig) -> dict[str, int]:
    """List the matrices that have an adapter, as ``selected``.

    Default targets that a model lacks are ignored: GPT-2 has no gate, and experts have no adapters.

    Raises:
        ValueError: targets that were chosen name what the model does not have.
    """
    names = matrices(config)
    targets = lora.targets
    if targets == MATRICES:
        there = {name.rpartition(".")[2] for name in names}
        targets = tuple(name for name in targets if name in there)
    return selected(targets, names, config, "targets")


def saved_weights(lora: LoRAConfig, config: ModelConfig) -> list[str]:
    """List the weights that ``modules_to_save`` names, by canonical name without ``.weight``. Of tied tables, ``embed``
    represents both."""
    if not lora.modules_to_save:
        return []
    found = selected(lora.modules_to_save, module_names(config), config, "modules_to_save")
    if config.tied_embeddings and "head" in found:
        found = {("embed" if name == "head" else name): place for name, place in found.items()}
    return list(found)


def settled(lora: LoRAConfig, new_tokens: Sequence[str] = ()) -> LoRAConfig:
    """Return the settings with rank, alpha and kind of the adapter that the run starts from. With new tokens both
    tables are trained in full.

    Raises:
        ValueError: there is no such adapter.
    """
    if new_tokens:
        lora = dataclasses.replace(lora, modules_to_save=(*lora.modules_to_save, "embed", "head"))
    if not lora.start:
        return lora
    settings = read_settings(adapter_folder(lora.start))
    return dataclasses.replace(
        lora,
        rank=settings.rank,
        alpha=settings.alpha,
        rank_stabilized=settings.rank_stabilized,
        dora=settings.dora,
    )


def attach(
    model: Decoder,
    config: LoRAConfig,
    *,
    seed: int,
    start: StoredAdapter | None = None,
    moment: Moment | None = None,
) -> list[str]:
    """Freeze the model and put an adapter on each matrix that ``config.targets`` names, or that ``start`` has one for.

    Args:
        start: begin with these values; what it replaces is in the model already.
        moment: the run's place, for dropout.

    Returns:
        The names of the matrices that have one.

    Raises:
        ValueError: a target is not in the model, or cannot have such an adapter.
    """
    model.requires_grad_(False)
    native = cpu_kernels(model.norm.weight)
    if start is not None:
        found = dict.fromkeys(start.factors, 0)
    else:
        found = adapted(config, model.config)
        there = {name.rpartition(".")[2] for name in found}
        if config.targets == MATRICES and len(there) < len(MATRICES):
            missing = ", ".join(name for name in MATRICES if name not in there)
            where = "outside its experts, which have no adapters" if model.config.moe is not None else "at all"
            log.info("the model has no %s %s: adapters go to %s", missing, where, ", ".join(sorted(there)))
    names = sorted(found, key=lambda name: _place(name, found[name]))
    weights = dict(model.weights())
    moment = moment or Moment()
    for number, name in enumerate(names):
        key = seed * 1_000_003 + number
        low = None if start is None else start.factors[name]
        rank = config.rank if low is None else low.a.shape[0]
        made: Adapted | AdaptedEmbedding
        if name == "embed":
            if config.dora:
                raise ValueError("DoRA is for matrices: leave embed_tokens out of lora.targets, or set dora to false")
            made = AdaptedEmbedding(model.embed, rank, config.alpha, seed=key, rank_stabilized=config.rank_stabilized)
            model.embed = made  # type: ignore[assignment]
        else:
            made = Adapted(
                weights[name],
                rank,
                config.alpha,
                seed=key,
                native=native,
                rank_stabilized=config.rank_stabilized,
                dora=config.dora,
                dropout=Dropout(config.dropout, key, moment) if config.dropout else None,
            )
            model.replace(name, made)
        if low is not None:
            made.take(low)
    saved = saved_weights(config, model.config)
    saved = list(dict.fromkeys([*saved, *({} if start is None else _modules(start.replaced))]))
    check_parts(found, saved, model.config, dora=config.dora)
    for name in saved:
        if name in found:
            raise ValueError(f"{name} is in lora.targets and in lora.modules_to_save: take it out of one of them")
        try:
            model.get_submodule(name).requires_grad_(True)
        except AttributeError:
            raise ValueError(f"the model has no {name}: correct lora.modules_to_save") from None
    return names


def _modules(replaced: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[0] for name in replaced))


def _place(name: str, target: int) -> tuple[int, str, int]:
    """Return the sort key of an adapter: by layer, attention before MLP, then in the order of the targets. Its seed
    follows from the order."""
    if "." not in name:
        return 10**9, name, target
    _, layer, where, _ = name.split(".")
    return int(layer), where, target


@torch.no_grad()
def trained_adapter(model: Decoder, config: LoRAConfig) -> StoredAdapter:
    """Copy the adapters of a model, and all else that is trained, to the CPU."""
    factors = {name: weight.factors for name, weight in model.weights() if isinstance(weight, Adapted)}
    if isinstance(model.embed, AdaptedEmbedding):
        factors["embed"] = model.embed.factors
    copied = {
        name: dataclasses.replace(
            low,
            a=low.a.to("cpu", copy=True),
            b=low.b.to("cpu", copy=True),
            magnitude=None if low.magnitude is None else low.magnitude.to("cpu", copy=True),
        )
        for name, low in factors.items()
    }
    own = {f"{name}.{leaf}" for name in factors for leaf in ("a", "b", "m")}
    replaced = {
        name: parameter.detach().to("cpu", copy=True)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in own
    }
    settings = PeftSettings(config.rank, config.alpha, config.rank_stabilized, config.dora, config.dropout)
    return StoredAdapter(settings, copied, replaced)


@torch.no_grad()
def take_adapter(model: Decoder, adapter: StoredAdapter) -> None:
    """Load the values of the adapters, and of all else that the model trains.

    Raises:
        ValueError: the adapter has none for one of them.
    """
    for name, weight in (*model.weights(), ("embed", model.embed)):
        if isinstance(weight, (Adapted, AdaptedEmbedding)):
            low = adapter.factors.get(name)
            if low is None or low.a.shape != weight.a.shape:
                raise ValueError(f"the checkpoint has no adapter for {name} of rank {weight.a.shape[0]}")
            if isinstance(weight, Adapted) and weight.m is not None and low.magnitude is not None:
                weight.m.copy_(low.magnitude)
                low = dataclasses.replace(low, magnitude=None)
            weight.take(low)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.endswith((".a", ".b", ".m")):
            if name not in adapter.replaced:
                raise ValueError(f"the checkpoint has no weight {name}")
            parameter.copy_(adapter.replaced[name])


@torch.no_grad()
def plain_state(model: Decoder) -> dict[str, Tensor]:
    """Return the weights of the plain model, by canonical name, copied to the CPU. Packed weights are dequantized,
    adapters merged. With an adapter on one of two tied tables, both are included."""
    state: dict[str, Tensor] = {}
    replaced: list[str] = []
    for name, weight in model.weights():
        state[f"{name}.weight"] = weight.dense().detach().to("cpu", copy=True)
        if weight.bias is not None:
            state[f"{name}.bias"] = weight.bias.detach().to("cpu", copy=True)
        replaced.append(f"{name}.")
    if isinstance(model.embed, AdaptedEmbedding):
        state["embed.weight"] = model.embed.dense().to("cpu", copy=True)
        replaced.append("embed.")
    others = model.state_dict()
    for name, tensor in others.items():
        if not name.startswith(tuple(replaced)):
            state[name] = tensor.detach().to("cpu", copy=True)
    return state
