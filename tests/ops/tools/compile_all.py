"""Compiles every kernel of the registry; prints one JSON line a kernel. Run by test_compile.py.

For sm_90 and gfx942 all of them; for sm_80, which differs little from sm_90, the first of each operator.
"""

import json
import sys

from transect.ops.registry import all_ops
from transect.ops.tools.compile import compile_kernel

for op in all_ops():
    for number, kernel in enumerate(op.kernels()):
        for target in kernel.targets:
            if target == "sm_80" and number:
                continue
            made = compile_kernel(kernel, target, sass=False)
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
