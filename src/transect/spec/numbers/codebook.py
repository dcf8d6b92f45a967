"""Formats made of a codebook alone: rounding, checkpoints and accounts of memory follow from their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..fields import Fields
from .number_format import Codebook, FileUse, Method, NumberFormat, Rounding


def codebook_format(
    name: str, values: tuple[float, ...], group: int, *, summary: str, accuracy: str = "", scale_dtype: str = "float16"
) -> NumberFormat:
    """Build a format whose numbers are ``scale * values[code]`` with a scale for each ``group`` neighbours of a row.

    Matrices are held so by a GPU and by plain torch, which rebuild them for each product; the C++ kernels do not take
    them. Checkpoints are for this program alone.

    Raises:
        ValueError: values that are not codebook.
    """
    codebook = Codebook(values, group, scale_dtype)

    def settings(_: int | None) -> dict[str, Any]:
        return {
            "quant_method": CODEBOOK.name,
            "format": name,
            "values": list(values),
            "group_size": group,
            "scale_dtype": scale_dtype,
        }

    return NumberFormat(
        name=name,
        summary=summary,
        accuracy=accuracy,
        methods=(CODEBOOK.name,),
        bits=codebook.bits,
        rounding=Rounding(words=name),
        file=FileUse(words="safetensors with codes and scales", read_by="Transect", settings=settings),
        codebook=codebook,
    )


def codebook_of(settings: Mapping[str, Any]) -> Codebook:
    """Read the codebook of a checkpoint that ``codebook_format`` describes.

    Raises:
        ValueError: the settings are not codebook.
    """
    values = settings.get("values")
    if not isinstance(values, list) or any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
        raise ValueError("quantization_config of config.json must list the values of the codes")
    read = Fields(settings, "quantization_config of config.json")
    return Codebook(tuple(map(float, values)), read.integer("group_size", low=1), read.text("scale_dtype"))


def _check(read: Fields, settings: Mapping[str, Any]) -> None:
    codebook_of(settings)


CODEBOOK = Method("codebook", _check)
