"""Test the operator of docs/understand/operators.md in both directions, and the number of lines it takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FILE = Path(__file__).resolve().parents[2] / "examples" / "softcap.py"


def test_it_checks_itself_against_float64() -> None:
    environment = {**os.environ, "PYTHONPATH": str(FILE.parents[1] / "src")}
    done = subprocess.run([sys.executable, FILE], capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr
    assert "operator gradient of x" in done.stdout


def test_it_fits_in_eighty_lines() -> None:
    assert len(FILE.read_text().splitlines()) <= 80
