"""Reads a kernel's assembly: widths of its memory accesses, matrix instructions, occupancy."""

from __future__ import annotations

import re

from ...hardware.targets import TARGETS

_PTX_ACCESS = re.compile(r"\b(ld|st)\.global(?:\.[\w:]+?)*?(?:\.v(\d+))?\.[bfus](\d+)\b")
_PTX_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^\[]*\[[^\]]+\],\s*\[[^\]]+\],\s*(0x[0-9a-f]+|\d+)")
_PTX_BULK = re.compile(r"\bcp\.(?:async|reduce\.async)\.bulk(?:\.tensor)?\.(?:\dd\.)?(shared|global)")
_AMD_ACCESS = re.compile(r"\b(?:buffer|global)_(load|store)_(?:lds_)?(\w+?)(?:_d16(?:_hi)?)?\s")
_AMD_BYTES = {"b128": 16, "dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}
_AMD_BYTES |= {"ushort": 2, "sshort": 2, "short": 2, "ubyte": 1, "sbyte": 1, "byte": 1}
_MATRIX = {
    "wgmma": re.compile(r"\bwgmma\.mma_async\b"),
    "tcgen05": re.compile(r"\btcgen05\.mma\b"),
    "mma": re.compile(r"(?<!wg)(?<!\w)w?mma(?:\.mma)?\.sync\b"),
    "mfma": re.compile(r"\bv_mfma_\w+"),
}


def access_bytes(assembly: str) -> dict[str, dict[int, int]]:
    """Count the global accesses of PTX or AMD assembly: ``{"load": {16: 8}, "store": {16: 4}}`` counts each width in
    bytes.

    Width 0 stands for bulk copies (TMA), which move a whole tile. Copies that go straight to shared memory
    (``cp.async``, ``buffer_load ... lds``) count as loads.
    """
    found: dict[str, dict[int, int]] = {"load": {}, "store": {}}

    def count(kind: str, width: int) -> None:
        found[kind][width] = found[kind].get(width, 0) + 1

    for kind, vector, bits in _PTX_ACCESS.findall(assembly):
        count("load" if kind == "ld" else "store", int(vector or 1) * int(bits) // 8)
    for width in _PTX_COPY.findall(assembly):
        count("load", int(width, 0))
    for space in _PTX_BULK.findall(assembly):
        count("load" if space == "shared" else "store", 0)
    for kind, size in _AMD_ACCESS.findall(assembly):
        if size in _AMD_BYTES:
            count(kind, _AMD_BYTES[size])
    return found


def matrix_instructions(assembly: str) -> dict[str, int]:
    """Return the number of tensor-core instructions: ``wgmma`` (Hopper), ``tcgen05`` (Blackwell), ``mma`` (Ampere),
    ``mfma`` (AMD)."""
    counted = {name: len(pattern.findall(assembly)) for name, pattern in _MATRIX.items()}
    return {name: number for name, number in counted.items() if number}


def occupancy(target: str, warps: int, registers: int, shared_bytes: int) -> float | None:
    """Return the warps that fit on a multiprocessor at once, as a share of its maximum; None for a target without
    limits here.

    ``warps``: of a program. ``registers``: of a thread. ``shared_bytes``: of a program.
    """
    if target not in TARGETS:
        return None
    limits = TARGETS[target]
    step = limits.register_step
    of_warp = max(1, -(-registers * limits.lanes // step)) * step
    shared = shared_bytes + limits.reserved_bytes
    programs = min(limits.warps // warps, limits.registers // (of_warp * warps), limits.blocks)
    if shared:
        programs = min(programs, limits.shared_bytes // shared)
    return programs * warps / limits.warps
