"""Kernels are found without being launched, and compiled from what was found without a GPU."""

import os
import subprocess
import sys
import threading

import pytest

pytest.importorskip("triton")

SCRIPT = """
import threading
import torch, triton
from triton.runtime import driver
from transect.engine.executors.gpu.compilers import CompileTarget
from transect.ops.lang.collecting import collected
from transect.ops.linear.few_rows.triton import _rows

driver.set_active(CompileTarget(90))
x, weight = torch.zeros(32, 256, dtype=torch.bfloat16), torch.zeros(64, 256, dtype=torch.bfloat16)
tile = dict(BM=32, BN=64, BK=128, SPLIT=1, SWAP=True, BULK=False, DEPENDENT_LAUNCH=True, GATED=False, SQUARES=1)

def run(even):
    out = torch.zeros(32, 64, dtype=torch.bfloat16)
    sizes = (32, 64, 256, 256, 256, 64, 256, 1, 0.0, None)
    _rows[(1, 1, 1)](x, weight, None, out, *(None,) * 7, *sizes, EVEN=even, launch_pdl=True, num_stages=3, **tile)

compiled = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: compiled.append(cache_hit)
for repeat in range(2):
    found = []
    with collected(found.append):
        for even in (True, False, True):
            run(even)
    print("found", len(found), "compiled", len(compiled))
    for kernel in found:
        kernel.load()
    print("hits", compiled)

def elsewhere():
    _rows.warmup(x, weight, None, x, *(None,) * 7, *(16,) * 8, 1e-5, None, EVEN=False, grid=(1,), **tile)

compiled = []
with collected(found.append):
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
print("elsewhere", compiled)
"""


def test_each_is_found_once_and_compiled_ahead_of_time(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == [
        "found 2 compiled 0",
        "hits [False, False]",
        "found 2 compiled 2",  # also where they had been compiled in this process
        "hits [False, False, True, True]",
        "elsewhere [False]",  # another thread's launch is not held back
    ], done.stderr


def test_two_threads_collect_one_after_the_other():
    """Else the one that began first would leave the other's hook behind, and its thread would launch no more."""
    triton = pytest.importorskip("triton")
    from transect.ops.lang.collecting import collected

    hook = triton.knobs.runtime.jit_cache_hook
    inside, leave = threading.Event(), threading.Event()

    def other():
        with collected(print):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with collected(print):
        thread.start()
        inside.wait(0.5)
    leave.set()
    thread.join()
    assert inside.is_set()
    assert triton.knobs.runtime.jit_cache_hook is hook
