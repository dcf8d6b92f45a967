"""Tables of the pretraining runs (examples/pretrain), from ``benchmarks/results/*/pretrain.json``."""

from __future__ import annotations

import math
from typing import Any

import _paths  # noqa: F401
from benchmarks import record

LIBRARY_KINDS = {
    "validation-books": "two books",
    "validation-plays": "two plays",
    "validation-dictionaries": "88 pages of dictionaries",
}


def origin(result: dict[str, Any], machine: str) -> str:
    """Format the origin of a run."""
    found = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    return f"`{result['command']}` on {machine}, Python {found['python']}, {versions}, {record.made_at([found])}"


def beside_published(gpu: dict[str, Any], cpu: dict[str, Any]) -> str:
    """Format Tiny Shakespeare beside nanoGPT: the same text, split, size, context and batch."""
    lines = [
        "| model | nanoGPT, published | | here, best | | here, last | |",
        "|---|---|---|---|---|---|---|",
        "| | bits per byte | tokens | bits per byte | tokens | bits per byte | tokens |",
    ]
    for result, size in ((gpu, "10.7 million, on an H200"), (cpu, "0.8 million, on two cores")):
        published, checks = result["published"], result["validation"]
        best = min(checks, key=lambda check: check["nats"])
        lines.append(
            f"| {size} | {published['nats'] / math.log(2):.3f} | {millions(published['tokens'])} | "
            + " | ".join(f"{check['bits_per_byte']:.3f} | {millions(check['tokens'])}" for check in (best, checks[-1]))
            + " |"
        )
    return (
        "\n".join(lines)
        + "\n\n"
        + origin(gpu, "one H200")
        + ";\n"
        + origin(cpu, f"two cores of an {cpu['environment']['processor']}")
        + ".\n"
    )


def millions(count: float) -> str:
    return f"{count / 1e6:.1f}M"


def library_curve(result: dict[str, Any]) -> str:
    """Format the validation over the run."""
    checks = result["validation"]
    shown = [check for i, check in enumerate(checks) if i in {0, 1, 3, 7, 11, 15, len(checks) - 1} or (i + 1) % 4 == 0]
    first = "| bytes seen | " + " | ".join(millions(check["tokens"]) for check in shown) + " |"
    second = "| bits per byte | " + " | ".join(f"{check['bits_per_byte']:.3f}" for check in shown) + " |"
    return f"{first}\n|{'---|' * (len(shown) + 1)}\n{second}\n"


def library_kinds(result: dict[str, Any]) -> str:
    """Format the last checkpoint on each kind of text, beside compressors of the whole validation text."""
    lines = ["| held out | bits per byte |", "|---|---|"]
    lines += [f"| {LIBRARY_KINDS[name]} | {bits:.3f} |" for name, bits in result["bits_per_byte"].items()]
    others = ", ".join(f"{name} {bits:.2f}" for name, bits in result["compressors_bits_per_byte"].items())
    total = sum(result["seconds"].values())
    return (
        "\n".join(lines) + f"\n\nCompressors on the same text: {others}. "
        f"{result['steps']:,} steps of {result['tokens_per_step']:,} bytes, "
        f"{result['tokens_per_second'] / 1e6:.2f} million bytes a second (median step), "
        f"{result['peak_bytes'] / 2**30:.1f} GiB; "
        f"{result['mfu']:.0%} MFU; {result['seconds_of_steps']:.0f} s of steps, {total:.0f} s for all of the command "
        f"when the text is fetched and tokenized.\n\n{origin(result, 'one H200')}.\n"
    )


def samples(result: dict[str, Any], count: int) -> str:
    """Format the server's texts, each after its prompt and a bar."""
    found = []
    for sample in result["samples"][:count]:
        quoted = (sample["prompt"] + "\u2502" + sample["text"]).strip("\n").split("\n")
        found.append("```text\n" + "\n".join(quoted) + "\n```\n")
    return "\n".join(found)


def race(result: dict[str, Any]) -> str:
    """Format the losses of this trainer beside those of transformers."""
    ours, theirs = result["rows"][0]["losses"], result["rows"][1]["losses"]
    last = len(ours) - 1
    shown = [*range(0, last, 10), last]
    lines = [
        "| step | " + " | ".join(str(step + 1) for step in shown) + " | peak memory |",
        f"|{'---|' * (len(shown) + 2)}",
    ]
    for row, losses in zip(result["rows"], (ours, theirs), strict=True):
        values = " | ".join(f"{losses[step]:.3f}" for step in shown)
        lines.append(f"| {row['contender']} | {values} | {row['peak_bytes'] / 1e9:.1f} GB |")
    return "\n".join(lines) + f"\n\n{result['method']}. {origin(result, 'one H200')}.\n"
