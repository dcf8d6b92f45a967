"""``sglang.bench_serving`` 0.5.3, SGLang's load generator, in a process of its own.

It speaks to any server of OpenAI's API, is one file of a wheel, and needs aiohttp, numpy, requests, tqdm and
transformers beside it. It draws lengths evenly and arrivals at random (Poisson) from a seed, and opens a connection for
each request. Its figures stand in results as it gives them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.peers.sglang_driver import DONE
from benchmarks.server.generators import GROUPS, OUTPUT, PREFIX, PROMPT, QUESTION, WARM_UP
from transect.bench.target import served_model


def sglang_script() -> Path:
    """Return the file of SGLang's generator.

    Raises:
        ValueError: it is not installed; the message says how to install it.
    """
    found = importlib.util.find_spec("sglang")
    path = None if found is None or found.origin is None else Path(found.origin).with_name("bench_serving.py")
    if path is None or not path.exists():
        raise ValueError("sglang is not installed: pip install --no-deps sglang==0.5.3, and aiohttp, requests, tqdm")
    return path


def sglang_command(
    url: str, folder: Path, rate: float, requests: int, seed: int, out: Path, *, prefixes: bool = False
) -> list[str]:
    """Build the command of one level.

    Args:
        folder: the model's, with its tokenizer.
        out: where its figures go.
        prefixes: prompts begin with one of ``GROUPS`` texts, and all are of one length.
    """
    options: dict[str, Any] = {
        "backend": "vllm",
        "base-url": url,
        "model": asyncio.run(served_model(url)),
        "tokenizer": folder,
        "dataset-name": "random-ids",
        "random-input-len": PROMPT[1],
        "random-output-len": OUTPUT[1],
        "random-range-ratio": PROMPT[0] / PROMPT[1],
        "num-prompts": requests,
        "request-rate": "inf" if math.isinf(rate) else f"{rate:g}",
        "warmup-requests": WARM_UP,
        "seed": seed,
        "output-file": out,
    }
    if prefixes:
        options |= {
            "dataset-name": "generated-shared-prefix",
            "gsp-num-groups": GROUPS,
            "gsp-prompts-per-group": -(-requests // GROUPS),
            "gsp-system-prompt-len": PREFIX,
            "gsp-question-len": QUESTION,
            "gsp-output-len": sum(OUTPUT) // 2,
        }
    command = [str(sglang_script()), "--disable-tqdm"]
    return command + [part for name, value in options.items() for part in (f"--{name}", str(value))]


class SglangGenerator:
    """SGLang's generator in a process of its own (``peers/sglang_driver.py``), which loads its libraries meanwhile.

    Raises:
        ValueError: it is not installed.
    """

    def __init__(self) -> None:
        sglang_script()
        self._home = tempfile.TemporaryDirectory()
        """It would keep prompts in the user's, and take them again for other seeds."""
        settings = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(record.ROOT / "benchmarks" / "peers" / "sglang_driver.py")],
            env=os.environ | settings | {"HOME": self._home.name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def level(
        self, url: str, folder: Path, rate: float, requests: int, seed: int, *, prefixes: bool = False
    ) -> dict[str, Any]:
        """Run one level and return its figures, in the form of this project's; arguments as of ``sglang_command``.

        Raises:
            ValueError: it failed; the message has its last words.
        """
        out = Path(self._home.name) / f"figures {rate:g} {seed}.jsonl"
        command = sglang_command(url, folder, rate, requests, seed, out, prefixes=prefixes)
        said, failure = "", "it has ended"
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # what it said before its end is read below
            print(json.dumps(command), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith(DONE):
                failure = json.loads(line.removeprefix(DONE))
                break
            said += line
        if failure or not out.exists():
            raise ValueError(f"sglang.bench_serving failed: {(said + failure)[-2000:]}")
        return sglang_summary(json.loads(out.read_text()), requests)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._home.cleanup()


def sglang_summary(found: dict[str, Any], requests: int) -> dict[str, Any]:
    """Convert its figures (milliseconds) to this project's form (seconds)."""

    def times(name: str) -> dict[str, float]:
        return {
            as_: found[f"{its}_{name}_ms"] / 1e3 for as_, its in (("mean", "mean"), ("p50", "median"), ("p99", "p99"))
        }

    return {
        "requests": requests,
        "succeeded": found["completed"],
        "seconds": found["duration"],
        "input_tokens": found["total_input_tokens"],
        "output_tokens": found["total_output_tokens"],
        "output_tokens_per_second": found["output_throughput"],
        "concurrency": found["concurrency"],
        "ttft": times("ttft"),
        "tpot": times("tpot"),
        "itl": times("itl"),
        "e2e": times("e2e_latency"),
    }
