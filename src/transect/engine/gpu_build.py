"""An engine on a CUDA GPU: weights, a dry run of the largest step, the KV cache from what is left, graphs.

Each part is timed; what it took and where the GPU's memory went is printed when the engine starts.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..models.config import ModelConfig
from ..models.cost import Storage, kv_bytes_per_token, weight_bytes
from ..models.decoder import Decoder
from ..models.fused_stack import Fusions
from ..models.load import kv_dtype
from ..models.load_device import load_on_device
from ..models.memory.serving import kept_for_graphs
from ..models.resolve import ModelSource
from ..ops.jit import dependent_launch as has_dependent_launch
from ..ops.opset import OpSet, dependent_launch, resolve_ops
from ..ops.registry import get
from ..ops.stream_products import StreamProducts
from ..text.grammar.constraint import MaskFiller
from . import warm_kernels
from .batch import Draw, ScheduledBatch, ScheduledRow
from .compilers import Compilers
from .config import EngineConfig
from .gpu_memory import GIB, MemoryAccount, refusal
from .gpu_runner import GPURunner
from .kv_size import KVSize, kv_size
from .sampling_params import SamplingParams
from .step_sizes import filled_rows, row_bucket, row_buckets

log = logging.getLogger(__name__)

WARM_WIDTHS = 2
"""Widths of block tables whose graphs are captured at the start (contexts up to 1024 and 2048 tokens)."""


WHOLE_PROMPTS = (1536, 96)
"""Tokens, in all and a row, from which whole prompts have an attention kernel of their own: where the Hopper kernel
pays (``ops/flash_attention_hopper.py``) with 16 heads and more."""


LAUNCHES = 9
"""Kernels of a layer."""
LAUNCH_SECONDS, MULTIPLIES = 70e-6, 600e12
"""Seconds in which the host launches a kernel, FLOPs of a product in a second: an H200 and its host."""


FILL_BYTES, FILL_TOKENS = 8 << 30, 256
"""Steps are filled up for models of so many bytes of weights, to so many tokens or max_num_seqs. On an H200 a step of
an 8B model takes, without attention, 5.0 ms for 128 tokens and 7.3 for 256; 128 tokens of a long prompt take 2.8.
Weights that take less time to read than attention over a few more queries does have nothing to gain."""


@dataclass(slots=True)
class StartupTimes:
    """Seconds by part, in order."""

    parts: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def done(self, part: str) -> None:
        """The part that ends now; the device has finished it."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.parts[part] = now - self._last
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.parts.items())


@dataclass(frozen=True, slots=True)
class GPUParts:
    """What ``build_engine`` needs to know of an engine on a GPU."""

    runner: GPURunner
    size: KVSize
    description: str
    """The start-up line."""
    report: tuple[str, ...]
    """Where the memory went, and the time."""
    fill_tokens: int | None
    """Up to how many tokens steps are filled (``filling.py``), if they are."""


def device_for(config: EngineConfig) -> tuple[torch.device, str]:
    """The device that a configuration runs on, and why.

    Raises:
        ValueError: ``cuda`` was asked for and cannot be used.
    """
    if config.device == "cpu":
        return torch.device("cpu"), "device=cpu"
    reason = None
    if not torch.cuda.is_available():
        reason = "torch sees no CUDA GPU"
    elif config.native:
        reason = "native=True asks for the C++ CPU kernels"
    else:
        try:
            import triton  # noqa: F401
        except ImportError:
            reason = "Triton is not installed: pip install 'transect[gpu]'"
    if reason is None:
        return torch.device("cuda", torch.cuda.current_device()), "a GPU is here"
    if config.device == "cuda":
        raise ValueError(f"device is cuda, but {reason}; give device='cpu' to run on the processor")
    return torch.device("cpu"), reason


