"""Compiles kernels of the registry; prints one JSON line a kernel. Run by test_compile.py.

For sm_90 the first kernel of each Triton function, for gfx942 the first operator of each family, for both the whole
family ``first``, and for each target those of ``SAMPLE``. With ``--prove`` all that are declared for a target.
"""

import json
import sys

from transect.hardware.targets import TARGETS
from transect.ops.registry import all_ops
from transect.ops.tools.compile import compile_kernel

SAMPLE = {
    "sm_80": ("matmul, tiles",),
    "sm_86": ("paged_attention, prefill_256, small blocks",),
    "sm_89": ("scaled8_tiles, portable, 64 rows", "paged_attention, decode, cache in fp8, other targets"),
    "sm_90": ("paged_attention, decode, cache in fp8", "paged_attention, prefill_hopper_128_of_7"),
    "sm_100": ("matmul, persistent",),
    "sm_120": ("matmul, tiles", "flash_attention, backward_queries"),
}
"""By target: operator and kernel."""

families, functions = set(), set()
for op in all_ops():
    family = op.reference.__module__.split(".")[2]
    new = family == "first" or family not in families
    families.add(family)
    for kernel in op.kernels():
        for target in kernel.targets:
            sampled = f"{op.name}, {kernel.name}" in SAMPLE.get(target, ())
            chosen = family == "first" or kernel.function not in functions
            wanted = (target == "sm_90" and chosen) or sampled or (target == "gfx942" and new)
            if target == "sm_90":
                functions.add(kernel.function)
            if not wanted and "--prove" not in sys.argv:
                continue
            made = compile_kernel(kernel, target, sass=False)
            line = {
                "op": op.name,
                "kernel": kernel.name,
                "target": target,
                "stages": sorted(made.stages),
                "registers": made.registers,
                "spilled": made.spilled_bytes,
                "shared": made.shared_bytes,
                "room": TARGETS[target].block_bytes,
                "access": made.access_bytes,
                "occupancy": made.occupancy,
            }
            print(json.dumps(line))
            sys.stdout.flush()
