"""Follow softmax through compilers: excerpts of what each made of it, and how often its code touches the data.

    python benchmarks/compilers/follow.py [--jax PYTHON] [--tvm PYTHON]

Triton's kernel of this project is compiled for an H100 (PTX) and an MI300 (AMDGCN), without either; XLA, TVM and
Inductor compile for this processor. The interpreters are those of ``ladder.py``. Excerpts are lines of the compilers'
own text; locations, casts of constants and address arithmetic are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _paths  # noqa: F401

SIZES = {"rows": 2048, "columns": 4096}
"""Those of the ladder's rung on a CPU."""
PLANE = "[2048,4096]"
KERNEL = "forward, 4096 wide"
ROLES: dict[str, tuple[str, str]] = {
    "loads of 16 bytes from memory": (r"ld\.global\.v4", r"(?:buffer|global)_load_dwordx4"),
    "stores of 16 bytes to memory": (r"st\.global\.v4", r"(?:buffer|global)_store_dwordx4"),
    "exponentials": (r"ex2\.", r"v_exp_f32"),
    "exchanges between lanes of a warp or wavefront": (r"shfl\.", r"v_\w+_dpp|ds_b?permute|v_readlane"),
    "barriers of a program": (r"bar\.sync", r"s_barrier"),
    "stores to shared memory (LDS)": (r"st\.shared", r"ds_write"),
    "loads from shared memory (LDS)": (r"ld\.shared", r"ds_read"),
}
"""Jobs of instructions, with the pattern in PTX and in AMDGCN assembly."""


def lines_with(text: str, *patterns: str) -> str:
    """Return the lines that match any pattern, without Triton's locations."""
    kept = (re.sub(r"\s*loc\(.*$", "", line) for line in text.splitlines())
    return "\n".join(line for line in kept if any(re.search(pattern, line) for pattern in patterns))


def triton() -> dict[str, Any]:
    """Compile the kernel for both GPUs; excerpts of the stages, and instructions by role."""
    from transect.ops import registry
    from transect.ops.tools.compile import compile_kernel

    registry.all_ops()
    kernel = next(each for each in registry.get("softmax").kernels() if each.name == KERNEL)
    nvidia, amd = (compile_kernel(kernel, target, sass=False) for target in ("sm_90", "gfx942"))
    work = (
        r"tt\.(load|store)",
        r'"tt\.reduce"',
        r"arith\.(subf|divf|maxnumf|addf)",
        r"math\.",
        r"%y_\d+ = arith\.mulf",
    )
    roles = {}
    for role, (ptx, amdgcn) in ROLES.items():
        roles[role] = {"sm_90": _counted(nvidia.assembly, ptx), "gfx942": _counted(amd.assembly, amdgcn)}
    ttir = nvidia.stages["ttir"]
    return {
        "ttir": lines_with(ttir, *work),
        "ttgir": lines_with(nvidia.stages["ttgir"], r"^#blocked", r"^module", *work),
        "ttgir gfx942": lines_with(amd.stages["ttgir"], r"^#blocked", r"^module"),
        "ptx": _head(nvidia.assembly, r"ld\.global|max\.f32|shfl|bar\.sync|st\.(?:shared|global)"),
        "amdgcn": _head(amd.assembly, r"_load_dwordx4|_dpp|s_barrier|ds_"),
        "roles": roles,
        "registers": {"sm_90": nvidia.registers, "gfx942": amd.registers},
        "planes": {
            "loops": 1,
            "read": len(re.findall(r"tt\.load", ttir)),
            "written": len(re.findall(r"tt\.store", ttir)),
        },
    }


def _counted(assembly: str, pattern: str) -> dict[str, int]:
    """Count the instructions of a role by name."""
    names = re.findall(rf"^\s+(?:@!?%?\w+\s+)?((?:{pattern})[\w.]*)", assembly, re.MULTILINE)
    return dict(Counter(names).most_common())


def _head(assembly: str, pattern: str, most: int = 2) -> str:
    """Return the assembly's lines that match, runs of one instruction cut to ``most``."""
    out: list[str] = []
    half = re.search(r"ex2\.|v_exp_", assembly)  # the sum after the exponentials repeats the maximum
    last, seen = "", 0
    for line in assembly[: half.start() if half else None].splitlines():
        found = re.match(rf"^\s+(?:@!?%?\w+\s+)?((?:[\w]*)(?:{pattern})[\w.]*)", line.expandtabs(4))
        if not found:
            continue
        name = found.group(1)
        seen = seen + 1 if name == last else 1
        last = name
        if seen <= most:
            out.append(re.sub(r"\s*(//|;).*$", "", line.expandtabs(4).strip()))
        elif seen == most + 1:
            out.append("...")
    return "\n".join(out)


