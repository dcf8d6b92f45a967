"""Settings of an engine: one frozen description, the same for ``LLM``, ``AsyncEngine`` and the server."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from ..checkpoints.peft_config import target_names
from ..hardware.cores import SERVER_CORES, own_cores, usable_cores
from ..spec.layouts.ranks import RankLayout
from ..spec.numbers.registry import AUTO, cache_format, cache_formats, dtype_name, rounding, roundings
from ..spec.settings import About, changed_fields, check_values
from ..text.grammar.params import CACHE_BYTES
from .executors.gpu.options import GPUOptions
from .scheduling.drafters.registry import SpeculativeConfig
from .scheduling.policies.orders.registry import scheduling_policies
from .scheduling.scheduler_config import Batching

DEFAULT_BATCHED_TOKENS = {"cpu": 256, "cuda": 8192}
"""Default tokens in a step. Decoding streams wait for the prefill chunks of others: a step of this size takes 0.15 s on
a small CPU, and 0.2 s on an H200 with an 8B model."""
DEFAULT_NUM_SEQS = {"cpu": 64, "cuda": 256}
DEFAULT_TIMED_SEQS = {"cpu": 64, "cuda": 512}
"""Default of ``max_num_seqs`` if a time limits steps: more sequences run, so prompts wait less for a place."""

ONE_OR_MORE = About(least=1)
DTYPES = About(choices=lambda: (AUTO, "bfloat16", "float16", "float32"))
ROUNDINGS = About(choices=roundings)
CACHE_FORMATS = About(choices=lambda: (AUTO, *cache_formats()))


class StepLimit(NamedTuple):
    """Meaning of ``EngineConfig.mixed_step_limit``."""

    tokens: int | None = None
    """Largest number of tokens in a step in which sequences decode; None if only ``max_num_batched_tokens`` limits
    it."""
    seconds: float | None = None
    """Longest time of such a step; 0 for a multiple of the time that decodes alone take; None for no time limit."""
    fill: bool = False
    """Prefill in small chunks while decoding, when the whole batch finishes sooner."""


HUNG_AFTER_S, REPLACED_AFTER_S = 60.0, 20.0
"""Defaults of ``hung_after_s`` for an engine alone and for replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine. None leaves a choice to the engine, which prints the choice.

    Attributes:
        model: A built-in name, a ``.gguf`` file, a directory in Hugging Face layout, or a hub id.
        load_format: Load weights, or generate random ones (``dummy``). ``dummy`` draws from ``seed`` (or 0) in the
            shape of ``model``, which is a directory with a config.json or a built-in shape.
        revision: Branch, tag or commit of a hub id.
        adapter: An adapter in PEFT's layout for all requests: a directory or a hub id. It is added to the weights when
            they are loaded; beside packed weights (a GGUF file on the C++ kernels, ``int4``) it stays separate.
        enable_lora: Serve adapters beside the base, each to the requests that name it (``LoRARequest`` in Python,
            ``--lora-modules`` and ``model`` in a server). Rows of different adapters and of none share a batch.
        max_loras: Different adapters of sequences that run at the same time. Each takes a slot in the device's memory.
        max_lora_rank: Largest rank of an adapter.
        max_cpu_loras: Adapters kept in host memory; default: four times max_loras. The least recently used leave.
        lora_target_modules: Matrix that adapters may change, such as ``q_proj``; repeatable. Default: all of the
            layers. Fewer take less memory, and less time in each step.
        tokenizer: Location of the tokenizer and chat template, if not with the model; named like ``model``.
        tokenizer_revision: Branch, tag or commit of ``tokenizer``, if it is a hub id.
        chat_template: A file with a Jinja template, or the template itself, in place of the model's.
        generation_config: Sampling defaults: ``auto`` (the model's), ``none``, or a folder with a
            generation_config.json. The model's are in its generation_config.json or its GGUF file.
        override_generation_config: Keys of generation_config.json to override: ``{"temperature": 0.5}``.
        eos_token_ids: Tokens that end an answer; default: those in the model's files.
        dtype: Number format of the computation. ``auto``: on a GPU bfloat16, on a CPU the file's own formats with a KV
            cache in bfloat16. ``bfloat16`` on a CPU: also the inputs of products are rounded, which is up to twice as
            fast on processors with AVX512-BF16; others compute in float32. ``float32`` computes exactly the dequantized
            model; ``float16`` needs plain torch on a CPU. ``half`` and ``float`` mean ``float16`` and ``float32``.
        quantization: Round the matrices of all layers to this format when they are loaded. Default: weights as they
            are.
        kv_cache_dtype: Number format of the KV cache; ``auto``: the compute dtype. ``fp8`` (e4m3) takes half the bytes
            of bfloat16; values are divided by the checkpoint's scales if it has any, and clipped to 448. ``int8`` has a
            scale for each head of a token. On a CPU ``fp8`` runs in the C++ kernels unless ranks share the model.
        device: Device to run on. ``auto``: a CUDA GPU if there is one and Triton is installed.
        deterministic: Make a request's logits bit-identical in any batch and at any chunk size. Slower on a
            GPU, and compared on Hopper alone; the C++ CPU kernels are always deterministic.
        max_model_len: Longest prompt plus output, in tokens; default: the model's context, or less if the KV
            cache holds less.
        max_num_seqs: Concurrent sequences; default: 64, on a GPU 256, or 512 if steps are limited by time.
            The others wait.
        max_num_batched_tokens: Tokens per step, prefill plus decode; default: 256, on a GPU 8192, or
            max_num_seqs if larger. More make prefill faster, and the gaps between tokens longer.
        mixed_step_limit: Limit of steps with decoding sequences: ``full``, ``fill``, ``auto``, ``30ms`` or
            ``512tokens``; default: ``auto`` in a server, ``fill`` in ``LLM``. Running sequences get no token before the
            step ends, so shorter steps make the gaps between tokens shorter and the throughput lower. ``full``: no
            limit but ``max_num_batched_tokens``. ``512tokens``: a number of tokens. ``30ms``: a time; the engine learns
            how long steps take on this device, and allows more where a long queue would wait too long
            (``engine/scheduling/policies/budget.py``). ``auto``: 2.5 times the time of the decodes alone. ``fill``:
            prefill in small chunks while decoding, when the whole batch finishes sooner, though the last prompts begin
            later (``engine/scheduling/policies/filling.py``; on a GPU, for models of 8 GiB and more).
        block_size: Tokens in a KV block.
        num_kv_blocks: Size of the KV cache in blocks.
        kv_cache_bytes: Size of the KV cache in bytes.
        kv_cache_tokens: Size of the KV cache in tokens; default: as much as max_num_seqs and the memory allow. That is
            max_num_seqs sequences of max_model_len, in at most a quarter of the free memory and 2 GiB; on a GPU all
            memory that gpu_memory_utilization leaves.
        enable_prefix_caching: Keep the KV of finished prompts for later prompts with the same beginning.
        batching: Batch continuously, or in fixed batches (``static``) to compare with.
        scheduling_policy: Serve requests in order of arrival (``fcfs``), or by priority
            (``priority``). Under ``priority`` lower numbers run earlier, and waiting raises the rank; under ``fcfs`` a
            priority is an error. In both, the clients of a server share it by their weights.
        longest_first: Begin with the requests that may draw the most tokens; default: in ``LLM``, not in a server. Work
            that is all there ends sooner; in a server short requests would wait for long ones.
        scheduler_cls: Your own scheduler, ``FILE.py:Class`` or ``package.module.Class``: a subclass of
            ``engine.scheduling.scheduler.Scheduler``.
        speculative_config: Speculative decoding: ``{"method": "ngram"}``, ``"suffix"``, or, with a ``"model"``,
            ``"draft_model"`` and ``"eagle3"``; the answers are the same. Names are vLLM's:
            ``num_speculative_tokens`` (at most), ``prompt_lookup_min``, ``prompt_lookup_max``. The number of drafts of
            each step is chosen by expected gain.
        jump_ahead: Compute runs of tokens that a grammar forces in one step; off: draw each.
        grammar_cache_bytes: Memory in bytes of compiled grammars that are kept for later requests; the least recently
            used go first.
        max_queue: Maximum number of waiting requests; a server answers more with 503. Default: no limit.
        max_queue_bytes: Maximum memory of waiting requests in bytes; half of it per client. Default: no limit in
            ``LLM``.
        max_queue_wait: Maximum predicted wait in seconds; beyond it a server answers with 503. Default: no limit in
            ``LLM``.
        async_scheduling: Plan a step before the previous tokens are known; default: on a GPU.
        threads: CPU threads of the model; default: this process's cores, less one behind a server from 4 cores on.
            torch gets as many threads in this process, or 1 where the C++ kernels run, which have their own.
        native: Require or disable the compiled CPU kernels; default: use them if possible.
        seed: Seed of requests without one; default: random.
        tensor_parallel_size: Devices (on a CPU, processes) that share every matrix.
        pipeline_parallel_size: Groups of devices, each with some of the layers.
        data_parallel_size: Groups of devices, each with the whole model and its own requests. Behind a server these are
            separate engines; in an ``LLM`` they are one engine, whose steps they take together.
        enable_expert_parallel: Ranks of the tensor and data axes share the experts of a mixture, each whole on one
            rank. With data_parallel_size the ranks are one engine behind a server, too.
        first_device: Number of the GPU of the first rank; the others have those after it.
        check_plans: Compare the ranks' plans in every step, to find errors.
        decisions: Keep a log of the scheduler's decisions in memory (``engine/scheduling/decisions.py``).
        decision_log: Write the scheduler's decisions to this file; see ``transect explain``.
        hung_after_s: Seconds of silence after which the engine process counts as hung; default: 60, or 20 with
            replicas. ``/health`` says so, or another replica takes over its requests.
        fail_over: Continue the requests of a dead or hung replica on the others, and restart it.
        cuda_graphs: Capture decode steps at the start (``on``), at first use (``lazy``), or never.
        gpu: Optimizations on a GPU, which can be switched off to compare.
        gpu_memory_utilization: Share of the GPU's memory that the engine may fill.
        cpu_offload_gb: GiB of weights to move off each device; these layers stream from host memory. If it is
            more than the layers have, all of them stream (``models/streaming/``).
        offload_folder: Stream layers from a file in this folder on a fast disk, not from host memory.

    Raises:
        ValueError: a value is out of its range.
    """

    GROUPS: ClassVar[Mapping[str, str]] = {"model": "Model and text", "device": "Engine", "cuda_graphs": "GPU"}
    """First field of each group of settings."""
    REPLACED: ClassVar[Mapping[str, str]] = {
        "max_mixed_tokens": "mixed_step_limit, such as 512tokens",
        "fill_steps": "mixed_step_limit, fill or full",
        "itl_target": "mixed_step_limit, such as 30ms, auto or full",
        "policy": "batching (continuous, static), or scheduling_policy (fcfs, priority)",
    }
    """Settings of earlier versions, each with its replacement."""

    model: str
    load_format: Literal["auto", "dummy"] = "auto"
    revision: str | None = None
    adapter: str | None = None
    enable_lora: bool = False
    max_loras: Annotated[int, ONE_OR_MORE] = 8
    max_lora_rank: Annotated[int, ONE_OR_MORE] = 16
    max_cpu_loras: Annotated[int | None, ONE_OR_MORE] = None
    lora_target_modules: tuple[str, ...] = ()
    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    chat_template: str | None = None
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    eos_token_ids: tuple[int, ...] | None = None
    dtype: Annotated[str, DTYPES] = "auto"
    quantization: Annotated[str | None, ROUNDINGS] = None
    kv_cache_dtype: Annotated[str, CACHE_FORMATS] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic: bool = False
    max_model_len: Annotated[int | None, ONE_OR_MORE] = None
    max_num_seqs: Annotated[int | None, ONE_OR_MORE] = None
    max_num_batched_tokens: Annotated[int | None, ONE_OR_MORE] = None
    mixed_step_limit: str | None = None
    block_size: Annotated[int, ONE_OR_MORE] = 16
    num_kv_blocks: Annotated[int | None, About(least=1, also=("num_gpu_blocks_override",))] = None
    kv_cache_bytes: Annotated[int | None, About(least=1, also=("kv_cache_memory_bytes",))] = None
    kv_cache_tokens: Annotated[int | None, ONE_OR_MORE] = None
    enable_prefix_caching: Annotated[bool, About(option="prefix-caching", also=("enable_prefix_caching",))] = True
    batching: Batching = "continuous"
    scheduling_policy: Annotated[str, About(choices=scheduling_policies)] = "fcfs"
    longest_first: bool | None = None
    scheduler_cls: str | None = None
    speculative_config: Mapping[str, Any] | None = None
    jump_ahead: bool = True
    grammar_cache_bytes: Annotated[int, ONE_OR_MORE] = CACHE_BYTES
    max_queue: Annotated[int | None, ONE_OR_MORE] = None
    max_queue_bytes: Annotated[int | None, ONE_OR_MORE] = None
    max_queue_wait: Annotated[float | None, About(above=0)] = None
    async_scheduling: bool | None = None
    threads: Annotated[int | None, ONE_OR_MORE] = None
    native: bool | None = None
    seed: int | None = None
    tensor_parallel_size: Annotated[int, About(least=1, short="-tp")] = 1
    pipeline_parallel_size: Annotated[int, About(least=1, short="-pp")] = 1
    data_parallel_size: Annotated[int, About(least=1, short="-dp")] = 1
    enable_expert_parallel: bool = False
    first_device: Annotated[int, About(least=0)] = 0
    check_plans: bool = False
    decisions: bool = True
    decision_log: str | None = None
    hung_after_s: Annotated[float | None, About(above=0)] = None
    fail_over: bool = True
    cuda_graphs: Literal["on", "lazy", "off"] = "on"
    gpu: GPUOptions = field(default_factory=GPUOptions)
    gpu_memory_utilization: Annotated[float, About(above=0, most=1)] = 0.9
    cpu_offload_gb: Annotated[float, About(least=0)] = 0.0
    offload_folder: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        check_values(self)
        self._check_text()
        rounding(self.quantization)
        self._check_cache()
        if not isinstance(self.gpu, GPUOptions):
            raise ValueError(f"gpu must be GPUOptions(...), not {self.gpu!r}")
        self._check_offload()
        sizes = ("num_kv_blocks", "kv_cache_bytes", "kv_cache_tokens")
        given = [name for name in sizes if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"the size of the KV cache is given twice ({', '.join(given)}): give one of them")
        _step_limit(self.mixed_step_limit)
        if self.max_num_seqs is not None:
            self._check_steps(self.max_num_seqs)
        self._check_layout()
        self._check_speculation()
        self._check_lora()
        if self.decision_log is not None and not self.decisions:
            raise ValueError("decision_log names a file, but decisions is off: leave one of them out")

    @property
    def parallel_sizes(self) -> tuple[int, int, int]:
        """The sizes of the tensor, pipeline and data axes."""
        return self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size

    @property
    def ranks(self) -> int:
        """Processes of one engine, each with a device of its own."""
        return self.layout.size

    @property
    def layout(self) -> RankLayout:
        """The ranks of one engine."""
        return RankLayout(*self.parallel_sizes, self.enable_expert_parallel)

    @property
    def replicas(self) -> int:
        """Whole engines behind one server; each has a ``data_parallel_size`` of 1 then (``replicas.config_of``)."""
        return 1 if self.enable_expert_parallel else self.data_parallel_size

    @property
    def silence_s(self) -> float:
        """``hung_after_s``, or its default."""
        return self.hung_after_s or (HUNG_AFTER_S if self.replicas == 1 else REPLACED_AFTER_S)

    @property
    def shares_data(self) -> bool:
        """True if groups of ranks of one engine have requests of their own."""
        return self.layout.data > 1

    def _check_speculation(self) -> None:
        speculation = self.speculation
        if speculation is None:
            return
        if speculation.drafts_by_model and self.layout.pipeline > 1:
            raise ValueError(
                "a model that drafts would hold up all stages of a pipeline: take the speculative method ngram or "
                "suffix, or tensor_parallel_size in place of pipeline_parallel_size"
            )

    def _check_layout(self) -> None:
        RankLayout(*self.parallel_sizes)
        if not self.enable_expert_parallel:
            return
        if self.tensor_parallel_size * self.data_parallel_size == 1:
            raise ValueError(
                "enable_expert_parallel shares experts between the ranks of the tensor and data axes, and there is one "
                "such rank: give tensor_parallel_size or data_parallel_size, or leave it out"
            )

    def _check_lora(self) -> None:
        object.__setattr__(self, "lora_target_modules", tuple(self.lora_target_modules))
        target_names(self.lora_target_modules)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras ({self.max_cpu_loras}) must be at least max_loras ({self.max_loras}): raise it or "
                "lower that"
            )
        if not self.enable_lora:
            return
        if self.adapter is not None:
            raise ValueError(
                "adapter is for all requests and enable_lora for those that name one: leave one of them out"
            )
        if self.pipeline_parallel_size > 1 or self.enable_expert_parallel:
            raise ValueError(
                "enable_lora runs on one device, or on tensor parallel ranks of a CPU: leave out "
                "pipeline_parallel_size and enable_expert_parallel (replicas by data_parallel_size are possible), or "
                "merge the adapter (transect export --merge)"
            )
        if self.cpu_offload_gb or self.offload_folder:
            raise ValueError(
                "layers that stream take no adapters: leave out cpu_offload_gb and offload_folder, or enable_lora"
            )

    @property
    def cpu_loras(self) -> int:
        """``max_cpu_loras``, or its default."""
        return self.max_cpu_loras or 4 * self.max_loras

    def _check_cache(self) -> None:
        form = cache_format(self.kv_cache_dtype)
        if form is None or form.cache is None:
            return
        object.__setattr__(self, "kv_cache_dtype", form.name)
        if self.native and not form.cache.native:
            raise ValueError(f"a KV cache in {form.name} is not for native=True: leave out one of them")

    def _check_text(self) -> None:
        override = self.override_generation_config
        if override is not None and not isinstance(override, Mapping):
            raise ValueError(f'override_generation_config must be a mapping such as {{"top_k": 20}}, got {override!r}')
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise ValueError(f"generation_config must be auto, none or a folder, got {self.generation_config!r}")
        if self.eos_token_ids is not None:
            object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))

    def _check_offload(self) -> None:
        if self.offload_folder is not None and not self.cpu_offload_gb:
            raise ValueError("offload_folder holds layers that stream, and no layers stream: give cpu_offload_gb too")
        if self.cpu_offload_gb and self.native:
            raise ValueError(
                "native=True asks for the C++ kernels, which have all layers in memory: leave out cpu_offload_gb"
            )

    def _check_steps(self, seqs: int) -> None:
        """Check that a step has a token for every running sequence."""
        limits = (("max_num_batched_tokens", self.max_num_batched_tokens), ("mixed_step_limit", self.step_limit.tokens))
        for name, tokens in limits:
            if tokens is not None and tokens < seqs:
                raise ValueError(f"{name} ({tokens}) must be at least max_num_seqs ({seqs}): raise it or lower that")

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """``speculative_config`` in the scheduler's form."""
        return None if self.speculative_config is None else SpeculativeConfig.of(self.speculative_config)

    def limits(self, device: str) -> tuple[int, int]:
        """Return max_num_seqs and max_num_batched_tokens, with the defaults of a device type (``cpu``, ``cuda``).

        Raises:
            ValueError: mixed_step_limit is below the default of max_num_seqs.
        """
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if seqs is None:
            default = (DEFAULT_NUM_SEQS if self.step_limit.seconds is None else DEFAULT_TIMED_SEQS)[device]
            seqs = min(default, tokens or default)
            self._check_steps(seqs)
        return seqs, max(DEFAULT_BATCHED_TOKENS[device], seqs) if tokens is None else tokens

    def max_rows(self, device: str) -> int:
        """Return the most rows of a decode step, those of drafts included, with the defaults of a device type."""
        seqs, tokens = self.limits(device)
        return seqs if self.speculation is None else self.speculation.rows(seqs, tokens)

    def for_server(self) -> EngineConfig:
        """Return this configuration with a server's defaults: a time limits steps."""
        if self.mixed_step_limit is not None or self.batching == "static":
            return self
        return dataclasses.replace(self, mixed_step_limit="auto")

    @property
    def step_limit(self) -> StepLimit:
        """``mixed_step_limit``, parsed."""
        return _step_limit(self.mixed_step_limit)

    def cpu_threads(self, *, served: bool = False) -> int:
        """Return ``threads``, or the number of cores that this process may use and gets time on (``usable_cores``),
        limited by ``OMP_NUM_THREADS`` if that is set.

        Args:
            served: leave a core for the process of an HTTP server, if each rank has ``SERVER_CORES`` cores.

        Raises:
            ValueError: more threads than cores. They would wait for each other at every barrier of a step, and keep
                whatever else runs on the machine waiting too.
        """
        cores = len(own_cores())
        if self.threads is not None and self.threads > cores:
            raise ValueError(
                f"threads is {self.threads}, but this process may use {cores} cores: set it to that or less"
            )
        first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # it may be a list, one for each nesting
        asked = max(1, int(first)) if first.isdecimal() else cores
        usable = usable_cores()
        return self.threads or min(usable - (served and usable >= SERVER_CORES * self.ranks), asked)

    def __str__(self) -> str:
        """List the fields that differ from their defaults, for the start-up line."""
        return ", ".join(changed_fields(self))


def _step_limit(text: object) -> StepLimit:
    """Read a ``mixed_step_limit``."""
    named = {None: StepLimit(), "full": StepLimit(), "fill": StepLimit(fill=True), "auto": StepLimit(seconds=0.0)}
    if text is None or (isinstance(text, str) and text in named):
        return named[text]
    if isinstance(text, str):
        number, unit = text.rstrip("abcdefghijklmnopqrstuvwxyz"), text.lstrip("0123456789. ")
        try:
            if unit == "tokens" and int(number) > 0:
                return StepLimit(tokens=int(number))
            if unit == "ms" and 0 < float(number) < math.inf:
                return StepLimit(seconds=float(number) / 1e3)
        except ValueError:
            pass
    raise ValueError(f"mixed_step_limit must be full, fill, auto, a time such as 30ms, or 512tokens, not {text!r}")
