"""Compiles an engine's kernels in several processes at once, before it needs them.

Triton compiles a kernel when it is first launched, one after another: about 20 s for all kernels of a model on a
machine that has never run it. Here the engine walks through its kinds of steps once without launching a kernel, on a
layer or two and on memory that is not filled. This takes less than a second and shows which kernels there are.
Processes compile them (``compilers.py``) while the engine loads weights. A file beside Triton's cache says that this
has been done for a model, these sources and this GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ....checkpoints.load import allocated
from ....costs.storage import Layouts
from ....models.decoder import Decoder
from ....models.fused_stack import FusedStack, Fusions, refusal
from ....models.weights.kinds import kinds_for
from ....ops.lang.collecting import CollectedKernel, collected
from ....ops.lang.jit import INTERPRETED
from ....ops.opset import OpSet
from ....spec.model import ModelConfig
from .compilers import Compilers, hint, sources_digest
from .runner import GPURunner
from .step_plan import Variant
from .step_sizes import FEWEST_ROWS, ragged_rows, row_bucket, row_buckets

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelWork:
    """Limits of the engine whose steps are compiled for."""

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
    copy_kernels: bool = False
    chained_blocks: bool = False
    quantization: str | None = None
    layouts: Layouts = ()
    cache_dtype: torch.dtype | None = None
    """Data type of the KV cache; None for ``dtype``."""


@dataclass(slots=True)
class Warming:
    """Kernels that are being compiled, or none."""

    compilers: Compilers | None = None
    collected: int = 0

    def wait(self) -> int:
        """Wait until the kernels that every engine needs are compiled, and load each. Returns their number. A kernel
        that fails is not an error: it is compiled later."""
        return 0 if self.compilers is None else self.compilers.finish(_load)


def _load(kernel: CollectedKernel) -> None:
    """Load a compiled kernel from Triton's cache to the GPU."""
    kernel.load().run  # noqa: B018  (the property that loads its module)


def start(work: KernelWork, ops: OpSet, device: torch.device, compilers: Compilers | None, settings: str) -> Warming:
    """Start compiling all kernels, unless that has been done before. ``settings``: the configuration, for ``hint``."""
    if compilers is None or INTERPRETED:
        return Warming()
    note = hint(settings)
    key = hashlib.sha256(repr((dataclasses.replace(work.config, n_layers=1), work)).encode())
    key.update(f"{sources_digest()} {torch.cuda.get_device_name(device)}".encode())
    stamp = note.parent / f"transect-{key.hexdigest()[:24]}"
    if stamp.exists():
        with contextlib.suppress(OSError):  # a cache that may only be read
            note.touch()
        return Warming()
    major, minor = torch.cuda.get_device_capability(device)
    compilers.begin(10 * major + minor, (str(stamp), str(note)))
    with collected(compilers.submit):
        run(work, ops, device, compilers.all_needed)
    torch.cuda.empty_cache()
    return Warming(compilers, compilers.needed)


@torch.inference_mode()
def run(work: KernelWork, ops: OpSet, device: torch.device, all_needed: Callable[[], None]) -> None:
    """Run all kinds of steps on a layer or two, then call ``all_needed``, then run steps that only requests with
    penalties or grammars make."""
    # Norms in the products on both sides of them stand between two layers.
    config = dataclasses.replace(work.config, n_layers=1 + (ops.stream_products is not None), tied_embeddings=True)
    if len({work.config.layer_window(layer) for layer in range(work.config.n_layers)}) == 2:
        config = dataclasses.replace(config, n_layers=2, full_attention_layers=(0,))
    kinds = kinds_for(
        work.quantization, device, dependent_launch=work.dependent_launch, layouts=work.layouts,
        chained_blocks=work.chained_blocks, batch_invariant=work.deterministic,
    )  # fmt: skip
    model = allocated(Decoder(config, "meta", work.dtype, ops=ops, kinds=kinds), device)
    stacks: list[FusedStack] = []
    if refusal(config) is None:
        fusions = Fusions.all(work.fused_operators)
        for streams in (ops.stream_products, None):
            model.ops = dataclasses.replace(ops, stream_products=streams)
            stacks.append(FusedStack(model, max_positions=work.max_model_len, fusions=fusions))
    limits = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
    names = (*limits, "whole_prompts", "fine_rows", "copy_kernels")
    settings = {name: getattr(work, name) for name in names}
    caches = model.new_kv_cache(2, work.block_size, work.cache_dtype or work.dtype)
    drawing, plain = (GPURunner(model, *caches, graphs=False, sample_on_device=on, **settings) for on in (True, False))
    for task in tasks(work):
        if stacks:  # steps with prompts have their norms apart: their last layer is for some tokens only
            model.stack = stacks[task.tokens_each > 1]
        if task.beside:
            plain.compile_chunks(task.beside, task.rows)
        elif task.prompts:
            plain.compile_whole(task.rows, task.prompts, task.tokens_each)
        elif task.draws:
            drawing.compile(task.rows, task.tokens_each, task.rows)
        else:
            plain.compile(task.rows, task.tokens_each, task.rows if task.tokens_each == 1 else 0)
    all_needed()
    drawing.compile(1, 1, 1, Variant(adjust=True, logprobs=False))
    drawing.compile(1, 1, 1, Variant(masked=True))
    del model.stack, stacks  # they and the model hold each other, and with that the memory


class Task(NamedTuple):
    """One kind of step."""

    rows: int
    tokens_each: int
    draws: bool
    """True to include the kernels that draw, which are the same for every number of rows; False for layers and head
    only."""
    prompts: int = 0
    """Whole prompts of ``tokens_each`` tokens, after ``rows`` that decode."""
    beside: int = 0
    """Tokens of all ``rows``, some of which are for prompts while the others decode; ``tokens_each`` is then unused."""


def tasks(work: KernelWork) -> list[Task]:
    """List all steps to run by compile time, longest first: draws, attention with few rows, whole prompts."""
    sizes = row_buckets(work.max_num_seqs, work.fine_rows)
    ragged = [rows for rows in row_buckets(work.max_num_seqs) if rows >= FEWEST_ROWS] or [FEWEST_ROWS]
    found = [Task(sizes[0], 1, True)]
    found += [Task(rows, 1, False) for rows in reversed(sizes)]
    if work.whole_prompts is not None:
        # Behind any number of decodes (the table of rows has another size), and a number of tiles divisible by 16.
        least = max(work.whole_prompts[0] // FEWEST_ROWS, work.whole_prompts[1])
        for rows, each in [(0, 128), *((rows, least) for rows in ragged)]:
            if rows + FEWEST_ROWS * each <= work.max_num_batched_tokens and each <= work.max_model_len:
                found.append(Task(rows, each, False, FEWEST_ROWS))
    # Prompts beside decodes have rows of their own, however few they are.
    wider = sorted({*ragged, row_bucket(FEWEST_ROWS + work.max_num_seqs)}, reverse=True)
    for rows in wider:
        # As many tokens as the largest step has, some, and few: the tiles differ.
        few = {2, 6, 10, 12} if rows == FEWEST_ROWS and work.fine_rows else {2}
        for each in sorted({max(1, work.max_num_batched_tokens // rows // 16) * 16, 2 * 16, *few}, reverse=True):
            if rows * each <= work.max_num_batched_tokens and each <= work.max_model_len:
                found.append(Task(rows, each, False))
    for tokens in wider:  # as few tokens as such a table of rows can have
        rows = ragged_rows(tokens, tokens)
        if 2 * rows <= work.max_num_batched_tokens:
            found.append(Task(rows, 2, False, beside=tokens))
    return found
