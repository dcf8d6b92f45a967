"""Read the description of an adapter in PEFT's layout, without its tensors (no torch).

``adapter_config.json`` has the settings, and the header of ``adapter_model.safetensors`` the names and shapes. Settings
have the names that PEFT gives them (https://huggingface.co/docs/peft, ``LoraConfig``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..spec.model import ModelConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
TIED = "tied_embeddings"
"""Metadata key of the weights' file: embedding and head, which PEFT keeps as two, are one table."""
MAX_HEADER = 100 * 2**20
EMBED = re.compile(r"(.*\.)?(embed_tokens|wte)\.(base_layer\.|modules_to_save\.(\w+\.)?)?weight")
HEAD = re.compile(r"(.*\.)?lm_head\.(base_layer\.|modules_to_save\.(\w+\.)?)?weight")
TABLES = re.compile(r"(.*\.)?(embed_tokens|wte|lm_head)\.")

OTHER_MATH = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias", "monteclora_config",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip
"""Settings that change what an adapter computes, and that are not supported."""
PISSA, OLORA = "pissa", "olora"
"""Values of ``init_lora_weights`` with which PEFT derives an adapter's start from the base, by a decomposition that can
be repeated (``adapter_start.py``)."""
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
"""Last parts of the names of a layer's matrices, which an adapter may change."""
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "mica", "orthogonal")
"""Values of ``init_lora_weights`` with which PEFT leaves the base unchanged."""


@dataclass(frozen=True, slots=True)
class PeftSettings:
    """An adapter's settings that determine its computation.

    ``alpha_pattern`` gives modules an alpha of their own, by regular expressions for the end of their names. Ranks
    show in the shapes. ``start``: ``PISSA`` or ``OLORA`` if the factors are beside what is left of the base without
    their first values; empty if they are beside the base.
    """

    rank: int = 8
    alpha: float = 8.0
    rank_stabilized: bool = False
    dora: bool = False
    dropout: float = 0.0
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    base: str | None = None
    start: str = ""

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of ``B A`` in a module: alpha / rank, or alpha / sqrt(rank) if rank-stabilised
        (Kalajdzievski 2023, arXiv:2312.03732)."""
        alpha = self.alpha
        for pattern, value in self.alpha_pattern:
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                alpha = value
                break
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


def is_adapter(directory: Path) -> bool:
    """Return True if a directory holds an adapter and no model."""
    return (directory / CONFIG).is_file() and not (directory / "config.json").is_file()


def adapter_folder(name: str) -> Path:
    """Return the directory with an adapter: this one, or the last checkpoint of this run.

    Raises:
        ValueError: neither has one.
    """
    path = Path(name).expanduser()
    for folder in (path, path / "last"):
        if is_adapter(folder):
            return folder.resolve()
    raise ValueError(f"{name} has no adapter in PEFT's layout: give a directory with an adapter_config.json, or a run")


def target_names(targets: Collection[str]) -> tuple[str, ...]:
    """Return names of ``MATRICES`` from a setting, which may be PEFT's (``q_proj``); all of them if it is empty.

    Raises:
        ValueError: a name is of no such matrix.
    """
    names = tuple(dict.fromkeys(name.removesuffix("_proj") for name in targets))
    unknown = [name for name in names if name not in MATRICES]
    if unknown:
        raise ValueError(f"lora_target_modules has no {unknown[0]!r}: choose among {', '.join(MATRICES)}")
    return names or MATRICES


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A directory with an adapter, and the digest of its files: another adapter under the same name is not the same."""

    path: Path
    id: str
    """BLAKE2b-256 of settings and weights, as 64 hexadecimal digits."""

    @classmethod
    def of(cls, directory: Path) -> AdapterFiles:
        """Read the files of a directory, which takes a tenth of a second for 100 MB.

        Raises:
            ValueError: a file is missing.
        """
        digest = blake2b(digest_size=32)
        for name in (CONFIG, WEIGHTS):
            try:
                with (directory / name).open("rb") as file:
                    while piece := file.read(2**24):
                        digest.update(piece)
            except OSError as error:
                raise ValueError(f"the adapter {directory} has no {name} that can be read ({error.strerror})") from None
            digest.update(b"\0")
        return cls(directory, digest.hexdigest())


