"""Adapters, and the base under them; under our names and PEFT's."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...checkpoints.peft_config import MATRICES
from ...spec.numbers.registry import base_formats, listed
from .parse import positive

TABLES = ("embed", "head")
PEFT_NAMES = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "self_attn", "mlp", "c_attn", "c_proj",
    "c_fc", "qkv_proj", "gate_up_proj", "embed_tokens", "lm_head", "wte", "all-linear",
)  # fmt: skip
NORMS = ("norm", "input_layernorm", "post_attention_layernorm", "attention_norm", "mlp_norm", "ln_f", "ln_1", "ln_2")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): W x + s B A x with W frozen. PEFT's names of these settings
    are accepted too.

    Attributes:
        rank: rank of an adapter: rows of A and columns of B.
        alpha: s is alpha / rank.
        rank_stabilized: s is alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732).
        dora: train a magnitude per output in addition to the direction (Liu et al. 2024, arXiv:2402.09353).
        dropout: share of an adapter's inputs that are zeroed in a pass with a gradient.
        targets: matrices with an adapter, by our names (q, k, v, o, gate, up, down, embed, head), PEFT's (q_proj, ...,
            embed_tokens, lm_head), ``all-linear`` (all matrices of the layers), or regular expressions for whole names
            (``model.layers.0.self_attn.q_proj``); by default those of the seven that the model has outside its experts.
        modules_to_save: modules trained in full and saved with the adapter, such as embed_tokens, lm_head, norm.
        start: directory of an adapter in PEFT's layout, or of a run, to continue. Its rank, alpha, targets and kind
            replace these settings.
        base_format: format of the frozen base of ``qlora``: ``int4`` (groups with a scale and a zero) or ``nf4`` (the
            4-bit NormalFloat with double quantization, as in bitsandbytes).
        group: numbers per scale in an ``int4`` base.
    """

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {
        "r": "rank",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "use_rslora": "rank_stabilized",
        "use_dora": "dora",
        "target_modules": "targets",
    }

    rank: int = 16
    alpha: float = 32.0
    rank_stabilized: bool = False
    dora: bool = False
    dropout: float = 0.0
    targets: tuple[str, ...] = MATRICES
    modules_to_save: tuple[str, ...] = ()
    start: str = ""
    base_format: str = "int4"
    group: int = 64

    def __post_init__(self) -> None:
        positive(self, "rank", "group")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora.alpha must be greater than 0, not {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout is a share, at least 0 and less than 1, not {self.dropout}")
        if not self.targets:
            raise ValueError(f"lora.targets must be some of {', '.join((*MATRICES, *TABLES))}, not none")
        if self.base_format not in base_formats():
            raise ValueError(f"lora.base_format must be {listed(base_formats())}, not {self.base_format!r}")
        _check_names("targets", self.targets, (*MATRICES, *TABLES), PEFT_NAMES)
        _check_names("modules_to_save", self.modules_to_save, (*TABLES, "norm"), (*MATRICES, *PEFT_NAMES, *NORMS))

    def refuses_merging(self) -> bool:
        """Return True if merged layers cannot compute such adapters; ``Adapted.refuses_merging`` gives the reason."""
        return self.dora or self.dropout > 0


def _check_names(setting: str, given: tuple[str, ...], own: tuple[str, ...], others: tuple[str, ...]) -> None:
    for entry in given:
        if entry in own or entry in others:
            continue
        if re.fullmatch(r"[\w-]+", entry):  # neither a pattern nor a path
            near = difflib.get_close_matches(entry, (*own, *others), 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"lora.{setting} must be some of {', '.join(own)} or PEFT's names, not {entry}{hint}")
        try:
            re.compile(entry)
        except re.error as error:
            raise ValueError(f"lora.{setting}: {entry!r} is not a regular expression ({error})") from None
