"""From an ``EngineConfig`` to an engine that can take requests: the model, its KV cache, a scheduler and a runner."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoints.adapter import is_beside
from ..checkpoints.kernel_choice import cache_dtype, in_blocks, kernels, kv_dtype, lacks_layers
from ..checkpoints.kv_scales import take_scales
from ..checkpoints.layouts import held_layouts
from ..checkpoints.load import load_model
from ..checkpoints.resolve import ModelSource, resolve
from ..costs.memory.streaming import StreamPlan
from ..costs.model import kv_bytes_per_token, weight_bytes
from ..costs.storage import Storage, storage_for, storage_held
from ..costs.units import GIB
from ..hardware.host_memory import free_memory
from ..hardware.targets import act_as
from ..models.decoder import Decoder
from ..models.native import NativeStack
from ..models.weights.kinds import rounded_values
from ..ops.lang.jit import follow_target
from ..spec.numbers.registry import cache_bits, roundings, takes_scales
from ..text.grammar.compiler import GrammarCompiler
from ..text.grammar.constraint import MaskFiller
from ..text.grammar.params import CACHE_BYTES
from ..text.grammar.vocabulary import Vocabulary
from ..text.number_text import NumberText
from ..text.tokenizer import Tokenizer
from .config import EngineConfig
from .decision_setup import decision_log
from .device import device_for
from .executors.runner import Runner
from .kv_size import KVSize, default_cache_bytes, kv_size
from .numerics import UNKNOWN, Numerics, is_batch_invariant, numerics_of
from .offload import stream_plan
from .scheduling.batch import Executor
from .scheduling.clock import WallClock
from .scheduling.core import EngineCore
from .scheduling.scheduler import Scheduler
from .scheduling.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from ..checkpoints.eagle import HeadSource
    from ..models.weights.row_adapted import RowAdapters
    from ..parallel.launch import Ranks
    from ..parallel.mesh import Mesh
    from .adapters import AdapterStore
    from .executors.gpu.compilers import Compilers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, and the facts about it that callers need."""

    core: EngineCore
    source: ModelSource
    max_model_len: int
    kv_tokens: int
    eos_token_ids: tuple[int, ...]
    kernels: str
    """Running kernels and the reason for them, as a start-up line."""
    report: tuple[str, ...] = ()
    """On a GPU: the use of its memory and the times of the start-up. On several ranks: the task of each rank."""
    ranks: Ranks | None = None
    """Ranks started for this engine, and closed with it."""
    mesh: Mesh | None = None
    """All ranks, and the coordinates of this one; None if there is only one."""
    numerics: Numerics = UNKNOWN
    """Fingerprint of everything that its bits depend on."""
    adapters: AdapterStore | None = None
    """Adapters for requests that name them, with ``enable_lora``."""
    grammar_cache_bytes: int = CACHE_BYTES
    """Memory of compiled grammars that are kept."""
    speaks: bool = True
    """True on the one rank that decides and logs steps."""

    def grammars(self, *, checked: bool) -> GrammarCompiler:
        """Return the grammar compiler of this model (``GrammarCompiler``); it reads the tokenizer when first needed."""

        def vocabulary() -> Vocabulary:
            found = Tokenizer.from_source(self.source)
            if isinstance(found, NumberText):
                raise ValueError("structured_outputs need a tokenizer, and this model has none")
            return Vocabulary.of(found, self.eos_token_ids, self.vocab_size)

        return GrammarCompiler(vocabulary, checked=checked, cache_bytes=self.grammar_cache_bytes)

    @property
    def vocab_size(self) -> int:
        return self.source.config.vocab_size


