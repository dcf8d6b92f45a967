"""Compiles every kernel of the registry for every target; prints one JSON line a kernel. Run by test_compile.py."""

import json
import sys

from transect.ops.registry import all_ops
from transect.ops.tools.compile import compile_kernel

for op in all_ops():
    for kernel in op.kernels():
        for target in kernel.targets:
            made = compile_kernel(kernel, target)
            line = {
                "op": op.name,
                "kernel": kernel.name,
                "target": target,
                "stages": sorted(made.stages),
                "registers": made.registers,
                "spilled": made.spilled_bytes,
                "access": made.access_bytes,
                "occupancy": made.occupancy,
            }
            print(json.dumps(line))
            sys.stdout.flush()
