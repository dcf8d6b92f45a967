"""Runs ``sglang.bench_serving`` for several levels of load in one process, so that its libraries are loaded once, while
the server starts.

Reads the script's command lines from standard input, each as a line with a JSON array, the script's path first. After
each it writes a line: ``DONE`` and, as JSON, what went wrong (empty: nothing).

Where prompts share prefixes, the generator asks its tokenizer for the whole vocabulary before each text that it makes
up: 400 times a tenth of a second. So the answer is kept.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import runpy
import sys
import traceback
from typing import Any

DONE = "level done "
LIBRARIES = ("aiohttp", "numpy", "requests", "tqdm.asyncio", "transformers")


def keep_vocabulary(tokenizer: Any) -> None:
    """Have each tokenizer of a class make its vocabulary once."""
    tokenizer.get_vocab = functools.cache(tokenizer.get_vocab)


def main() -> None:
    """Run what is asked for until standard input closes."""
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            library = importlib.import_module(name)
            if name == "transformers":
                keep_vocabulary(library.PreTrainedTokenizerFast)
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
