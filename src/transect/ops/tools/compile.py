"""Compiles an operator's Triton kernels ahead of time, for a GPU that need not be there, and reads what came out.

The interpreter must be off (``TRITON_INTERPRET`` unset): it replaces the compiler.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..jit import INTERPRETED, triton
from ..registry import Kernel, Unavailable

REGISTERS = 65536
"""32-bit registers of a multiprocessor, sm_80 to sm_90."""
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}
MAX_WARPS = 64


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel for one target: every stage as text, and what the machine code needs."""

    kernel: Kernel
    target: str
    stages: Mapping[str, str]
    """``ttir``, ``ttgir``, ``llir``, ``ptx`` or ``amdgcn``, and ``sass`` where the disassembler exists."""
    shared_bytes: int
    registers: int | None
    spilled_bytes: int | None

    @property
    def access_bytes(self) -> dict[str, dict[int, int]]:
        """How many global loads and stores of each width in bytes the assembly holds."""
        found: dict[str, dict[int, int]] = {"load": {}, "store": {}}
        text = self.stages.get("ptx", "")
        for kind, name in (("ld", "load"), ("st", "store")):
            for vector, bits in re.findall(rf"\b{kind}\.global(?:\.\w+)*?(?:\.v(\d))?\.[bfus](\d+)\b", text):
                width = int(vector or 1) * int(bits) // 8
                found[name][width] = found[name].get(width, 0) + 1
        text = self.stages.get("amdgcn", "")
        sizes = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2, "ubyte": 1, "byte": 1}
        for name, size in re.findall(r"\b(?:buffer|global)_(load|store)_(\w+?)(?:_d16(?:_hi)?)?\s", text):
            if size in sizes:
                found[name][sizes[size]] = found[name].get(sizes[size], 0) + 1
        return found

    @property
    def occupancy(self) -> float | None:
        """Warps that fit on a multiprocessor at once, as a share of 64; None where registers are not known."""
        if self.registers is None or self.target not in SHARED_BYTES:
            return None
        per_warp = -(-self.registers * 32 // 256) * 256
        programs = min(
            MAX_WARPS // self.kernel.warps,
            REGISTERS // (per_warp * self.kernel.warps),
            32,
            SHARED_BYTES[self.target] // (self.shared_bytes + 1024),
        )
        return programs * self.kernel.warps / MAX_WARPS


def _gpu_target(target: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", int(target[3:]), 32) if target.startswith("sm_") else GPUTarget("hip", target, 64)


def compile_kernel(kernel: Kernel, target: str) -> Compiled:
    """Compile one kernel for ``sm_80``, ``sm_90`` or ``gfx942``.

    Raises:
        Unavailable: Triton is missing, or its interpreter is on.
        ValueError: the kernel does not support the target.
    """
    if triton is None:
        raise Unavailable("Triton is not installed: pip install 'transect[gpu]'")
    if INTERPRETED:
        raise Unavailable("the interpreter is on: unset TRITON_INTERPRET to compile")
    if target not in kernel.targets:
        raise ValueError(f"{kernel.name} is for {', '.join(kernel.targets)}, not {target}")
    from triton.compiler import ASTSource

    names = list(kernel.function.arg_names)
    signature = {n: "constexpr" if n in kernel.constants else kernel.arguments[n] for n in names}
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*") or n in kernel.divisible]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel.function, signature=signature, constexprs=dict(kernel.constants), attrs=attributes)
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages}
    made = triton.compile(source, target=_gpu_target(target), options=options)
    stages = {name: text for name, text in made.asm.items() if isinstance(text, str)}
    registers = spilled = None
    if "cubin" in made.asm:
        registers, spilled, sass = _read_cubin(made.asm["cubin"])
        if sass:
            stages["sass"] = sass
    elif "amdgcn" in stages:
        found = re.search(r"\.vgpr_count:\s+(\d+)", stages["amdgcn"])
        lost = re.search(r"\.private_segment_fixed_size:\s+(\d+)", stages["amdgcn"])
        registers = int(found.group(1)) if found else None
        spilled = int(lost.group(1)) if lost else None
    return Compiled(kernel, target, stages, made.metadata.shared, registers, spilled)


def _tool(name: str) -> str | None:
    """A program of the CUDA toolkit that Triton brings along."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return str(path) if path.exists() else None


def _read_cubin(cubin: bytes) -> tuple[int | None, int | None, str]:
    """(registers, bytes of stack that spills take, SASS) of machine code, as far as the disassembler is there."""
    dump = _tool("cuobjdump")
    if dump is None:
        return None, None, ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([dump, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
        sass = ""
        if _tool("nvdisasm"):
            disassembler = subprocess.run([str(_tool("nvdisasm")), "-c", file.name], capture_output=True, text=True)
            sass = disassembler.stdout
    registers = re.search(r"REG:(\d+)", usage)
    stack = re.search(r"STACK:(\d+)", usage)
    return (int(registers.group(1)) if registers else None, int(stack.group(1)) if stack else None, sass)
