"""Compiles kernels ahead of time, for a GPU that need not be there, and reads the result.

Triton's (and Gluon's) kernels go through Triton's compiler. Its interpreter must be off (``TRITON_INTERPRET`` unset),
because it replaces the compiler. CUDA C++ sources go through nvcc.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...hardware.targets import TARGETS
from ..lang.cuda_build import compile_source, ptx_of, source
from ..lang.jit import INTERPRETED, MISSING, triton
from ..registry import Kernel, Unavailable
from . import machine_code

STAGES = ("ttir", "ttgir", "llir", "ptx", "sass", "amdgcn")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel for one target: every stage as text, and the needs of the machine code."""

    name: str
    target: str
    stages: Mapping[str, str]
    """``ttir``, ``ttgir``, ``llir``, ``ptx`` or ``amdgcn``, and ``sass`` where a disassembler exists."""
    shared_bytes: int
    registers: int | None
    """Registers of a thread; None where nothing here can read them."""
    spilled_bytes: int | None
    """Bytes of stack of a thread."""
    warps: int | None
    """Warps of a program; None where the launch decides it, or decides the amount of shared memory."""

    @property
    def assembly(self) -> str:
        return self.stages.get("ptx", "") or self.stages.get("amdgcn", "")

    @property
    def access_bytes(self) -> dict[str, dict[int, int]]:
        """Counts of global loads and stores in the assembly, by width in bytes."""
        return machine_code.access_bytes(self.assembly)

    @property
    def matrix_instructions(self) -> dict[str, int]:
        """Counts of tensor-core instructions in the assembly, by kind."""
        return machine_code.matrix_instructions(self.assembly)

    @property
    def occupancy(self) -> float | None:
        """Warps that fit on a multiprocessor at once, as a share of its most; None where registers are not known."""
        if self.registers is None or self.warps is None:
            return None
        return machine_code.occupancy(self.target, self.warps, self.registers, self.shared_bytes)


def compile_kernel(kernel: Kernel, target: str, *, sass: bool = True) -> Compiled:
    """Compile one kernel for a target of ``hardware/targets.py``; ``sass``: also disassemble it, a third of the time.

    Raises:
        Unavailable: Triton is missing, or its interpreter is on.
        ValueError: the kernel does not support the target.
    """
    if triton is None:
        raise Unavailable(MISSING)
    if INTERPRETED:
        raise Unavailable("the interpreter is on: unset TRITON_INTERPRET to compile")
    if target not in kernel.targets:
        raise ValueError(f"{kernel.name} is for {', '.join(kernel.targets)}, not {target}")
    names = list(kernel.function.arg_names)
    signature = {n: "constexpr" if n in kernel.constants else kernel.arguments[n] for n in names}
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*") or n in kernel.divisible]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = _source(kernel.function)(
        kernel.function, signature=signature, constexprs=dict(kernel.constants), attrs=attributes
    )
    most = kernel.stages if TARGETS[target].nvidia else 2  # as launches there have
    options = {"num_warps": kernel.warps, "num_stages": min(kernel.stages, most), **kernel.options}
    made = triton.compile(source, target=_gpu_target(target), options=options)
    stages = {name: text for name, text in made.asm.items() if isinstance(text, str)}
    registers = spilled = None
    if "cubin" in made.asm:
        registers, spilled = _resources(made.asm["cubin"])
        code = disassemble(made.asm["cubin"]) if sass else ""
        if code:
            stages["sass"] = code
    elif "amdgcn" in stages:
        registers = _number(r"\.vgpr_count:\s+(\d+)", stages["amdgcn"])
        spilled = _number(r"\.private_segment_fixed_size:\s+(\d+)", stages["amdgcn"])
    # Warps that the compiler adds for specialization (loads, epilogues) count as well.
    warps = getattr(made.metadata, "num_warps", kernel.warps)
    added = _number(r'"ttg\.total-num-warps" = (\d+)', stages.get("ttgir", ""))
    return Compiled(kernel.name, target, stages, made.metadata.shared, registers, spilled, added or warps)


