"""What the garbage collector looks at in a process that serves."""

import subprocess
import sys

import pytest

CYCLE = """
import os, sys, types
sys.modules["triton"] = types.SimpleNamespace(__version__=sys.argv[1])
from transect.engine.frontends.collector import keep_from_collector

class Cycle:
    def __init__(self):
        self.own = self
    def __del__(self, write=os.write):
        write(1, b"collected")

kept = Cycle()
keep_from_collector()
kept = None
import gc
gc.collect()
os.write(1, b"the end, ")
"""


@pytest.mark.parametrize(("triton", "said"), [("3.7.1", "the end, "), ("3.9.0+git", "the end, collected")])
def test_what_was_kept_from_it_is_collected_when_the_process_ends(triton, said):
    """Otherwise Triton 3.9 prints thirty lines about leaks whenever an engine ends."""
    done = subprocess.run([sys.executable, "-c", CYCLE, triton], capture_output=True, text=True)
    assert done.stdout == said, done.stderr
