"""One model in several number formats: perplexity, bits, speed, memory.

A format that a model is loaded in is measured as it is held in memory; one that ``transect quantize`` writes is
measured as the file.

The interval of a perplexity takes windows of the text as the sample: with window i of c_i tokens that cost n_i nats,
and r = sum n / sum c, the error of r is sqrt(k / (k - 1) sum (n_i - r c_i)^2) / sum c (a ratio estimate; Cochran 1977,
Sampling Techniques, chapter 6), and the interval is exp(r - 1.96 error) to exp(r + 1.96 error).
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..checkpoints.layouts import storage_of
from ..checkpoints.resolve import resolve
from ..costs.model import weight_bytes
from ..engine.frontends.llm import LLM
from ..engine.scheduling.sampling_params import SamplingParams
from ..spec.numbers.registry import file_formats, gguf_names, roundings
from ..spec.weights import parameter_count
from ..train.evaluation.perplexity import TextScore, score_file
from ..train.export.quantize import Calibration, quantize_model, takes_calibration
from ..train.export.write import opened

PLAIN = "plain"
"""Format of the model's own files."""
FORMATS = (PLAIN, *roundings())
"""Formats to which a model is rounded when it is loaded."""
WRITTEN = (*(name for name in file_formats() if name not in FORMATS), *gguf_names())
"""Formats that are first written to a file, and loaded from it."""
DRAWN = 48
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class FormatRow:
    """One format. ``low`` and ``high`` are the ends of the 95% interval of the perplexity, NaN with one window."""

    format: str
    perplexity: float
    low: float
    high: float
    bits: float
    """Bits of a weight, including embedding and head."""
    tokens_per_second: float
    """Decoding speed of one sequence, in tokens per second."""
    megabytes: float
    kernels: str


def interval(windows: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Return the 95% interval of the perplexity from (nats, tokens) of each window."""
    k, tokens = len(windows), sum(count for _, count in windows)
    if k < 2:
        return math.nan, math.nan
    rate = sum(nats for nats, _ in windows) / tokens
    spread = sum((nats - rate * count) ** 2 for nats, count in windows)
    error = 1.96 * math.sqrt(k / (k - 1) * spread) / tokens
    return math.exp(rate - error), math.exp(rate + error)


def formats_of(names: str) -> list[str]:
    """Return the formats in a list with commas.

    Raises:
        ValueError: one is not known.
    """
    found = [name.strip().lower() for name in names.split(",")]
    for name in found:
        if name not in (*FORMATS, *WRITTEN):
            raise ValueError(f"--formats knows {', '.join((*FORMATS, *WRITTEN))}, not {name!r}")
    return found


def measure_all(
    model: str,
    names: Sequence[str],
    text: Path,
    *,
    window: int | None,
    dtype: str = "auto",
    calibration: Calibration | None = None,
    engine: Mapping[str, Any] = NOTHING,
) -> Iterator[FormatRow]:
    """Measure each format and yield a row for each, one after another; with a calibration a second one for those that
    take it.
    ``engine``: other settings of the ``LLM`` that measures.

    Raises:
        ValueError: a model or text that cannot be used, or a format that cannot hold the model.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if name in WRITTEN:
                yield _measure_written(model, name, text, window, dtype, Path(folder), None, engine)
            else:
                yield measure(model, name, text, window=window, dtype=dtype, engine=engine)
            if calibration is not None and takes_calibration(name):
                yield _measure_written(model, name, text, window, dtype, Path(folder), calibration, engine)


def _measure_written(
    model: str,
    name: str,
    text: Path,
    window: int | None,
    dtype: str,
    folder: Path,
    calibration: Calibration | None,
    engine: Mapping[str, Any],
) -> FormatRow:
    """Measure a format that ``transect quantize`` writes; its bits are those of the files."""
    path = folder / (name if name in file_formats() else f"{name}.gguf")
    quantize_model(opened(model), path, name, calibration)
    row = measure(str(path), PLAIN, text, window=window, dtype=dtype, engine=engine)
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    bits = 8 * size / parameter_count(resolve(str(path)).config)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    label = name if calibration is None else f"{name}, calibrated"
    return replace(row, format=label, bits=bits, megabytes=size / 1e6)


def measure(
    model: str, name: str, text: Path, *, window: int | None, dtype: str = "auto", engine: Mapping[str, Any] = NOTHING
) -> FormatRow:
    """Load the model in one of ``FORMATS`` and measure it.

    Raises:
        ValueError: a model or text that cannot be used.
    """
    quantization = None if name == PLAIN else name
    llm = LLM(model, dtype=dtype, quantization=quantization, enable_prefix_caching=False, **engine)
    try:
        score: TextScore = score_file(llm, text, window=window)
        params = SamplingParams(max_tokens=DRAWN, temperature=0, ignore_eos=True)
        llm.generate([[1, 2, 3]], params)
        began = time.perf_counter()
        llm.generate([[1, 2, 3]], params)
        seconds = time.perf_counter() - began
        source, kernels = resolve(model), llm.kernels
    finally:
        llm.close()
    storage = storage_of(source, dtype, keeps_quantized=kernels.startswith("C++"), quantization=quantization)
    held = weight_bytes(source.config, storage)
    low, high = interval(score.windows)
    bits = 8 * held / parameter_count(source.config)
    return FormatRow(name, score.perplexity, low, high, bits, DRAWN / seconds, held / 1e6, kernels)


def draw(rows: Sequence[FormatRow], path: Path, title: str) -> None:
    """Draw perplexity over bits of a weight, with intervals.

    Raises:
        ValueError: there is no matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or leave --plot out") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for row in rows:
        error = None if math.isnan(row.low) else [[row.perplexity - row.low], [row.high - row.perplexity]]
        axes.errorbar(row.bits, row.perplexity, yerr=error, fmt="o", capsize=3)
        axes.annotate(row.format, (row.bits, row.perplexity), textcoords="offset points", xytext=(6, 4))
    axes.set(xlabel="bits of a weight", ylabel="perplexity (95% interval)", title=title)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
