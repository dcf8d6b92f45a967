"""Compiles kernels of the registry; prints one JSON line a kernel. Run by test_compile.py.

For sm_90 the first three of each operator, and all that no older target has or that are of the family ``first``; for
the other targets those of ``SAMPLE``, and of gfx942 the first of each family and of the family ``first``. With
``--prove`` all that are declared for a target.
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
    "sm_100": ("matmul, persistent",),
    "sm_120": ("matmul, tiles", "flash_attention, backward_queries"),
}
"""By target: operator and kernel."""

families = set()
for op in all_ops():
    family = op.reference.__module__.split(".")[2]
    new = family == "first" or family not in families
    families.add(family)
    for number, kernel in enumerate(op.kernels()):
        for target in kernel.targets:
            sampled = f"{op.name}, {kernel.name}" in SAMPLE.get(target, ())
            chosen = number < 3 or family == "first" or "sm_80" not in kernel.targets
            wanted = (target == "sm_90" and chosen) or sampled or (target == "gfx942" and new)
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
