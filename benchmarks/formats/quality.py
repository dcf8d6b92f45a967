"""Number formats of one model on a processor: perplexity, bits of a weight, tokens per second and memory.

    python benchmarks/formats/quality.py benchmarks/results/cpu/formats_quality.json [--formats ...] [--seconds 660]

The text is the reference of the Python language that comes with Python (``pydoc_data.topics``): its first nine tenths
calibrate, and this many characters of the last tenth are predicted in windows of 512 tokens. A format that would begin
after ``--seconds`` is left out; the file says which.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks.record import commit, environment, made_at, release, write

FORMATS = "plain,q4_k_m,q4_0,gptq,awq,q8_0,q6_k,q5_k_m,int4,fp8,int8"
CALIBRATED = ("gptq", "awq", "q4_0", "q4_k_m")
WINDOW = 512


def texts(folder: Path, characters: int) -> tuple[Path, Path]:
    """Write (the text to calibrate with, the text to predict)."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    cut = int(0.9 * len(text))
    calibration, judged = folder / "calibration.txt", folder / "judged.txt"
    calibration.write_text(text[:cut])
    judged.write_text(text[cut : cut + characters])
    return calibration, judged


def table(result: Mapping[str, Any]) -> str:
    """Format the table of the page on evaluation."""
    lines = [
        "| format | perplexity | 95% interval | bits per weight | tokens/s | MB of weights |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        between = f"{row['low']:.2f} to {row['high']:.2f}"
        lines.append(
            f"| {row['format']} | {row['perplexity']:.2f} | {between} | {row['bits']:.2f} | "
            f"{row['tokens_per_second']:.0f} | {row['megabytes']:.0f} |"
        )
    machine = result["environment"]
    origin = f"`{result['command']}` on {machine['processor']} with {result['threads']} threads, {made_at([machine])}."
    return "\n".join([*lines, "", origin]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--characters", type=int, default=24000)
    parser.add_argument("--calibrate-tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=660)
    arguments = parser.parse_args()
    import torch

    from transect.bench.compare_formats import formats_of, measure_all
    from transect.train.export.quantize import Calibration

    threads = torch.get_num_threads()  # an engine on the C++ kernels leaves torch one
    began, rows, left_out = time.perf_counter(), [], []
    with tempfile.TemporaryDirectory() as place:
        calibration, judged = texts(Path(place), arguments.characters)
        how = Calibration(calibration, arguments.calibrate_tokens)
        for name in formats_of(arguments.formats):
            if time.perf_counter() - began > arguments.seconds:
                left_out.append(name)
                continue
            found = measure_all(
                arguments.model, [name], judged, window=WINDOW, calibration=how if name in CALIBRATED else None
            )
            for row in found:
                rows.append(asdict(row))
                print(f"{time.perf_counter() - began:.0f} s", rows[-1], file=sys.stderr, flush=True)
    result = {
        "command": f"python benchmarks/formats/quality.py --formats {arguments.formats} --characters "
        f"{arguments.characters} --calibrate-tokens {arguments.calibrate_tokens}",
        "model": arguments.model,
        "threads": threads,
        "commit": commit(),
        "version": release(),
        "environment": environment(),
        "rows": rows,
        "left_out": left_out,
    }
    write(arguments.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
