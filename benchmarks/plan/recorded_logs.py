"""Record decision logs of small runs on this machine, and decide each step again on a virtual clock.

    python benchmarks/plan/recorded_logs.py [--device cuda] [--kinds late,ahead,...] --out FOLDER

A tiny model with random weights meets prefixes, preemption, grammars, several choices, aborts, adapters and drafts
(``tests/helpers/recorded_runs.py``). Each log is written to ``FOLDER/DEVICE-KIND.log.gz``; in
``tests/explain/engine/logs/`` a test compares it with the simulated engine from then on. Ends with 1 if a decision
differs.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import tempfile
import time
from pathlib import Path

import _paths  # noqa: F401
from benchmarks import record

sys.path.append(str(record.ROOT / "tests" / "helpers"))
from recorded_runs import KINDS, decisions, met, recorded, save_models, simulated

from transect.explain.engine.replay import replay


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        models = Path(name)
        save_models(models)
        for kind in options.kinds.split(","):
            began, file = time.monotonic(), models / "run.log"
            log = recorded(models, file, kind, options.device)
            (options.out / f"{options.device}-{kind}.log.gz").write_bytes(gzip.compress(file.read_bytes(), mtime=0))
            file.unlink()
            expected, found = decisions(log), decisions(simulated(log))
            different = sum(a != b for a, b in zip(expected, found, strict=False)) + abs(len(expected) - len(found))
            again = replay(log).difference
            wrong += bool(different or again)
            print(
                f"{kind}: {len(expected)} steps, {different} decided otherwise by the simulation; replay: "
                f"{again or 'no difference'}; {', '.join(sorted(met(log)))}; {time.monotonic() - began:.0f} s",
                flush=True,
            )
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