def build_gpu(
    config: EngineConfig,
    source: ModelSource,
    device: torch.device,
    compilers: Compilers | None = None,
    began: float | None = None,
) -> GPUParts:
    """Load the model, size the cache, capture graphs; ``began``: when torch's import did (``time.perf_counter``).

    Raises:
        ValueError: the model or the cache does not fit, or a setting is at fault; the message says what to change.
    """
    _check_triton_cache()
    settings = repr(config)  # as the compilers know it
    times = StartupTimes() if began is None else StartupTimes(_last=began)
    if began is not None:
        times.done("torch")
    torch.cuda.init()
    model_config, dtype = source.config, kv_dtype(config.dtype)
    max_seqs, max_tokens = config.limits("cuda")
    free, total = torch.cuda.mem_get_info(device)
    others = total - free
    bits = dtype.itemsize * 8
    storage = Storage(linear=bits, embed=bits, head=bits, norm=bits, activation=bits, kv=bits)
    _check_weights(config, weight_bytes(model_config, storage), free, total)
    longest = config.max_model_len or model_config.max_position
    limits: dict[str, Any] = {"max_num_seqs": max_seqs, "max_num_batched_tokens": max_tokens, "max_model_len": longest}
    ops = gpu_ops(device, deterministic=config.deterministic, early=config.dependent_launch)
    config = without_graphs(config, ops)
    tricks = runner_tricks(config, model_config, dtype, device, ops)
    work = warm_kernels.Work(
        config=model_config,
        dtype=dtype,
        block_size=config.block_size,
        deterministic=config.deterministic,
        dependent_launch=config.dependent_launch,
        fused_operators=config.fused_operators,
        whole_prompts=tricks["whole_prompts"],
        fine_rows=tricks["fine_rows"],
        copy_kernels=tricks["copy_kernels"],
        **limits,
    )
    times.done("CUDA")
    warming = warm_kernels.start(work, ops, device, compilers, settings)
    if warming.collected:
        times.done(f"{warming.collected} kernels found")
    model = load_on_device(
        source,
        device=device,
        dtype=dtype,
        ops=ops,
        max_positions=longest,
        seed=config.seed or 0,
        fusions=Fusions.all(config.fused_operators),
    )
    times.done("weights")
    weights = int(weight_bytes(model_config, storage))
    before = torch.cuda.memory_allocated(device)
    compiled = warming.wait()
    times.done(f"{compiled} kernels compiled" if warming.collected else "kernels from the cache")
    held = torch.cuda.memory_allocated(device)
    runner = trial_runner(model, config.block_size, dtype, **tricks, **limits)
    tables = torch.cuda.memory_allocated(device) - held
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_steps(runner, **limits)
    peak = torch.cuda.max_memory_allocated(device) - held - tables
    del runner
    torch.cuda.empty_cache()
    times.done("dry run")
    filled = fill_tokens(config, model_config, storage)
    captured_fill = filled if filled is not None and filled <= tricks["graph_tokens"] else None
    per_token = kv_bytes_per_token(model_config, storage)
    captured = 0 if config.cuda_graphs == "off" else len(row_buckets(max_seqs, tricks["fine_rows"]))
    captured += 0 if captured_fill is None else len(filled_rows(captured_fill))
    graphs = kept_for_graphs(model_config.vocab_size, max_seqs, captured)
    graphs += int(peak * min(1.0, tricks["graph_tokens"] / max_tokens))
    account = MemoryAccount(
        total=total,
        usable=int(total * config.gpu_memory_utilization),
        others=others,
        weights=weights,
        tables=before - weights + tables,
        largest_step=peak,
        graphs=graphs,
    )
    size = _cache_size(config, account, max_seqs, longest, model_config.max_position, per_token)
    caches = model.new_kv_cache(size.num_blocks + 1, config.block_size, dtype)
    for cache in caches:
        cache[:, -1].zero_()
    limits["max_model_len"] = size.max_model_len
    runner = GPURunner(
        model,
        caches[0],
        caches[1],
        **limits,
        graphs=config.cuda_graphs != "off",
        sample_on_device=config.device_sampling,
        fill_masks=MaskFiller(),
        **tricks,
    )
    times.done("KV cache")
    if config.cuda_graphs == "on":
        runner.warm(row_buckets(max_seqs, tricks["fine_rows"]), WARM_WIDTHS, captured_fill)
        times.done(f"{0 if runner.graphs is None else len(runner.graphs)} CUDA graphs")
    name = torch.cuda.get_device_name(device)
    kernels = "torch's operators" if by_torch(ops) else "Triton kernels"
    how = [f"{kernels} on {name} in {str(dtype).removeprefix('torch.')}"]
    how += [f"CUDA graphs {config.cuda_graphs}"] + (["batch-invariant"] if config.deterministic else [])
    used = sum(cache.nbytes for cache in caches)
    report = (*account.lines(used), f"start-up: {times}")
    for line in report:
        log.info("%s", line)
    return GPUParts(runner, size, ", ".join(how), report, filled)


def runner_tricks(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, ops: OpSet
) -> dict[str, Any]:
    """What ``GPURunner`` is to do on this device, by the names of its arguments."""
    return {
        "whole_prompts": WHOLE_PROMPTS if config.prompt_attention and not config.deterministic else None,
        "prune_last_layer": config.prune_last_layer,
        # Without graphs, which torch's operators do not have, kernels that copy are for nothing; and a pass that
        # launches none (warm_kernels.py) still runs torch's, which read a step's lengths.
        "copy_kernels": config.copy_kernels and not by_torch(ops),
        # Products on Hopper take any number of rows (ops/small_matmul.py), but not in deterministic mode.
        "fine_rows": dtype == torch.bfloat16
        and not config.deterministic
        and not torch.version.hip
        and torch.cuda.get_device_capability(device) == (9, 0),
        "graph_tokens": graph_tokens(model) if config.prefill_graphs and config.cuda_graphs != "off" else 0,
        # torch's operators take no tokens that belong to no row.
        "pad_tokens": 1 if by_torch(ops) else None,
    }


