"""The tables of number formats in the docs, made from the records."""

from __future__ import annotations

from .gguf import BLOCK_TYPES, MIXTURES, UNITS
from .number_format import NumberFormat
from .registry import formats


def page() -> str:
    """Write Markdown: a table of formats by name, and one of the block types of GGUF files."""
    return f"{_formats()}\n{_blocks()}"


def _formats() -> str:
    head = (
        "| format | numbers | bits | `--quantization` | `--kv-cache-dtype` | `quantize --format` | "
        "`lora.base_format` | checkpoints | accuracy |\n|---|---|---|---|---|---|---|---|---|\n"
    )
    return head + "".join(_row(each) for each in sorted(formats().values(), key=_bits))


def _row(form: NumberFormat) -> str:
    written = "" if form.file is None else f"{form.file.words} (for {form.file.read_by})"
    uses = (form.rounding, form.cache)
    marks = " | ".join((*("" if use is None else "yes" for use in uses), written, "" if form.base is None else "yes"))
    return (
        f"| `{form.name}` | {form.summary} | {form.bits:.4g} | {marks} | {', '.join(form.methods) or 'plain'} | "
        f"{form.accuracy} |\n"
    )


def _bits(form: NumberFormat) -> tuple[float, str]:
    return -form.bits, form.name


def _blocks() -> str:
    head = "| GGUF type | block | bits in a file | bits on a GPU | `quantize --format` |\n|---|---|---|---|---|\n"
    rows = []
    for kind in sorted(BLOCK_TYPES.values(), key=lambda kind: (-kind.file_bits, kind.name)):
        held = f"{UNITS[kind.name].bits:.3g}" if kind.name in UNITS else f"{kind.file_bits:g}"
        names = [kind.name, *(each.name for each in MIXTURES.values() if each.most == kind.name)]
        written = ", ".join(f"`{name.lower()}`" for name in names) if kind.file_type is not None else ""
        rows.append(f"| {kind.name} | {kind.block} | {kind.file_bits:.4g} | {held} | {written} |\n")
    return head + "".join(rows)