def build_engine(
    config: EngineConfig,
    compilers: Compilers | None = None,
    began: float | None = None,
    mesh: Mesh | None = None,
    seed: int | None = None,
) -> BuiltEngine:
    """Load the model and build the engine around it.

    Args:
        compilers: processes that compile kernels, see ``compiling``.
        began: ``time.perf_counter()`` when the caller began, for the log's account of the time.
        mesh: given if this process is one of several ranks; all of them must call this function.
        seed: for requests without a seed of their own; None for the configuration's.

    Raises:
        ValueError: the model, a setting or the memory is at fault; the message says what to change.
    """
    source = resolve(config.model, load_format=config.load_format, revision=config.revision, adapter=config.adapter)
    ends = source.config.eos_token_ids if config.eos_token_ids is None else config.eos_token_ids
    device, reason = device_for(config)
    if device.type == "cuda":
        if config.gpu.target is not None:
            act_as(config.gpu.target)
        follow_target()
        device = device if mesh is None else mesh.world.device
        torch.cuda.set_device(device)
    if config.enable_lora and mesh is not None and (device.type == "cuda" or mesh.layout.size > mesh.tensor.size):
        raise ValueError(
            "enable_lora runs on one GPU, or on tensor parallel ranks of a CPU: leave out the sizes of other layouts, "
            "or serve replicas (transect serve --data-parallel-size)"
        )
    max_num_seqs, max_num_batched_tokens = config.limits(device.type)
    report: tuple[str, ...] = ()
    executor: Executor
    drafts_with = None
    if config.speculation is not None:
        from .drafting import attach, draft_config, draft_source

        drafts_with = draft_source(config, source)
    drafting: tuple[EngineConfig | None, Executor, KVSize] | None = None
    fill_tokens = graph_tokens = graph_prompts = None
    if device.type == "cuda":
        from .executors.gpu.build import build_gpu
        from .executors.gpu.step_sizes import FEWEST_ROWS

        head = None if isinstance(drafts_with, ModelSource) else drafts_with
        if isinstance(drafts_with, ModelSource):
            drafting = _draft_on_gpu(config, source, drafts_with, device)
        parts = build_gpu(config, source, device, compilers, began, mesh, head)
        if parts.head is not None:
            drafting = None, parts.head, parts.size
        executor, size, why, report = parts.runner, parts.size, parts.description, parts.report
        storage, exact, computes = parts.storage, config.deterministic, parts.description
        fill_tokens, graph_tokens = parts.fill_tokens, parts.runner.graph_tokens or None
        graph_prompts = FEWEST_ROWS if graph_tokens else None
    else:
        executor, size, why, storage, computes, exact = _build_cpu(config, source, mesh, drafts_with)
        if config.deterministic and not exact:
            raise ValueError(f"{why} give a token other bits in other batches: leave out deterministic")
        on_host = 1 if mesh is None else mesh.world.on_host
        if isinstance(drafts_with, ModelSource):
            draft = draft_config(config, drafts_with, size)
            drafting = (draft, *_build_cpu(draft, drafts_with, None, on_host=on_host)[:2])
        elif drafts_with is not None:
            from .heads import head_on_cpu

            threads = _threads(config, on_host)
            drafting = None, head_on_cpu(config, drafts_with, source, executor, size, threads, mesh), size
        if config.device == "auto" and torch.cuda.is_available():
            why = f"{why}; not on the GPU: {reason}"
    limit = config.step_limit
    scheduler = scheduler_class(config.scheduler_cls)(
        SchedulerConfig(
            num_blocks=size.num_blocks,
            block_size=config.block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_mixed_tokens=limit.tokens,
            fill_tokens=fill_tokens,
            itl_target=limit.seconds,
            graph_tokens=graph_tokens,
            graph_prompts=graph_prompts if limit.seconds is not None else None,
            max_model_len=size.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            batching=config.batching,
            scheduling_policy=config.scheduling_policy,
            longest_first=bool(config.longest_first),
            speculation=config.speculation,
            jump_ahead=config.jump_ahead,
            max_queue=config.max_queue,
            max_queue_bytes=config.max_queue_bytes,
            max_queue_wait=config.max_queue_wait,
            max_adapters=config.max_loras if config.enable_lora else None,
            pipeline_depth=config.pipeline_parallel_size,
            seed=config.seed if seed is None else seed,
        ),
        WallClock(),
    )
    ahead = device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
    lag = int(ahead) if config.pipeline_parallel_size == 1 else config.pipeline_parallel_size - 1
    padding = getattr(executor, "padding", None)
    log_of = decision_log(config, scheduler, lag, source.config, storage, device, padding)
    store = _adapter_store(config, source, executor, scheduler, mesh)
    if config.speculation is not None:
        from .executors.drafted import Drafted

        executor = Drafted(executor)
    if drafting is not None:
        form, model_executor, draft_size = drafting
        limits = max_num_seqs, max_num_batched_tokens
        attach(scheduler, model_executor, form, draft_size, scheduler.clock, mesh, limits)
        assert config.speculation is not None
        why += f"; drafts by {config.speculation.model}"
    core = EngineCore(scheduler, executor, lag=lag, decisions=log_of)
    kv_tokens = size.num_blocks * config.block_size
    if source.adapter is not None and device.type == "cuda":
        why = f"{why}, adapter {'beside' if config.quantization else 'in'} the weights"
    log.info("%s; KV cache %d tokens, context %d; %s", why, kv_tokens, size.max_model_len, config)
    numerics = numerics_of(config, source, device, computes, exact)
    return BuiltEngine(
        core,
        source,
        size.max_model_len,
        kv_tokens,
        ends,
        why,
        report,
        numerics=numerics,
        adapters=store,
        grammar_cache_bytes=config.grammar_cache_bytes,
    )


