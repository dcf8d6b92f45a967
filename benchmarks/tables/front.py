"""Blocks of the README: its leading sentence, the place of publication, time to the first token, figures beside peers.

``repo_url`` of ``pyproject.toml`` is the one place that names where the project is published. ``render.py`` copies the
address into the README and ``mkdocs.yml``, and ``hatch_build.py`` into the package.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

from benchmarks import record
from benchmarks.checks import instruction_sets
from benchmarks.tables import cards
from benchmarks.tables import engine as engine_tables

MODEL = "llama-3.1-8b"
REPO_LINE = re.compile(r"^repo_url: .*$", re.MULTILINE)


def repo_url() -> str:
    """Return the address of the repository, as set in ``pyproject.toml``."""
    settings = tomllib.loads((record.ROOT / "pyproject.toml").read_text())
    return settings["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repo_url"]


def with_repo_url(site: str) -> str:
    """Set the address in the text of ``mkdocs.yml``."""
    return REPO_LINE.sub(f"repo_url: {repo_url()}", site)


def clone() -> str:
    """Format the commands from nothing to an answer."""
    address = repo_url()
    return f"""```sh
git clone {address} && cd {address.rstrip("/").rpartition("/")[2]}
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup  # with an NVIDIA GPU: make setup
source .venv/bin/activate
transect serve smollm2-135m
```
"""


def _cpu() -> dict[str, Any]:
    return json.loads((record.RESULTS / "cpu" / "llamacpp.json").read_text())


def _engine(section: str) -> dict[str, Any]:
    """Return the result of the longest section of that name, from the engine's file for ``MODEL``."""
    found = engine_tables.sections(engine_tables.load()[MODEL], section)
    return next(row for row in found if row.get("batch", 1) == 1)


def _trained(work: str, contender: str) -> dict[str, Any]:
    rows = json.loads((record.RESULTS / "h200" / "train.json").read_text())["rows"]
    return next(row for row in rows if (row["work"], row["contender"]) == (work, contender))


def lead() -> str:
    """Return two results in one sentence."""
    decode = _cpu()["work"]["decode"]["ratio"]["median"]
    share = _engine("throughput")["of_floor"]
    return (
        f"On two CPU cores it decodes {decode:.1f} times as fast as llama.cpp; on one H200 it serves an 8B model at "
        f"{share:.0%} of the throughput that the hardware allows.\n"
    )


def first_answer() -> str:
    """Time to the first token of a new server."""
    result = json.loads((record.RESULTS / "cpu" / "first_answer.json").read_text())
    machine, first = result["environment"], result["first_token_s"]
    return (
        f"A new server returns its first token after {first['median']:.1f} s ({first['min']:.1f} to {first['max']:.1f} "
        f"in {first['runs']} starts; {machine['cores']} cores of an {machine['processor']}, "
        f"{record.made_at([machine])}).\n"
    )


def figures() -> str:
    """Format a row for each kind of work, beside a peer and the floor."""
    lines = ["| work | Transect | peer | ratio | of floor |", "|---|---|---|---|---|"]
    cpu = _cpu()
    names = {"decode": "CPU, one stream", "prefill": "CPU, prompt of 512 tokens", "batch": "CPU, 16 streams"}
    for work, name in names.items():
        row = cpu["work"][work]
        ours, theirs = row["transect"]["median"], row["llamacpp"]["median"]
        share = ours / row["floor"]
        lines.append(_row(name, ours, f"llama.cpp {theirs:,.0f}", row["ratio"]["median"], f"{share:.0%}"))
    peer = engine_tables.vllm()
    theirs = peer["models"][MODEL]
    decode, throughput = _engine("decode"), _engine("throughput")
    step = decode["step_s"]["median"]
    vllm = f"vLLM {peer['version']}* "
    for name, ours, other, share in (
        ("H200, 8B, one stream", 1 / step, 1 / theirs["decode_s"]["1"], decode["of_floor"]),
        ("H200, 8B, 256 streams", throughput["tokens_per_s"], theirs["tokens_per_s"], throughput["of_floor"]),
    ):
        lines.append(_row(name, ours, f"{vllm}{other:,.0f}", ours / other, f"{share:.0%}"))
    rows = [_trained("lora 8b", who) for who in ("transect", "liger")]
    ours, other = (row["tokens_per_second"] for row in rows)
    name = "H200, 8B, LoRA training"
    lines.append(_row(name, ours, f"PEFT + Liger-Kernel {other:,.0f}", ours / other, f"{rows[0]['mfu']:.0%} MFU"))
    known = engine_tables.load()[MODEL]["sections"]
    # A file's first commit is for all of its rows but those that name one of their own.
    trained = json.loads((record.RESULTS / "h200" / "train.json").read_text())
    used = [section for name, section in known.items() if name.split()[0] in ("decode", "throughput")]
    made = record.made_at([cpu["environment"], *used, rows[0] if "commit" in rows[0] else trained["environment"]])
    lines.append(
        f"\nTokens per second. CPU: {cpu['environment']['cores']} cores of an {cpu['environment']['processor']}, "
        f"SmolLM2-135M in Q4_1, both programs in turns, medians of {cpu['work']['decode']['ratio']['runs']}. GPU: "
        f"Llama-3.1-8B's shape in bfloat16, random weights. {made[0].upper()}{made[1:]}.\n"
        f"\\* vLLM was not in the same run: another H200, same protocol, no spread.\n"
    )
    return "\n".join(lines)


SUPPORT = """| | measured | emulated or compiled in the tests | untested | not supported |
|---|---|---|---|---|
{cpu}
{gpu}
| several GPUs | 2 x H200, 2 x H100 in one host | | more than two; several hosts with GPUs | |
"""


def support() -> str:
    """Format the table of hardware; the rows of processors and GPUs come from recorded results."""
    sets = json.loads((record.RESULTS / "cpu" / "instruction_sets.json").read_text())
    kernels, processors = _cpu()["kernels"], [_cpu()["environment"]["processor"]]
    other = record.RESULTS / "cpu" / "cpu_sets.json"
    if other.exists():
        found = json.loads(other.read_text())
        kernels += "".join(f", {row['isa']}" for row in found["rows"] if row.get("medians"))
        with_amx = " with AMX, which is not used" if "amx_tile" in found["features"] else ""
        processors.append(f"{found['environment']['processor']}{with_amx}".replace("(R)", "").replace(" Processor", ""))
    return SUPPORT.format(cpu=instruction_sets.row(sets, kernels, processors), gpu=cards.supported())


def _row(name: str, ours: float, peer: str, ratio: float, share: str) -> str:
    return f"| {name} | {ours:,.0f} | {peer} | {ratio:.2f}x | {share} |"