def inductor() -> dict[str, Any]:
    """Compile ``torch.softmax`` for this processor; the loop nest of the generated C++."""
    import torch
    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(lambda x: torch.softmax(x, -1), mode="max-autotune", dynamic=False)
    with torch.inference_mode():
        _, sources = run_and_get_code(compiled, torch.randn(SIZES["rows"], SIZES["columns"]))
    body = re.search(r"#pragma omp parallel.*?(?=\n    inductor_cpu_integer|\n}\n)", sources[0], re.DOTALL)
    assert body is not None
    text = re.sub(r"static_cast<(?:int64_t|float)>\(([^()]*)\)", r"\1", body.group())
    text = re.sub(r"at::vec::|std::numeric_limits<float>::", "", text).replace("Vectorized<float>", "Vec")
    kept = [line for line in text.splitlines() if not re.fullmatch(r"\s*[{}]\s*", line) and "C10_LIKELY" not in line]
    rows_outside = text.count("#pragma omp for")
    loads = len(re.findall(r"loadu\(in_ptr0", text))
    stored = len(re.findall(r"\.store\(out_ptr\d \+ [^;]*\*x0", text))
    return {
        "loops": "\n".join(kept),
        "planes": {"loops": rows_outside, "read": 1, "written": stored},
        "touches": {"in": loads},
    }


def xla() -> dict[str, Any]:
    """Compile softmax by JAX for this processor; run by an interpreter that has JAX."""
    from benchmarks.compilers.operators import Work
    from benchmarks.peers.jax_xla import Jax, function

    jax = Jax("cpu", 2, 0).jax
    work = Work("softmax", SIZES)
    lowered = jax.jit(function(jax, work, "cpu")).lower(jax.ShapeDtypeStruct(tuple(SIZES.values()), "float32"))
    compiled = lowered.compile()
    text = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text())
    text = re.sub(r"(?<=\])\{[\d,]*\}|(?m:, backend_config=.*$)", "", text)
    parts = re.findall(r"(?ms)^(?:%fused\S*|ENTRY \S+) \(.*?^}", text)
    entry = parts[-1]
    fusions = [line for line in entry.splitlines() if " fusion(" in line]
    producers = dict(re.findall(r"%(\S+) = (\S+) ", entry))
    operands = [name for line in fusions for name in _operands(line)]
    return {
        "stablehlo": re.sub(r"(?m)^\s*(module.*|})\n", "", lowered.as_text().replace("stablehlo.", "")),
        "hlo": "\n\n".join(re.sub(r"(?m)^.*(?:parameter|constant)\(.*\n", "", part) for part in parts),
        "planes": {
            "loops": sum(
                PLANE in line or any(PLANE in producers[name] for name in _operands(line)) for line in fusions
            ),
            "read": sum(PLANE in producers[name] for name in operands),
            "written": sum(PLANE in line.split(" fusion(")[0] for line in fusions),
        },
        "bytes_by_xla": compiled.cost_analysis()["bytes accessed"],
    }


def _operands(fusion: str) -> list[str]:
    """Return the names of the values that a fusion reads."""
    found = re.search(r"fusion\(([^)]*)\)", fusion)
    assert found is not None
    return [name.lstrip("%") for name in found[1].split(", ")]


def tvm() -> dict[str, Any]:
    """Schedule softmax in TVM by hand; run by an interpreter that has TVM."""
    from benchmarks.peers.tvm_tuned import by_rows, softmax

    plain = softmax(**SIZES)
    scheduled = by_rows(softmax(**SIZES)).script()

    def shortened(text: str) -> str:
        body = text[text.index('with T.sblock("root")') :]
        dropped = r"T\.(sblock_alloc_buffer|reads|writes|sblock_attr|axis)|^\s*#|T\.init|T\.sblock\("
        kept = [line for line in body.splitlines()[1:] if not re.search(dropped, line)]
        return "\n".join(line for line in kept if line.strip())

    nests = plain.script().count("for i0, ")
    return {
        "plain": shortened(plain.script()),
        "scheduled": shortened(scheduled),
        "planes plain": {"loops": nests, "read": 4, "written": 2},
        "planes": {"loops": scheduled.count("T.parallel"), "read": 1, "written": 1},
    }


