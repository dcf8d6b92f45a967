"""Lets a program of this folder import ``benchmarks`` and ``transect`` where neither is installed."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
