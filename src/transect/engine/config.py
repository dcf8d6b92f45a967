"""How an engine runs: one frozen description, the same for ``LLM``, ``AsyncEngine`` and the server."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..hardware.cores import usable_cores
from ..spec.layouts.ranks import RankLayout
from ..spec.numbers.registry import cache_format, dtype_name, rounding
from .executors.gpu.options import GPUOptions
from .scheduling.drafters.registry import SpeculativeConfig
from .scheduling.scheduler_config import Policy

DEFAULT_BATCHED_TOKENS = {"cpu": 256, "cuda": 8192}
"""Tokens of a step. Decoding streams wait for the prefill chunks of others: this many keep a small CPU for 0.15 s, and
an H200 with an 8B model for 0.2 s."""
DEFAULT_NUM_SEQS = {"cpu": 64, "cuda": 256}
DEFAULT_TIMED_SEQS = {"cpu": 64, "cuda": 512}
"""The same where steps are sized by time, as servers do: a place for a prompt is one that it does not wait for."""

HUNG_AFTER_S, REPLACED_AFTER_S = 60.0, 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What to run and with which limits. None leaves a choice to the engine, which prints what it chose.

    Attributes:
        model: a name for ``checkpoints.resolve.resolve``.
        load_format: ``auto``, or ``dummy``: random weights (of ``seed``, or 0) in the shape of a config.json; ``model``
            is a directory that holds one, or a name of ``models.presets``.
        revision: branch, tag or commit of a hub id.
        adapter: directory or hub id of an adapter in PEFT's layout, for all requests. It is added to the weights when
            they are loaded; where they are packed (a GGUF file on the C++ kernels, ``int4``) it stays beside them.
        tokenizer: where the tokenizer and its chat template are, if not with the model; a name as for ``model``.
        tokenizer_revision: branch, tag or commit of that, if it is a hub id.
        chat_template: a file with a Jinja template, or the template itself, in place of the model's.
        generation_config: ``auto``: sampling defaults are those of the model's generation_config.json or GGUF file;
            ``none``: they are not; or a folder with another generation_config.json.
        override_generation_config: keys of generation_config.json that go over it: ``{"temperature": 0.5}``.
        eos_token_ids: tokens that end an answer; None: those that the model's files name.
        dtype: ``auto`` (the file's own formats, KV cache in bfloat16), ``float32`` (exactly the dequantized model),
            ``bfloat16`` or ``float16`` (on torch alone). On a GPU ``auto`` is bfloat16. ``half`` and ``float`` are read
            as ``float16`` and ``float32``.
        quantization: ``int4``: the layers' matrices are rounded to 4 bits (groups of 128) when they are loaded, and
            multiplied so by the GPU and the C++ CPU kernels; None: weights as they are.
        kv_cache_dtype: ``auto``: keys and values are cached in the compute dtype. ``fp8``: in e4m3, at half the bytes
            of bfloat16, divided by the checkpoint's scales where it has any; what is beyond 448 becomes 448. ``int8``:
            with a scale for each head of a token. Both by Triton kernels on a GPU (fp8 on Hopper by a kernel in CUDA
            C++ where steps decode); on a CPU fp8 by the C++ kernels where no ranks share the model, else plain torch.
        device: ``auto`` (a CUDA GPU if there is one and Triton is installed), ``cpu`` or ``cuda``.
        deterministic: a request's logits are the same to the bit alone and in any batch, at any chunk size, with the
            prefix cache or without; slower on a GPU. The C++ CPU kernels are so always.
        cuda_graphs: ``on`` captures the steps that only decode when the engine starts, ``lazy`` each when it first
            comes, ``off`` none.
        gpu: switches of what makes a GPU fast, to see what each is worth.
        gpu_memory_utilization: share of the GPU's memory that the engine may fill.
        cpu_offload_gb: GiB by which the weights on each device become smaller, because layers live in host memory and
            stream to it in every step (``models/streaming/``); more than the layers have: all of them stream.
        offload_folder: a folder on a fast disk, in which those layers live in place of host memory.
        max_model_len: longest prompt and output together, in tokens; None: the model's, or what the cache holds.
        max_num_seqs: sequences that run at the same time; None: 64, on a GPU 256, in servers there 512.
        max_num_batched_tokens: tokens of one step, prefill and decode together; None: 256, on a GPU 8192, or
            max_num_seqs if larger.
        max_mixed_tokens: tokens of one step in which sequences decode; None: max_num_batched_tokens. With fewer the
            tokens of those that decode come more evenly while prompts are computed, and fewer come in all.
        fill_steps: while sequences decode, fill steps up to the tokens that cost little more than theirs alone, not to
            max_num_batched_tokens, as long as nothing ends later for it: prompts ride along with weights that are read
            anyway, and all ends sooner, though the last prompts begin later
            (``engine/scheduling/policies/filling.py``). On a GPU, for models whose weights take long enough to read,
            and where max_mixed_tokens is None. None: in ``LLM``, not in a server.
        itl_target: milliseconds that a step may take in which sequences decode; ``auto``: 2.5 times what the decodes
            alone take; ``off``: steps are not sized by time. The engine learns how long steps take on this device, and
            makes them longer where a long queue would wait too long (``engine/scheduling/policies/budget.py``).
            None: ``off`` in ``LLM``, ``auto`` in a server unless max_mixed_tokens or fill_steps sizes its steps.
        block_size: tokens in a KV block.
        num_kv_blocks, kv_cache_bytes, kv_cache_tokens: size of the KV cache, in one of three units; None: what
            max_num_seqs sequences of max_model_len can use, and at most a quarter of the memory that is free or 2 GiB,
            on a GPU all that gpu_memory_utilization leaves.
        enable_prefix_caching: keep the KV of finished prompts for later ones that begin alike.
        policy: ``continuous``, or ``static`` to compare with.
        longest_first: begin with the requests that may draw the most tokens, so that work that is all there ends
            sooner; None: in ``LLM``, not in a server, where short requests would wait for long ones.
        speculative_config: speculative decoding, as a JSON object with vLLM's names: ``{"method": "ngram"}`` or
            ``"suffix"``, ``num_speculative_tokens`` (at most), ``prompt_lookup_min``, ``prompt_lookup_max``. Answers
            stay the same; the number of drafts of each step is chosen by expected gain. None for none.
        jump_ahead: tokens that a grammar forces are computed together, not drawn one by one.
        max_queue: requests that may wait; one more is refused. None: no bound.
        async_scheduling: plan a step ahead of the tokens; None: on a GPU.
        threads: CPU threads of the model; None: the cores that this process may use. They become torch's number of
            threads in this process too, or 1 where the C++ kernels run, which have their own.
        native: the C++ kernels: True insists, False forbids, None uses them if they can run.
        seed: for requests without a seed of their own; None: a random one.
        tensor_parallel_size: devices between which every matrix is cut (``parallel/``); on a CPU, processes.
        pipeline_parallel_size: groups of devices, each of which has some of the layers.
        data_parallel_size: groups of devices, each with the whole model and requests of its own: whole engines behind a
            server, and one engine, whose steps they take together, in an ``LLM``.
        enable_expert_parallel: the ranks of the tensor and data axes share the experts of a mixture, each of which is
            whole on one of them. With data_parallel_size they are one engine behind a server, too.
        first_device: number of the GPU that the first rank has; the others have those after it.
        check_plans: to find errors: the ranks compare what they planned in every step.
        decisions: keep a log of what the scheduler decides, in memory (``decisions.py``).
        decision_log: a file that gets this log too, from the start to the end.
        hung_after_s: silence of the engine process, in seconds, that counts as a hung step; None: 60, or 20 where other
            replicas can take over its requests.
        fail_over: continue the requests of a replica that has ended or hangs in the others, and start it again.

    Raises:
        ValueError: a value is out of its range.
    """

    model: str
    load_format: Literal["auto", "dummy"] = "auto"
    revision: str | None = None
    adapter: str | None = None
    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    chat_template: str | None = None
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    eos_token_ids: tuple[int, ...] | None = None
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic: bool = False
    cuda_graphs: Literal["on", "lazy", "off"] = "on"
    gpu: GPUOptions = field(default_factory=GPUOptions)
    gpu_memory_utilization: float = 0.9
    cpu_offload_gb: float = 0.0
    offload_folder: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_mixed_tokens: int | None = None
    fill_steps: bool | None = None
    itl_target: float | Literal["auto", "off"] | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_tokens: int | None = None
    enable_prefix_caching: bool = True
    policy: Policy = "continuous"
    longest_first: bool | None = None
    speculative_config: Mapping[str, Any] | None = None
    jump_ahead: bool = True
    max_queue: int | None = None
    async_scheduling: bool | None = None
    threads: int | None = None
    native: bool | None = None
    seed: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    first_device: int = 0
    check_plans: bool = False
    decisions: bool = True
    decision_log: str | None = None
    hung_after_s: float | None = None
    fail_over: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        self._check_text()
        rounding(self.quantization)
        self._check_cache()
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format must be auto or dummy, not {self.load_format!r}")
        for name, allowed in (("device", ("auto", "cpu", "cuda")), ("cuda_graphs", ("on", "lazy", "off"))):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be {', '.join(allowed[:-1])} or {allowed[-1]}, not {getattr(self, name)!r}"
                )
        if not isinstance(self.gpu, GPUOptions):
            raise ValueError(f"gpu must be GPUOptions(...), not {self.gpu!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, not {self.gpu_memory_utilization}")
        self._check_offload()
        _positive("block_size", self.block_size)
        sizes = ("num_kv_blocks", "kv_cache_bytes", "kv_cache_tokens")
        limits = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_mixed_tokens")
        for name in (*limits, "max_queue", "threads", *sizes):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        given = [name for name in sizes if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"the size of the KV cache is given twice ({', '.join(given)}): give one of them")
        if self.policy not in ("continuous", "static"):
            raise ValueError(f"policy must be continuous or static, not {self.policy!r}")
        if isinstance(self.itl_target, str):
            object.__setattr__(self, "itl_target", _target(self.itl_target))
        if isinstance(self.itl_target, int | float) and not 0 < self.itl_target < math.inf:
            raise ValueError(f"itl_target must be a number of milliseconds, auto or off, got {self.itl_target!r}")
        if self.max_num_seqs is not None:
            self._check_steps(self.max_num_seqs)
        self._check_layout()
        if self.speculation is not None and self.ranks > 1:
            raise ValueError(
                "speculative decoding runs on one device so far: leave out speculative_config, or the parallel sizes"
            )
        if self.decision_log is not None and not self.decisions:
            raise ValueError("decision_log names a file, but decisions is off: leave one of them out")
        if self.hung_after_s is not None and not self.hung_after_s > 0:
            raise ValueError(f"hung_after_s must be above 0, got {self.hung_after_s}")

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
        """Whether groups of ranks of one engine have requests of their own."""
        return self.layout.data > 1

    def _check_layout(self) -> None:
        RankLayout(*self.parallel_sizes)
        if not self.enable_expert_parallel:
            return
        if self.tensor_parallel_size * self.data_parallel_size == 1:
            raise ValueError(
                "enable_expert_parallel shares experts between the ranks of the tensor and data axes, and there is one "
                "such rank: give tensor_parallel_size or data_parallel_size, or leave it out"
            )

    def _check_cache(self) -> None:
        form = cache_format(self.kv_cache_dtype)
        if form is None or form.cache is None:
            return
        object.__setattr__(self, "kv_cache_dtype", form.name)
        native = self.native and not form.cache.native
        if native or self.deterministic:
            name = "native=True" if native else "deterministic"
            raise ValueError(f"a KV cache in {form.name} is not for {name}: leave out one of them")

    def _check_text(self) -> None:
        override = self.override_generation_config
        if override is not None and not isinstance(override, Mapping):
            raise ValueError(f'override_generation_config must be a mapping such as {{"top_k": 20}}, got {override!r}')
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise ValueError(f"generation_config must be auto, none or a folder, got {self.generation_config!r}")
        if self.eos_token_ids is not None:
            object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))

    def _check_offload(self) -> None:
        gib = self.cpu_offload_gb
        if isinstance(gib, bool) or not isinstance(gib, int | float) or not gib >= 0:
            raise ValueError(f"cpu_offload_gb must be a number of GiB, 0 or more, got {gib!r}")
        if self.offload_folder is not None and not gib:
            raise ValueError("offload_folder says where layers live that stream, and none do: give cpu_offload_gb too")
        if gib and self.native:
            raise ValueError(
                "native=True asks for the C++ kernels, which have all layers in memory: leave out cpu_offload_gb"
            )

    def _check_steps(self, seqs: int) -> None:
        """Every sequence that runs needs a token of each step."""
        for name in ("max_num_batched_tokens", "max_mixed_tokens"):
            tokens = getattr(self, name)
            if tokens is not None and tokens < seqs:
                raise ValueError(f"{name} ({tokens}) must be at least max_num_seqs ({seqs}): raise it or lower that")

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """``speculative_config`` as the scheduler takes it."""
        return None if self.speculative_config is None else SpeculativeConfig.of(self.speculative_config)

    def limits(self, device: str) -> tuple[int, int]:
        """max_num_seqs and max_num_batched_tokens with the defaults of a device type (``cpu``, ``cuda``).

        Raises:
            ValueError: max_mixed_tokens is below the default of max_num_seqs.
        """
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if seqs is None:
            default = (DEFAULT_NUM_SEQS if self.itl_target is None else DEFAULT_TIMED_SEQS)[device]
            seqs = min(default, tokens or default)
            self._check_steps(seqs)
        return seqs, max(DEFAULT_BATCHED_TOKENS[device], seqs) if tokens is None else tokens

    def for_server(self) -> EngineConfig:
        """This configuration with what is left to a server decided: steps are sized by time, unless something else
        sizes them."""
        sized = self.max_mixed_tokens is not None or self.fill_steps or self.policy == "static"
        return self if sized or self.itl_target is not None else dataclasses.replace(self, itl_target="auto")

    @property
    def step_seconds(self) -> float | None:
        """``itl_target`` as the scheduler wants it: seconds, 0 for automatic, None for off."""
        if isinstance(self.itl_target, str) or self.itl_target is None:
            return 0.0 if self.itl_target == "auto" else None
        return self.itl_target / 1e3

    def cpu_threads(self) -> int:
        """``threads``, or the number of cores that this process may use and has the time of (``usable_cores``), but no
        more than ``OMP_NUM_THREADS`` says, where it is set.

        Raises:
            ValueError: more threads than cores. They would wait for each other at every barrier of a step, and keep
                whatever else runs on the machine waiting too.
        """
        cores = len(os.sched_getaffinity(0))
        if self.threads is not None and self.threads > cores:
            raise ValueError(
                f"threads is {self.threads}, but this process may use {cores} cores: set it to that or less"
            )
        first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # it may be a list, one for each nesting
        asked = max(1, int(first)) if first.isdecimal() else cores
        return self.threads or min(usable_cores(), asked)

    def __str__(self) -> str:
        """The fields that differ from their defaults, for the start-up line."""
        changed = []
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(value, GPUOptions):
                changed += [str(value)] if str(value) else []
            elif each.name == "model" or value != each.default:
                changed.append(f"{each.name}={value}")
        return ", ".join(changed)


def _target(text: str) -> float | str:
    """``auto``, ``off``, or a number as the command line gives it."""
    if text in ("auto", "off"):
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"itl_target must be a number of milliseconds, auto or off, got {text!r}") from None


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
