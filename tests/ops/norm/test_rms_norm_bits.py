"""The kernel of RMSNorm adds squares in one order, whatever the number of rows makes of it."""

import os
import re
import subprocess
import sys

COMPILE = """
from dataclasses import replace
import transect.ops.norm.add_rms_norm
from transect.ops.registry import get
from transect.ops.tools.compile import compile_kernel
for name in ("rms_norm", "add_rms_norm"):
    kernel = next(each for each in get(name).kernels() if each.name == "forward")
    one, even = {**kernel.constants, "n_rows": 1}, (*kernel.divisible, "n_rows")
    for own in (kernel, replace(kernel, constants=one), replace(kernel, divisible=even)):
        for dependent in (False, True):
            own = replace(own, constants={**own.constants, "DEPENDENT_LAUNCH": dependent})
            print(name, compile_kernel(own, "sm_90", sass=False).assembly, sep="\\n", end="\\0")
"""
VALUE = re.compile(r"(?:cvt\.f32\.bf16|mov\.b32|mov\.b16|shl\.b32|and\.b32)\s+(%\w+), (%\w+)")
HALVES = re.compile(r"mov\.b32\s+\{(%\w+), (%\w+)\}, (%\w+)")
PRODUCT = re.compile(r"(mul\.f32|fma\.rn\.f32)\s+%\w+, (%\w+), (%\w+)")


def squares(assembly):
    """Return (instruction, register and half that it squares), in order; registers are numbered as they come."""
    source, numbers, found = {}, {}, []
    for line in assembly.splitlines():
        if halves := HALVES.search(line):
            source[halves[1]], source[halves[2]] = f"{halves[3]} low", f"{halves[3]} high"
        elif value := VALUE.search(line):
            half = {"shl.b32": " low", "and.b32": " high"}.get(line.split()[0], "")
            source[value[1]] = source.get(value[2], value[2]) + half
        elif (product := PRODUCT.search(line)) and product[2] == product[3]:
            register, _, half = source.get(product[2], product[2]).partition(" ")
            found.append((product[1], numbers.setdefault(register, len(numbers)), half))
    return found


def test_squares_are_added_in_one_order():
    """The compiler fuses a product with each sum but the first, and could fuse the other of the first two."""
    compiler = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=compiler)
    assert done.returncode == 0, done.stderr[-3000:]
    *assemblies, rest = done.stdout.split("\0")
    orders = [squares(assembly) for assembly in assemblies]
    assert len(orders) == 12 and not rest.strip() and len(orders[0]) == 16
    assert all(order == orders[0] for order in orders[1:])