def _adapter_store(
    config: EngineConfig, source: ModelSource, executor: Any, scheduler: Scheduler, mesh: Mesh | None
) -> AdapterStore | None:
    """Create the store of adapters in host memory, from which the executor fills the slots of its model."""
    if not config.enable_lora:
        return None
    from .adapters import AdapterStore
    from .executors.adapter_slots import AdapterSlots

    adapters: RowAdapters = executor.model.adapters
    store = AdapterStore(source, adapters, config, None if mesh is None else mesh.shard(source.config))
    store.in_use = lambda: {state.spec.adapter for state in scheduler.requests.values() if state.spec.adapter}
    executor.adapters = AdapterSlots(adapters, store.get)
    return store


def scheduler_class(name: str | None) -> type[Scheduler]:
    """Load the class that ``scheduler_cls`` names.

    Raises:
        ValueError: there is no such file, module or class, or it is not a ``Scheduler``.
    """
    if name is None:
        return Scheduler
    try:
        if ":" in name:
            file, _, attribute = name.rpartition(":")
            spec = importlib.util.spec_from_file_location(Path(file).stem, file)
            if spec is None or spec.loader is None:
                raise ImportError(f"{file} is not a Python file")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            place, _, attribute = name.rpartition(".")
            module = importlib.import_module(place)
        found = getattr(module, attribute)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise ValueError(
            f"scheduler_cls {name!r} cannot be loaded ({error}): give FILE.py:Class or package.module.Class"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Scheduler)):
        raise ValueError(f"scheduler_cls {name!r} must be a subclass of transect.engine.scheduling.scheduler.Scheduler")
    return found


def _draft_on_gpu(
    config: EngineConfig, source: ModelSource, draft: ModelSource, device: torch.device
) -> tuple[EngineConfig, Executor, KVSize]:
    """Build the model that drafts on a GPU. It comes first: the engine's model takes the memory that is left."""
    from .drafting import draft_config, planned_size
    from .executors.gpu.build import build_gpu

    free, total = torch.cuda.mem_get_info(device)
    usable = total * config.gpu_memory_utilization - (total - free)
    storage = storage_for(kv_dtype(config.dtype).itemsize, config.quantization)
    form = draft_config(config, draft, planned_size(config, source, draft, usable, storage))
    parts = build_gpu(form, draft, device)
    return form, parts.runner, parts.size


