"""Quantization of a model for ``transect quantize``, by rounding to the nearest value or by calibration on a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...checkpoints.calibration import importance
from ...checkpoints.gptq import round_model
from ...checkpoints.hf_out import save_hf
from ...checkpoints.kv_scales import measured_scales
from ...checkpoints.load import allocated, fill
from ...checkpoints.quantized_out import file_format, group_for
from ...models.decoder import Decoder
from ...spec.numbers.gguf import MATRIX_TYPES, MIXTURES, block_type
from ...spec.numbers.registry import file_formats, file_uses, listed
from ...text.export import export_tokenizer
from ...text.tokenizer import Tokenizer
from .write import Opened, export_dtype, export_gguf, export_model, merged

WINDOW = 512
TOKENS = 16384


@dataclass(frozen=True, slots=True)
class Calibration:
    """The text that rounding is calibrated with, the first ``tokens`` of it, in windows of ``window`` tokens."""

    text: Path
    tokens: int = TOKENS
    window: int = WINDOW

    def __post_init__(self) -> None:
        if self.window < 2 or self.tokens < self.window:
            raise ValueError(
                f"calibration needs windows of 2 tokens or more, and at least one of them, not {self.tokens} tokens in "
                f"windows of {self.window}: give {max(2, self.window)} tokens or more"
            )


def quantize_model(
    found: Opened,
    output: Path,
    name: str,
    calibration: Calibration | None = None,
    group: int | None = None,
    kv_scales: bool = False,
) -> None:
    """Write a model in a format: a directory (``file_formats``), or a GGUF file (a type of those).

    Args:
        name: of the format, in capitals or not.
        calibration: of 4 bits in safetensors, and of the GGUF types of 4 to 6 bits; None to round to the nearest.
        group: numbers of a row that share a scale, in 4 bits in safetensors; None for the most that fit.
        kv_scales: write a scale for the keys and one for the values of each key head too, with which those of the
            calibration's text fit into a cache in fp8; for formats with ``kv_scales``.

    Raises:
        ValueError: an unknown format, a calibration or a group that it has no use for, a text that cannot be read, a
            matrix that the format cannot hold, or ``output`` cannot be written.
    """
    name = name.lower()
    known = (*file_formats(), *(each.lower() for each in MATRIX_TYPES))
    if name not in known:
        raise ValueError(f"--format {name} cannot be written; choose one of {', '.join(known)}")
    uses = file_uses()
    use = uses.get(name)
    if group is not None and not (use and use.grouped):
        grouped = listed((each for each in uses if uses[each].grouped), "and")
        raise ValueError(f"a group size is for {grouped}, not {name}: leave it out")
    if kv_scales and (calibration is None or not (use and use.kv_scales)):
        with_scales = listed((each for each in uses if uses[each].kv_scales), "and")
        raise ValueError(
            f"scales of the KV cache are for {with_scales}, and need a text to calibrate with: choose one of these and "
            "give --calibrate FILE, or leave --kv-scales out"
        )
    if calibration is not None and not takes_calibration(name) and not kv_scales:
        raise ValueError(f"{name} rounds to the nearest and takes no calibration: leave --calibrate out")
    if use is None:
        counts = None if calibration is None else _importance(found, calibration)
        export_gguf(found, output, name, counts)
        return
    cached = measured_scales(_model(found), windows_of(found, calibration)) if calibration and kv_scales else None
    if calibration is None or not takes_calibration(name):
        export_model(found, output, quantization=name, group=group, kv_scales=cached)
    else:
        _calibrated(found, output, name, calibration, group, cached)


def takes_calibration(name: str) -> bool:
    """Return True if calibration on a text changes a format's output."""
    form = file_formats().get(name)
    if form is not None:
        return form.file is not None and form.file.grouped
    mixture = MIXTURES.get(name.upper())
    return name.upper() in MATRIX_TYPES and block_type(mixture.most if mixture else name.upper()).searched


def _calibrated(
    found: Opened, output: Path, name: str, calibration: Calibration, group: int | None, cached: torch.Tensor | None
) -> None:
    texts = windows_of(found, calibration)
    model = _model(found)
    group = group_for({key: weight.in_features for key, weight in model.weights() if key != "head"}, group)
    _, use = file_format(name)
    grids = round_model(model, texts, group, getattr(torch, use.scale_dtype), symmetric=use.symmetric)
    wanted = export_dtype(found)
    config = found.source.config
    state = {
        key: tensor if key in grids else tensor.to(wanted)
        for key, tensor in model.state_dict().items()
        if not (key == "head.weight" and config.tied_embeddings)
    }
    save_hf(state, config, output, quantization=name, grids=grids, group=group, dtype=wanted, kv_scales=cached)
    export_tokenizer(found.source, output)


def _importance(found: Opened, calibration: Calibration) -> Mapping[str, np.ndarray]:
    texts = windows_of(found, calibration)
    return {name: each.numpy() for name, each in importance(_model(found), texts).items()}


def _model(found: Opened) -> Decoder:
    """Load the model in float32 on plain torch."""
    model = allocated(Decoder(found.source.config, "meta", torch.float32), "cpu", join=False)
    return fill(model, merged(found))


def windows_of(found: Opened, calibration: Calibration) -> list[list[int]]:
    """Tokenize the text of a calibration, and cut it into windows; each begins with the model's beginning-of-text
    token.

    Raises:
        ValueError: the text cannot be read, or the model has no tokenizer.
    """
    tokenizer = Tokenizer.from_source(found.source)
    if not isinstance(tokenizer, Tokenizer):
        raise ValueError("this model brings no tokenizer, so it cannot read a text: quantize without --calibrate")
    try:
        text = calibration.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {calibration.text}: {error}") from None
    first = tokenizer.encode("", add_special_tokens=True)[:1]
    first = first if first == [tokenizer.bos_token_id] else []
    window = min(calibration.window, found.source.config.max_position)
    step = window - len(first)
    tokens = tokenizer.encode(text)[: calibration.tokens // window * step]
    if len(tokens) < 2:
        raise ValueError(f"{calibration.text} is too short to calibrate with: give a text of some thousand words")
    return [first + tokens[start : start + step] for start in range(0, len(tokens), step)]
