"""Tables of cards: a model on each of them, predicted by the cost model; and the targets that kernels compile for."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from typing import Any

from benchmarks import record
from benchmarks.checks.targets import OUT, faults
from transect.cli import main
from transect.costs.presets import PRESETS
from transect.hardware.targets import TARGETS

PORTABLE = record.RESULTS / "h200" / "portable.json"
MODEL = "qwen3-8b"
CARDS = (
    "rtx-3060-12gb", "rtx-4060-ti-16gb", "rtx-3090", "rtx-4090", "a10", "l4", "rtx-5090", "l40s", "a100-80gb", "b200",
)  # fmt: skip
FORMATS = ("int4", "fp8", "bfloat16")
FEW = ("--max-num-seqs", "16", "--max-num-batched-tokens", "2048")
"""Limits of a server for a few people: a smaller step leaves memory to the cache."""
CONTEXTS = (40960, 32768, 24576, 16384, 8192, 4096)
CHAT = 2048
"""Tokens of the chat whose speed is predicted."""
MEASURED = ("sm_90",)
"""Targets with recorded times."""


def estimate(card: str, form: str, context: int) -> dict[str, Any]:
    """Return the facts of ``transect memory --json`` for a server on a card."""
    quantization = () if form == "bfloat16" else ("--quantization", form)
    command = ["memory", MODEL, "--serve", "--gpu", card, "--context", str(context), "--json", *quantization, *FEW]
    printed = io.StringIO()
    with redirect_stdout(printed):
        try:
            main(command)
        except SystemExit as stop:  # 1: it does not fit
            if stop.code not in (0, 1, None):
                raise
    return json.loads(printed.getvalue())


def on_a_card(card: str, form: str) -> tuple[int, float] | None:
    """Return (longest context, predicted tokens per second of one chat of ``CHAT`` tokens); None if none fits."""
    found = next((context for context in CONTEXTS if estimate(card, form, context)["fits"]), None)
    if found is None:
        return None
    return found, 1 / estimate(card, form, 2 * CHAT)["predicted_decode_s"]["1"]


def predictions() -> str:
    """Render the table of a model on cards."""
    lines = [f"| card | memory | {' | '.join(FORMATS)} |", "|---|---|" + "---|" * len(FORMATS)]
    for card in CARDS:
        cells = []
        for form in FORMATS:
            found = on_a_card(card, form)
            cells.append("does not fit" if found is None else f"{found[1]:,.0f} tokens/s, up to {found[0]:,}")
        memory = PRESETS[card].memory_bytes / 2**30
        lines.append(f"| `{card}` | {memory:.1f} GiB | {' | '.join(cells)} |")
    command = f"transect memory {MODEL} --serve --gpu CARD --context {2 * CHAT} {' '.join(FEW)}"
    lines += ["", f"Predicted, not measured: `{command}`,"]
    lines.append(
        f"from data sheets and the coefficients of an H200. One chat of {CHAT:,} tokens; longest context that fits."
    )
    return "\n".join(lines) + "\n"


def _result() -> dict[str, Any]:
    return json.loads(OUT.read_text())


def targets() -> str:
    """Render the table of targets."""
    result = _result()
    lines = [
        "| target | cards | shared memory of a block | Triton kernels | CUDA C++ sources | state |",
        "|---" * 6 + "|",
    ]
    notes = []
    for name, target in TARGETS.items():
        room = f"{target.block_bytes // 1024} KiB"
        rows = result["targets"].get(name)
        if rows is None:
            lines.append(
                f"| `{name}` | {target.cards} | {room} | | | {'measured' if name in MEASURED else 'untested'} |"
            )
            continue
        wrong = faults(name, rows)
        notes += [f"* `{name}`: {'; '.join(wrong)}"] if wrong else []
        state = "measured" if name in MEASURED else "compiled"
        state += f", {len(wrong)} exception{'s' * (len(wrong) > 1)} below" if wrong else ""
        sources = str(len(rows["cuda"])) if rows["cuda"] else "" if target.nvidia else "none"
        lines.append(f"| `{name}` | {target.cards} | {room} | {len(rows['triton'])} | {sources} | {state} |")
    found = result["targets"].values()
    versions = "; ".join(
        sorted({f"Triton {rows['environment']['packages']['triton']}, nvcc {rows['nvcc']}" for rows in found})
    )
    made = record.made_at([rows["environment"] for rows in found])
    lines += ["", *notes, ""] if notes else [""]
    return "\n".join([*lines, f"`{result['command']}`, {versions}, {made}."]) + "\n"


BAR = 1.15
"""Most times as long that a decode step of the portable kernels should take on the same card."""


def portable() -> str:
    """Render the steps of the portable kernels beside Hopper's, on one Hopper card."""
    result = json.loads(PORTABLE.read_text())
    lines = ["| weights | step | Hopper's kernels | portable kernels | times as long | floor | equal first tokens |"]
    lines.append("|---" * 7 + "|")
    missed = []
    for form, found in result["formats"].items():
        equal = f"{found['equal_first_tokens']:.0%}"
        for row in found["decode"]:
            count = row["rows"]
            step = f"{count} chat{'s' * (count > 1)}"
            lines.append(f"| {form} | {step} | {_times(row)} | {equal} |")
            if row["portable_over_own"] > BAR:
                missed.append(f"{form} at {count}")
        lines.append(f"| {form} | {found['prefill']['tokens']:,} tokens of prompts | {_times(found['prefill'])} | |")
    runs = [found["environment"] for found in result["formats"].values()]
    gpus = ", ".join(sorted({found["gpu"] for found in result["formats"].values()}))
    lines += ["", f"The bar is {BAR} times for a decode step. Missed: {', '.join(missed)}." if missed else ""]
    lines.append(
        f"One {gpus}, which acts as `{result['target']}` for the portable kernels; shape of {result['model']}, random "
        f"weights, prompts of 512 tokens; the floor of prompts is that of products in bfloat16."
    )
    lines.append(f"`benchmarks/engine/portable.py`, {record.made_at(runs)}.")
    return "\n".join(lines) + "\n"


def _times(row: dict[str, Any]) -> str:
    own, other, floor = row["own_s"]["median"], row["portable_s"]["median"], row["floor_s"]
    return f"{own * 1e3:.2f} ms | {other * 1e3:.2f} ms | {row['portable_over_own']:.3f} | {floor * 1e3:.2f} ms"


def supported() -> str:
    """Format the row of GPUs in the README's table of hardware."""
    found = _result()["targets"]
    names: dict[str, list[str]] = {"compiled": [], "untested": []}
    for name, target in TARGETS.items():
        if name not in MEASURED:
            names["compiled" if name in found else "untested"].append(f"{target.cards} (`{name}`)")
    untested = "; ".join([*names["untested"], "NVIDIA GPUs before Ampere"])
    measured = "NVIDIA H200 and H100 (`sm_90`; most figures are of an H200)"
    return f"| GPU | {measured} | {'; '.join(names['compiled'])} | {untested} | Metal, Vulkan, Intel GPUs |"