def _build_cpu(
    config: EngineConfig,
    source: ModelSource,
    mesh: Mesh | None,
    beside: ModelSource | HeadSource | None = None,
    on_host: int = 1,
) -> tuple[Runner, KVSize, str, Storage, str, bool]:
    """Build the model and its cache in the memory of the host.

    Args:
        beside: a model or a head that drafts, whose cache has as many tokens.
        on_host: ranks that have this model whole.

    Returns:
        Runner, size of the cache, which kernels run and why, formats, what in the kernels decides about bits, and
        ``Numerics.exact``.
    """
    on_host = on_host if mesh is None else mesh.world.on_host
    threads = _threads(config, on_host)
    torch.set_num_threads(threads)
    free = free_memory()
    if mesh is not None:
        free = min(mesh.world.exchange(free))  # no rank fills it before all have measured, and all report the same
    stream = _cpu_stream(config, source, mesh)
    if stream is None:
        shapes = None if mesh is None else mesh.shard(source.config).shapes()
        check_weights(config, source, free, shapes, ranks=on_host)
    choice = {
        "dtype": config.dtype,
        "native": config.native if stream is None else False,
        "threads": threads,
        "block_size": config.block_size,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
    }
    drawn = {"seed": config.seed or 0, "deterministic": config.deterministic, "stream": stream}
    if mesh is None or (mesh.parts.size == 1 and not mesh.layout.expert):
        library, why = kernels(source.config, **choice, blocks=in_blocks(source))  # type: ignore[arg-type]
        native = library is not None
        whole = native and not lacks_layers(source.config, config.block_size, config.quantization)
        model = load_model(source, **drawn, **choice)  # type: ignore[arg-type]
        if source.adapter is not None:
            place = "beside the packed weights"
            if not isinstance(model.stack, NativeStack):
                whole, place = False, f"{place}, layers operator by operator"
            why = f"{why}, adapter {place if is_beside(model) else 'in the weights'}"
    else:
        from ..parallel.load import load_shard

        model, why, native = load_shard(source, mesh, **drawn, **choice)  # type: ignore[arg-type]
        whole, library = native, None
    computes = "C++ layers" if isinstance(model.stack, NativeStack) else "C++ products" if native else "torch"
    computes += "" if library is None else f" of {library.name}"
    if config.kv_cache_dtype != "auto":
        why = f"{why}, KV cache in {config.kv_cache_dtype}"
    if takes_scales(config.kv_cache_dtype):
        own = slice(None) if mesh is None else mesh.shard(source.config).layers
        why += ", with the checkpoint's scales" if take_scales(model, source, own) else ""
    if whole:
        # The kernels have threads of their own. A second team, torch's, would wait on the same cores between its few
        # small operations (the sampler's), and a busy machine makes each of those waits last milliseconds.
        torch.set_num_threads(1)
    cache_type = cache_dtype(config.dtype, config.kv_cache_dtype)
    cached_bits = cache_bits(config.kv_cache_dtype, 8 * cache_type.itemsize, model.config.head_dim)
    free = free_memory()
    per_token = kv_bytes_per_token(model.config, Storage(kv=cached_bits))
    if isinstance(beside, ModelSource):
        per_token += kv_bytes_per_token(beside.config, Storage(kv=cached_bits))
    elif beside is not None:
        per_token += beside.bytes_per_token(4 if native else kv_dtype(config.dtype).itemsize)
    size = kv_size(
        config,
        model_positions=source.config.max_position,
        bytes_per_token=per_token,
        free_bytes=free // on_host,
        default_bytes=default_cache_bytes(free) // on_host,
    )
    size = size if mesh is None else KVSize.least(mesh.world.exchange(size))
    caches = model.new_kv_cache(size.num_blocks, config.block_size, cache_type)
    rounds = library is not None and library.bfloat16
    computed = 32 if (native and not rounds) or kv_dtype(config.dtype).itemsize == 4 else 16
    storage = storage_of_model(model, activation=computed, kv=cached_bits)
    if stream is not None:
        storage, why = replace(storage, streamed=stream.bytes), f"{why}; {stream}"
    exact = is_batch_invariant(model)
    if mesh is not None and mesh.pipeline.size > 1:
        from .executors.stage_runner import StageRunner

        return StageRunner(model, *caches, mesh, fill_masks=MaskFiller()), size, why, storage, computes, exact
    if config.enable_lora:
        from ..models.row_adapters import add_row_adapters
        from .adapters import adapter_room

        add_row_adapters(model, adapter_room(config), half=config.dtype != "float32")
        why = f"{why}, up to {config.max_loras} adapters in a step"
    return Runner(model, *caches, fill_masks=MaskFiller()), size, why, storage, computes, exact


