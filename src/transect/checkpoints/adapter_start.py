"""Adapters whose start PEFT derived from the base model (PiSSA, OLoRA), rewritten as plain LoRA.

PEFT sets such an adapter's first factors from the matrix W itself and trains beside what is left of it. Its file holds
the trained factors alone, so W' is found by computing the first factors A0, B0 again:

    W' = (W - s B0 A0) + s B A = W + s [B, -B0] [A; A0]

    PiSSA   s B0 A0 is the best approximation of W of rank r, from its SVD (Meng et al. 2024, arXiv:2404.02948)
    OLoRA   B0 A0 is the first r columns of Q times the first r rows of R, W = Q R (Büyükakyüz 2024, arXiv:2406.01775)

Shapes: O outputs, I inputs, r the rank.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from ..models.stored import StoredWeights
from ..models.weights.low_rank import LowRank
from ..spec.model import ModelConfig
from .adapter import StoredAdapter
from .adapter_peft import modules_of
from .peft_config import PISSA

log = logging.getLogger(__name__)


@torch.no_grad()
def as_plain_lora(adapter: StoredAdapter, weights: StoredWeights, config: ModelConfig) -> StoredAdapter:
    """Return the adapter as one over the base's own weights; the rank of adapters that started from the base doubles.

    Args:
        weights: of the base.
        config: of the model with the adapter.

    Raises:
        ValueError: the base's matrices are quantized or tied here, so the start cannot be computed.
    """
    kind = adapter.settings.start
    if not kind:
        return adapter
    if "head" in adapter.factors and config.tied_embeddings:
        raise ValueError(f"{kind} on a head that is tied to the embedding is not supported: merge it with PEFT first")
    names = {
        name: tuple(member.removesuffix(".weight") for member, _ in members)
        for tensor, members in modules_of(config).items()
        for name in [tensor.removesuffix(".weight")]
    }
    mine = {
        module: parts
        for module, parts in names.items()
        if parts[0] in adapter.factors and f"{parts[0]}.weight" not in adapter.replaced
    }
    log.info("the adapter starts from the base (%s): decomposing %d of its matrices again", kind, len(mine))
    owner = {part: module for module, parts in mine.items() for part in parts}
    factors = dict(adapter.factors)
    read: dict[str, dict[str, Tensor]] = {}
    for name, stored in weights:
        part = name.removesuffix(".weight")
        if part not in owner or not name.endswith(".weight"):
            continue
        values = stored.read()
        if stored.layout is not None or not isinstance(values, Tensor):
            raise ValueError(
                f"the adapter starts from the base's own numbers ({kind}), and {name} is quantized here: give the "
                "model that it was trained on, or merge the adapter with PEFT (merge_and_unload)"
            )
        module = owner[part]
        found = read.setdefault(module, {})
        found[part] = values.float()
        parts = mine[module]
        if len(found) == len(parts):
            low = adapter.factors[parts[0]]
            a, b = _start(torch.cat([found[each] for each in parts]), low.a.shape[0], low.scale, kind)
            for each, rows in zip(parts, b.split([len(found[each]) for each in parts]), strict=True):
                factors[each] = _over_the_base(adapter.factors[each], a, rows)
            del read[module]
    return replace(adapter, factors=factors, settings=replace(adapter.settings, start=""))


def _start(w_OI: Tensor, rank: int, scale: float, kind: str) -> tuple[Tensor, Tensor]:
    """Return the factors ``a [r, I]``, ``b [O, r]`` with which PEFT began."""
    if kind == PISSA:
        u, s, v = torch.linalg.svd(w_OI, full_matrices=False)
        root = (s[:rank] / scale).sqrt()
        return root[:, None] * v[:rank], u[:, :rank] * root
    q, r = torch.linalg.qr(w_OI)
    return r[:rank], q[:, :rank]


def _over_the_base(low: LowRank, a: Tensor, b: Tensor) -> LowRank:
    return replace(low, a=torch.cat((low.a.float(), a)), b=torch.cat((low.b.float(), -b), 1))