def compile_cuda(name: str, target: str) -> list[Compiled]:
    """Compile the source called ``name`` (a ``.cu`` file) with nvcc; one entry for each kernel in it.

    Raises:
        Unavailable: there is no nvcc.
        RuntimeError: the source does not compile.
    """
    path = source(name)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "out.cubin"
        report = compile_source(path, target, cubin)
        text = ptx_of(path, target)
        sass = disassemble(cubin.read_bytes())
    ptx = _entries(text)
    dynamic = re.findall(r"\.extern \.shared[^;]*?(\w+)\[\]", text)  # sized by the launch, unknown here
    made = []
    for symbol, usage in re.findall(
        r"Compiling entry function '(\w+)' for '\w+'(.*?)(?=ptxas info\s+: Compiling entry|\Z)", report, re.DOTALL
    ):
        own = ptx.get(symbol, "")
        threads = _number(r"\.maxntid (\d+)", own)
        if any(name in own for name in dynamic):
            threads = None
        stages = {"ptx": own}
        code = re.search(rf"(?ms)^\.text\.{symbol}:\n.*?(?=^\.text\.|^//-+ \.|\Z)", sass)
        if code:
            stages["sass"] = code.group()
        made.append(
            Compiled(
                readable(symbol),
                target,
                stages,
                _number(r"(\d+) bytes smem", usage) or 0,
                _number(r"Used (\d+) registers", usage),
                _number(r"(\d+) bytes stack frame", usage),
                threads // 32 if threads else None,
            )
        )
    return made


def readable(symbol: str) -> str:
    """Return a mangled name as in the source: by ``cu++filt`` or ``c++filt`` where there is one, else the bare name."""
    for program in ("cu++filt", "c++filt"):
        if shutil.which(program):
            done = subprocess.run([program, symbol], capture_output=True, text=True)
            if done.returncode == 0 and done.stdout.strip():
                return re.sub(r"^void |\(.*\)$", "", done.stdout.strip())
    length = re.match(r"_Z(?:N\w*?)?(\d+)", symbol)
    if length is None:
        return symbol
    return symbol[length.end() : length.end() + int(length.group(1))]


def _source(function: Any) -> Any:
    """Return Triton's class for the source of a kernel: Gluon's kernels have their own."""
    if getattr(function, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _gpu_target(target: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", int(target[3:]), 32) if target.startswith("sm_") else GPUTarget("hip", target, 64)


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else None


def _entries(ptx: str) -> dict[str, str]:
    """Split PTX by kernel, keyed by its symbol."""
    parts = re.split(r"(?=^\.(?:visible |weak )?\.?entry )", ptx, flags=re.MULTILINE)
    found = {}
    for part in parts:
        name = re.match(r"\.(?:visible |weak )?\.?entry (\w+)", part)
        if name:
            found[name.group(1)] = part
    return found


@cache
def tool(name: str) -> str | None:
    """Return a program of the CUDA toolkit: on the PATH, or the one that comes with Triton."""
    if triton is not None:
        path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
        if path.exists():
            return str(path)
    return shutil.which(name)


def missing_tools() -> list[str]:
    """List the missing programs that registers or SASS are read with."""
    return [name for name in ("cuobjdump", "nvdisasm") if tool(name) is None]


def _on_file(program: str | None, arguments: list[str], content: bytes) -> str:
    if program is None:
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(content)
        file.flush()
        return subprocess.run([program, *arguments, file.name], capture_output=True, text=True).stdout


def _resources(cubin: bytes) -> tuple[int | None, int | None]:
    """Read (registers of a thread, bytes of its stack) from machine code; None without ``cuobjdump``."""
    usage = _on_file(tool("cuobjdump"), ["--dump-resource-usage"], cubin)
    return _number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage)


def disassemble(cubin: bytes) -> str:
    """Return the SASS of machine code; empty without ``nvdisasm``."""
    return _on_file(tool("nvdisasm"), ["-c"], cubin)
