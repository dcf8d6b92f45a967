"""Puts the recorded results into the pages that quote them, so that no number in them is typed by hand.

A page has blocks ``<!-- results: NAME -->`` ... ``<!-- end -->``; what stands between is made from the JSON files under
``benchmarks/results/``.

    python benchmarks/render.py            rewrite the blocks
    python benchmarks/render.py --check    exit 1 if one of them is not what the results say
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import batching
import cpu_vs_llamacpp
import record

PAGES = ("README.md",)
BLOCK = re.compile(r"(<!-- results: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _load(name: str) -> dict[str, Any]:
    return json.loads((record.RESULTS / name).read_text())


def _origin(result: dict[str, Any], runs: int) -> str:
    machine = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"\n`{result['command']}` on {machine['cores']} cores of an {machine['processor']} "
        f"({result.get('kernels', 'C++ kernels')}), Python {machine['python']}, {versions}, commit "
        f"{machine['commit']}, median of {runs} rounds.\n"
    )


def llamacpp() -> str:
    """The race against llama.cpp."""
    result = _load("cpu/llamacpp.json")
    runs = next(iter(result["work"].values()))["ratio"]["runs"]
    return cpu_vs_llamacpp.table(result) + "\n" + _origin(result, runs)


def batching_table() -> str:
    """Continuous against static batching."""
    result = _load("cpu/batching.json")
    runs = next(iter(result["work"].values()))["continuous"]["output_tokens_per_second"]["runs"]
    return batching.table(result) + "\n" + _origin(result, runs)


BLOCKS: dict[str, Callable[[], str]] = {"llamacpp": llamacpp, "batching": batching_table}


def rendered(text: str) -> str:
    """The page with its blocks made anew.

    Raises:
        KeyError: a block that nothing here makes.
        FileNotFoundError: a block without a recorded result.
    """
    return BLOCK.sub(lambda match: match[1] + BLOCKS[match["name"]]() + match[3], text)


def main() -> int:
    stale = []
    for page in PAGES:
        path = Path(record.ROOT / page)
        text = path.read_text()
        fresh = rendered(text)
        if fresh != text:
            stale.append(page)
            if "--check" not in sys.argv:
                path.write_text(fresh)
    if stale and "--check" in sys.argv:
        print(f"not what the results say: {', '.join(stale)}; run python benchmarks/render.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