def _threads(config: EngineConfig, on_host: int) -> int:
    """Return the threads of the C++ kernels of each of ``on_host`` ranks."""
    return config.cpu_threads() if config.threads or on_host == 1 else max(1, config.cpu_threads() // on_host)


def _cpu_stream(config: EngineConfig, source: ModelSource, mesh: Mesh | None) -> StreamPlan | None:
    """Plan the layers that stream on a CPU, where plain torch does not hold the codes of every format."""
    quantization = None if rounded_values(config.quantization) else config.quantization
    storage = storage_for(kv_dtype(config.dtype).itemsize, quantization)
    shapes = None if mesh is None else mesh.shard(source.config).shapes()
    return stream_plan(config, source.config, storage, shapes, ranks=1 if mesh is None else mesh.world.on_host)


def check_weights(
    config: EngineConfig,
    source: ModelSource,
    free: int,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    ranks: int = 1,
) -> None:
    """Refuse weights that do not fit in the host's memory, before they are read or drawn.

    Without this check a model that is too large takes all memory, and the system kills the engine, or another program,
    without a message. Only a certain misfit is refused: the check counts the weights alone, in the fewest bits in which
    they may be held.

    Args:
        free: bytes of this host's memory.
        shapes: each rank's shapes of the weights; None for whole weights.
        ranks: number of ranks on this host with such weights.

    Raises:
        ValueError: the weights do not fit; the message has the numbers, and what to change.
    """
    storage = storage_for(4 if config.dtype == "float32" else 2, config.quantization)
    needed = ranks * weight_bytes(source.config, storage, shapes)
    if needed <= free:
        return
    if config.quantization is None and config.dtype != "float32":
        packed = storage_held(storage, held_layouts(source))
        needed = min(needed, ranks * weight_bytes(source.config, packed, shapes))
    if source.kind == "gguf":  # its blocks are held as they are, the table among them
        needed = min(needed, sum(file.stat().st_size for file in source.gguf_files))
    if needed <= free:
        return
    each = f" over {ranks} ranks of this host" if ranks > 1 else ""
    fewest = next(iter(roundings()))
    fewer = "" if config.quantization == fewest else f"hold them in fewer bits (quantization={fewest!r}), "
    raise ValueError(
        f"the weights take {needed / GIB:.1f} GiB of memory{each}, and {free / GIB:.1f} GiB are free: {fewer}take a "
        "smaller model, or let layers come from a disk (cpu_offload_gb with offload_folder)"
    )


def storage_of_model(model: Decoder, *, activation: float = 16, kv: float = 16) -> Storage:
    """Return the ``Storage`` of a loaded model, as its weights say; ``storage_for`` is that of a model not loaded.

    Args:
        model: its matrices' bits are averaged over the layers, one figure a matrix.
        activation: bits of a number of the activations.
        kv: bits of a number of the cache.
    """
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, weight in model.weights():
        if name != "head":
            count = sizes[name.split(".", 2)[2]]
            count[0] += weight.nbytes
            count[1] += weight.out_features * weight.in_features
    bits = {name: 8 * size / numbers for name, (size, numbers) in sizes.items()}
    whole = [sum(column) for column in zip(*sizes.values(), strict=True)]
    linear = 8 * whole[0] / whole[1]
    return Storage(
        linear=linear,
        embed=model.embed.bits,
        head=model.head.format.bits,
        norm=8 * model.norm.weight.element_size(),
        activation=activation,
        kv=kv,
        head_copied=model.config.tied_embeddings and not model.head_tied,
        matrices=tuple((name, each) for name, each in bits.items() if each != linear),
    )