def read_settings(directory: Path) -> PeftSettings:
    """Return the settings of an adapter.

    Raises:
        ValueError: no such file, one that is damaged, or an adapter of a kind that is not supported; the message says
            which.
    """
    path = directory / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError:
        raise ValueError(f"{directory} is not an adapter in PEFT's layout: it has no {CONFIG}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from None
    kind = values.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{path}: adapters of the type {kind!r} are not supported; supported is LORA")
    strange = [name for name in OTHER_MATH if values.get(name)]
    if strange or values.get("bias", "none") != "none":
        name = strange[0] if strange else "bias"
        raise ValueError(f"{path}: {name} = {json.dumps(values[name])[:80]} is not supported: train without it")
    base = values.get("base_model_name_or_path")
    start = values.get("init_lora_weights", True)
    start = start.lower() if isinstance(start, str) else start
    if start not in (PISSA, OLORA, *PLAIN_STARTS):
        raise ValueError(
            f"{path}: init_lora_weights = {json.dumps(start)[:80]} starts from another base than the model, which "
            "the files do not have: convert the adapter with PEFT (save_pretrained with "
            "path_initial_model_for_weight_conversion) or merge it into its model there (merge_and_unload)"
        )
    try:
        if not isinstance(base, str | None):
            raise TypeError(f"base_model_name_or_path is {base!r:.60}")
        return PeftSettings(
            rank=int(values.get("r", 8)),
            alpha=float(values.get("lora_alpha", 8)),
            rank_stabilized=bool(values.get("use_rslora", False)),
            dora=bool(values.get("use_dora", False)),
            dropout=float(values.get("lora_dropout") or 0.0),
            alpha_pattern=tuple((str(k), float(v)) for k, v in (values.get("alpha_pattern") or {}).items()),
            base=base,
            start=start if start in (PISSA, OLORA) else "",
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} has a setting of the wrong type ({error})") from None


def read_header(directory: Path) -> tuple[dict[str, tuple[int, ...]], Mapping[str, Any]]:
    """Read the shapes by name, without PEFT's prefix, and the file's metadata.

    Raises:
        ValueError: the weights are missing, damaged, or a pickle.
    """
    path = directory / WEIGHTS
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= MAX_HEADER:
                raise ValueError("it is not a safetensors file")
            header = json.loads(file.read(size))
        about = header.pop("__metadata__", None) or {}
        return {name.removeprefix(PREFIX): tuple(entry["shape"]) for name, entry in header.items()}, about
    except FileNotFoundError:
        pickled = (directory / "adapter_model.bin").is_file()
        hint = "; its adapter_model.bin is a pickle, which is not read: save it again as safetensors"
        raise ValueError(f"{directory} has no {WEIGHTS}{hint if pickled else ''}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): copy or download it again") from None


def adapted_config(base: ModelConfig, directory: Path) -> ModelConfig:
    """Return the configuration of a model with this adapter: its tables may have more rows than the base's, and tied
    tables of the base may be separate.

    Raises:
        ValueError: see ``read_header``.
    """
    shapes, about = read_header(directory)
    embeds = [shape for name, shape in shapes.items() if EMBED.fullmatch(name)]
    heads = [shape for name, shape in shapes.items() if HEAD.fullmatch(name)]
    touched = [name for name in shapes if TABLES.match(name)]
    apart = about.get(TIED) != "true" or any("lora_" in name for name in touched)
    tied = base.tied_embeddings and not (touched and apart)
    rows = {shape[0] for shape in (*embeds, *heads)} or {base.vocab_size}
    if len(rows) > 1 or (rows != {base.vocab_size} and not tied and not (embeds and heads)):
        raise ValueError(
            f"{directory}: embedding and head have {' and '.join(map(str, sorted({*rows, base.vocab_size})))} rows: "
            "save both after the vocabulary has grown"
        )
    return replace(base, vocab_size=rows.pop(), tied_embeddings=tied)