EXCERPTS = {
    "stablehlo": ("xla", "stablehlo"),
    "hlo": ("xla", "hlo"),
    "tvm-plain": ("tvm", "plain"),
    "tvm-scheduled": ("tvm", "scheduled"),
    "inductor": ("inductor", "loops"),
    "ttir": ("triton", "ttir"),
    "ttgir": ("triton", "ttgir"),
    "ttgir-amd": ("triton", "ttgir gfx942"),
    "ptx": ("triton", "ptx"),
    "amdgcn": ("triton", "amdgcn"),
}
"""Blocks of the page, with the part and the excerpt that they show."""
PARTS = {"triton": triton, "inductor": inductor, "xla": xla, "tvm": tvm}


def page(name: str, key: str, result: dict[str, Any]) -> str:
    """Format one excerpt as a block of code."""
    language = "cpp" if name == "inductor" else "text"
    return f"```{language}\n{result['parts'][name][key]}\n```\n"


def roles_table(result: dict[str, Any]) -> str:
    """Format what the instructions of both GPUs' assembly do."""
    lines = ["| job | H100, PTX | MI300, AMDGCN |", "|---|---|---|"]
    for role, found in result["parts"]["triton"]["roles"].items():
        cells = [", ".join(f"{count} `{name}`" for name, count in found[t].items()) for t in ("sm_90", "gfx942")]
        lines.append(f"| {role} | {' | '.join(cells)} |")
    registers = result["parts"]["triton"]["registers"]
    lines.append(f"| registers of a thread | {registers['sm_90']} | {registers['gfx942']} |")
    return "\n".join(lines) + "\n"


def planes_table(result: dict[str, Any], ladder: dict[str, Any]) -> str:
    """Format, by compiler, how often the whole data passes through memory, and the times of the ladder's rung."""
    from benchmarks.compilers.ladder import floor_s

    parts, measured = result["parts"], ladder["rates"]
    row = next(each for each in ladder["rungs"] if each["work"].startswith("softmax") and each["dtype"] == "float32")
    least, plane = floor_s(row, measured), 4 * SIZES["rows"] * SIZES["columns"]
    lines = ["| compiler | loops over all rows | planes read, written | at the bandwidth, ms | measured, ms |"]
    lines.append("|---|---|---|---|---|")
    entries = {
        "TVM without a schedule": (parts["tvm"]["planes plain"], ""),
        "XLA (JAX)": (parts["xla"]["planes"], "jax_xla"),
        "TVM, scheduled by hand": (parts["tvm"]["planes"], "tvm_tuned"),
        "Inductor": (parts["inductor"]["planes"], "torch_inductor"),
        "torch, eager (C++ written by hand)": ({"loops": 1, "read": 1, "written": 1}, "torch_eager"),
        "Triton, on a GPU": (parts["triton"]["planes"], ""),
    }
    for name, (planes, peer) in entries.items():
        seconds = plane * (planes["read"] + planes["written"]) / measured["bytes_per_second"]
        took = row["peers"].get(peer, {}).get("seconds")
        cells = [planes["loops"], f"{planes['read']}, {planes['written']}", f"{seconds * 1e3:.1f}"]
        cells.append(f"{took['median'] * 1e3:.1f}" if took else "")
        if name.startswith("Triton"):
            cells[2] = ""
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    lines.append(f"\nThe floor is {least * 1e3:.1f} ms: one read and one write of {plane / 1e6:.1f} MB each.")
    return "\n".join(lines) + "\n"


def elsewhere(python: str, part: str) -> dict[str, Any]:
    """Run one part by another interpreter."""
    done = subprocess.run([python, __file__, "--part", part], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{python} could not follow {part}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jax", default="/tmp/peers-jax/bin/python", metavar="PYTHON")
    parser.add_argument("--tvm", default="/tmp/peers-tvm/bin/python", metavar="PYTHON")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        print(json.dumps(PARTS[options.part]()))
        return
    from benchmarks import record

    found = {"triton": elsewhere(sys.executable, "triton"), "inductor": elsewhere(sys.executable, "inductor")}
    found |= {"xla": elsewhere(options.jax, "xla"), "tvm": elsewhere(options.tvm, "tvm")}
    result = {
        "command": record.command("benchmarks/compilers/follow.py"),
        "environment": record.environment(("torch", "triton")),
        "parts": found,
    }
    record.write(options.out or record.RESULTS / "cpu" / "compilers_followed.json", result)
    print(roles_table(result))


if __name__ == "__main__":
    main()
