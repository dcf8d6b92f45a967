"""Runs ``sglang.bench_serving`` for several levels of load in one process, so that its libraries are loaded once, while
the server starts.

Reads the script's command lines from standard input, each as a line with a JSON array, the script's path first. After
each it writes a line: ``DONE`` and, as JSON, what went wrong (empty: nothing).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import runpy
import sys
import traceback

DONE = "level done "
LIBRARIES = ("aiohttp", "numpy", "requests", "tqdm.asyncio", "transformers")


def main() -> None:
    """Run what is asked for until standard input closes."""
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        sys.argv = json.loads(line)
        failure = ""
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except (Exception, SystemExit):
            failure = traceback.format_exc()
        print(f"\n{DONE}{json.dumps(failure)}", flush=True)


if __name__ == "__main__":
    main()
