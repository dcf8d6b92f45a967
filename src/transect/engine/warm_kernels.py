"""Compile an engine's kernels in several processes at once, before it needs them.

Triton compiles a kernel when it is first launched, one after another: some 20 s for all kernels of a model on a machine
that has never run it. What is compiled goes to Triton's cache on disk. So a few processes, each with one layer of the
model on memory that is not filled, run the engine's steps at a share of the sizes each, while the engine itself loads
weights. A file beside the cache says that this has been done for a model, these sources and this GPU.

    python -m transect.engine.warm_kernels      (the work as a pickle on standard input)
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from ..models.config import ModelConfig
from ..ops import cuda
from .step_sizes import FEWEST_ROWS, row_buckets

log = logging.getLogger(__name__)

MOST_PROCESSES = 10
CUDA_SOURCES = ("small_matmul", "small_matmul_hopper")
"""What nvcc compiles; in seconds, so it begins before the processes ask for it."""
CONTEXT_BYTES = 3 * 2**29
"""Of a process with one layer, beside its embedding."""


@dataclass(frozen=True, slots=True)
class Work:
    """What to run: the steps of an engine with these limits, on one layer of the model."""

    config: ModelConfig
    dtype: torch.dtype
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    deterministic: bool
    dependent_launch: bool
    fused_operators: bool
    whole_prompts: tuple[int, int] | None = None
    fine_rows: bool = False
    share: int = 0
    """This process takes the sizes number ``share``, ``share + of``, ..."""
    of: int = 1


@dataclass(slots=True)
class Warming:
    """Processes at work, or none."""

    processes: list[subprocess.Popen[bytes]]
    stamp: Path | None = None

    def wait(self) -> int:
        """Until all have ended; how many there were. One that fails is no error: its kernels are compiled later."""
        failed = [process.wait() for process in self.processes]
        if self.stamp is not None and not any(failed):
            self.stamp.touch()
        elif any(failed):
            log.info("%d of %d processes that compile kernels failed", sum(map(bool, failed)), len(failed))
        return len(self.processes)


def start(work: Work, device: torch.device) -> Warming:
    """Begin, unless it has been done before or there are too few cores for it to help."""
    stamp = _stamp(work, device)
    free, _ = torch.cuda.mem_get_info(device)
    each = CONTEXT_BYTES + work.config.vocab_size * work.config.dim * work.dtype.itemsize
    count = min(MOST_PROCESSES, len(os.sched_getaffinity(0)) - 2, free // (4 * each))
    if count < 2 or (stamp is not None and stamp.exists()):
        return Warming([])
    for name in CUDA_SOURCES:
        threading.Thread(target=_build, args=(name,), daemon=True).start()
    processes = []
    for share in range(count):
        command = [sys.executable, "-m", __spec__.name]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(dataclasses.replace(work, share=share, of=count)))
        process.stdin.close()
        processes.append(process)
    return Warming(processes, stamp)


def _build(name: str) -> None:
    """Begin to compile a CUDA source; who needs it waits for it, or compiles it again and reports what is wrong."""
    with contextlib.suppress(RuntimeError):
        cuda.library(name)


def _stamp(work: Work, device: torch.device) -> Path | None:
    """The file that says that this work has been done; None where Triton's cache is no folder."""
    import triton

    folder = Path(triton.knobs.cache.dir)
    key = hashlib.sha256(repr((dataclasses.replace(work.config, n_layers=1), work)).encode())
    key.update(f"{metadata.version('triton')} {torch.cuda.get_device_name(device)}".encode())
    sources = Path(__file__).parent.parent
    for path in sorted([*(sources / "ops").glob("*.py"), *(sources / "models").glob("*.py")]):
        key.update(path.read_bytes())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder / f"transect-{key.hexdigest()[:24]}"


def run(work: Work) -> None:
    """This process's share."""
    from ..models.decoder import Decoder
    from ..models.fused_stack import FusedStack, Fusions, join_weights, unsuitable
    from .gpu_build import gpu_ops, trial_runner

    device = torch.device("cuda", torch.cuda.current_device())
    config = dataclasses.replace(work.config, n_layers=1, tied_embeddings=True)
    ops = gpu_ops(device, deterministic=work.deterministic, early=work.dependent_launch)
    model = Decoder(config, "meta", work.dtype, ops=ops)
    join_weights(model, device)
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    if unsuitable(config) is None:
        model.stack = FusedStack(model, max_positions=work.max_model_len, fusions=Fusions.all(work.fused_operators))
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "whole_prompts")
    settings = {name: getattr(work, name) for name in names}
    for task in tasks(work)[work.share :: work.of]:
        runner = trial_runner(model, work.block_size, work.dtype, sample_on_device=task.draws, **settings)
        if task.prompts:
            runner.compile_whole(task.rows, task.prompts, task.tokens_each)
        else:
            runner.compile(task.rows, task.tokens_each, task.rows if task.draws or task.tokens_each == 1 else 0)


class Task(NamedTuple):
    """One kind of step."""

    rows: int
    tokens_each: int
    draws: bool
    """With the kernels that draw, which are the same for every number of rows; without, only layers and head."""
    prompts: int = 0
    """Whole prompts, of ``tokens_each``, behind ``rows`` that decode."""


def tasks(work: Work) -> list[Task]:
    """All that is to be run, what takes longest first."""
    sizes = row_buckets(work.max_num_seqs, work.fine_rows)
    ragged = [rows for rows in row_buckets(work.max_num_seqs) if rows >= FEWEST_ROWS] or [FEWEST_ROWS]
    found = [Task(sizes[0], 1, True)]
    found += [Task(rows, 1, False) for rows in sizes]
    for rows in ragged:
        # As many tokens as the largest step has, and few: the products' tiles differ.
        for each in {max(1, work.max_num_batched_tokens // rows // 16) * 16, 2 * 16}:
            if rows * each <= work.max_num_batched_tokens and each <= work.max_model_len:
                found.append(Task(rows, each, False))
    if work.whole_prompts is not None:
        # Behind any number of decodes (the table of rows has another size), and a number of tiles divisible by 16.
        least = max(work.whole_prompts[0] // FEWEST_ROWS, work.whole_prompts[1])
        for rows, each in [*((rows, least) for rows in ragged), (0, 128)]:
            if rows + FEWEST_ROWS * each <= work.max_num_batched_tokens and each <= work.max_model_len:
                found.append(Task(rows, each, False, FEWEST_ROWS))
    return found


def main() -> None:
    """Entry point."""
    with torch.inference_mode():
        run(pickle.load(sys.stdin.buffer))


if __name__ == "__main__":
    main()