def graph_tokens(config: ModelConfig) -> int:
    """Prompt tokens up to which a step is launched slower, kernel by kernel, than it is computed."""
    weights = config.n_layers * (config.dim * (2 * config.q_dim + 2 * config.kv_dim) + 3 * config.dim * config.ffn_dim)
    return int(config.n_layers * LAUNCHES * LAUNCH_SECONDS * MULTIPLIES / (2 * weights))


def fill_tokens(config: EngineConfig, model: ModelConfig, storage: Storage) -> int | None:
    """Up to how many tokens ``fill_steps`` fills steps; None where it is not asked for or does not pay."""
    seqs, most = config.limits("cuda")
    tokens = row_bucket(max(seqs, FILL_TOKENS))
    asked = config.fill_steps and config.max_mixed_tokens is None and config.policy == "continuous"
    return tokens if asked and tokens < most and weight_bytes(model, storage) >= FILL_BYTES else None


def gpu_ops(device: torch.device, *, deterministic: bool = False, early: bool = True) -> OpSet:
    """The operators of an engine on a GPU; ``early``: with dependent launch where the GPU has it (Hopper)."""
    ops = resolve_ops(device, ("triton", "torch"), batch_invariant=deterministic)
    early = early and has_dependent_launch(device)
    if early and not deterministic:
        ops = replace(ops, stream_products=StreamProducts(device))
    return dependent_launch(ops, early)


def by_torch(ops: OpSet) -> bool:
    """Whether paged attention is torch's: on a GPU that the kernels here are not made for."""
    return get("paged_attention").implementations[dict(ops.chosen)["paged_attention"]].backend == "torch"


def without_graphs(config: EngineConfig, ops: OpSet) -> EngineConfig:
    """The configuration, with CUDA graphs off where torch's paged attention runs: it reads lengths on the host."""
    if not by_torch(ops):
        return config
    reasons = "; ".join(f"{label} {reason}" for name, label, reason in ops.passed_over if name == "paged_attention")
    log.warning("torch's operators run, without CUDA graphs, which is slower (paged attention: %s)", reasons)
    return replace(config, cuda_graphs="off")


def trial_runner(
    model: Decoder, block_size: int, dtype: torch.dtype, *, sample_on_device: bool = True, **settings: Any
) -> GPURunner:
    """A runner without graphs on a cache of two blocks, to try steps with; ``settings`` as for ``GPURunner``."""
    caches = model.new_kv_cache(2, block_size, dtype)
    for cache in caches:
        cache.zero_()
    return GPURunner(model, *caches, graphs=False, sample_on_device=sample_on_device, **settings)


def run_largest_steps(runner: GPURunner, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
    """As much prefill as a step may hold, then as many decodes, all with logprobs."""
    # Every row writes to block 0, one over the other: what is measured does not depend on it.
    rows = min(max_num_seqs, max_num_batched_tokens)
    length = min(max_num_batched_tokens // rows, max_model_len)
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=5)
    blocks = [0] * max_model_len
    prompt = (0,) * length
    for decode in (False, True):
        start = length - 1 if decode else 0
        made = []
        for seq_id in range(rows):
            draw = Draw(seq_id, 0, seq_id, params, prompt, [])
            made.append(ScheduledRow(seq_id, start, length - start, prompt, [], blocks, (draw,)))
        runner.submit(ScheduledBatch(int(decode), tuple(made))).result()


def _check_triton_cache() -> None:
    """Before minutes are spent on weights: Triton compiles nothing that it cannot keep."""
    import triton

    folder = Path(triton.knobs.cache.dir)
    advice = "set TRITON_CACHE_DIR to a folder that can be written to"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Triton has no place for compiled kernels ({error}): {advice}") from error
    if not os.access(folder, os.W_OK):
        log.warning("Triton cannot write to %s, and will fail for kernels that it does not hold: %s", folder, advice)


def _check_weights(config: EngineConfig, needed: float, free: int, total: int) -> None:
    usable = min(free, int(total * config.gpu_memory_utilization))
    if needed > usable:
        advice = "take a smaller model" + ("" if config.dtype != "float32" else " or dtype='bfloat16'")
        raise ValueError(
            f"the weights take {needed / GIB:.1f} GiB and {usable / GIB:.1f} GiB of the GPU can be used "
            f"({free / GIB:.1f} GiB are free, gpu_memory_utilization is {config.gpu_memory_utilization}): {advice}"
        )


def _cache_size(
    config: EngineConfig, account: MemoryAccount, max_seqs: int, longest: int, positions: int, per_token: float
) -> KVSize:
    padding = int(per_token * config.block_size)
    left = account.for_cache - padding
    needed = int(per_token * (config.max_model_len or 1))
    if left < max(needed, padding):
        raise ValueError(refusal(account, max(needed, padding) + padding, config.max_model_len or 1, per_token))
    return kv_size(
        config,
        max_num_seqs=max_seqs,
        model_positions=positions,
        bytes_per_token=per_token,
        free_bytes=left,
        default_bytes=left,
    )
