"""``transect memory``: the memory of a run before it starts, and the smallest change that makes it fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .engine_options import engine_settings, takes
from .memory_training import OPTIONS, is_run, run_of, run_settings, show_training

if TYPE_CHECKING:
    from ..checkpoints.resolve import ModelSource
    from ..costs.memory.serving import ServingEstimate, ServingPlan, StageEstimate
    from ..costs.presets import Preset
    from ..costs.storage import Layouts, Storage
    from ..engine.config import EngineConfig

SERVING = (
    *("context", "max_num_seqs", "max_num_batched_tokens", "dtype", "quantization", "kv_cache_dtype"),
    *("cpu_offload_gb", "offload_folder", "link"),
)
"""Options that apply to engines only."""
TRAINING = (*OPTIONS, "dp", "fsdp", "offload", "offload_all", "changes")
"""Options that apply to training runs; all but ``dp`` to those only."""
LEAST_BUDGET = 1 << 20
"""Fewest bytes of a budget; smaller numbers lack their unit."""
TYPICAL_LINK = 55e9
"""Bytes per second from pinned host memory over PCIe 5.0 x16."""


@takes(
    *engine_settings("max_num_seqs", "max_num_batched_tokens", "dtype", "quantization", "kv_cache_dtype"),
    *engine_settings("cpu_offload_gb", "offload_folder"),
    *run_settings(),
    precision="bfloat16",
    accumulate=None,
    zero=None,
)
def command(
    call: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A built-in name or shape, a .gguf file, a directory, a hub id, or the .toml file of a run."
        ),
    ],
    train: Annotated[
        bool, typer.Option("--train", help="The memory of a training step; follows from --task and the like.")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="The memory of an engine; follows from --context and the like.")
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(help="A product name (`transect hardware --preset list`), or your own preset file."),
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Such as 80GB or 24GiB; default: that of --gpu, else the free memory.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cuda, cpu, or auto: a GPU if one is here or its memory is given.")
    ] = "auto",
    context: Annotated[int | None, typer.Option(help="--serve: longest sequence; default: the model's.")] = None,
    tp: Annotated[
        int, typer.Option("--tp", "--tensor-parallel-size", min=1, help="Devices that share each layer.")
    ] = 1,
    link: Annotated[
        float | None, typer.Option(help="--serve: GB/s of the host link, or of the disk; default: measured, else 55.")
    ] = None,
    pp: Annotated[int, typer.Option("--pp", "--pipeline-parallel-size", min=1, help="Stages of layers.")] = 1,
    ep: Annotated[
        int, typer.Option("--ep", min=1, help="Devices that share experts. --serve: a multiple of --tp; --train: --dp.")
    ] = 1,
    dp: Annotated[
        int,
        typer.Option(
            "--dp", "--data-parallel-size", min=1, help="--train: ranks with other micro-batches. --serve: engines."
        ),
    ] = 1,
    fsdp: Annotated[int | None, typer.Option(min=1, help="--train: --dp N --zero 3.")] = None,
    offload: Annotated[bool, typer.Option("--offload", help="--train: optimizer and masters on the host.")] = False,
    offload_all: Annotated[bool, typer.Option("--offload-all", help="--train: weights too, layer by layer.")] = False,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="--train: KEY=VALUE of a run's file, such as lora.dora=true.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes.")] = False,
    **settings: Any,
) -> int:
    """Predict the memory of an engine or a training run. Exit 1 if it does not fit."""
    from ..checkpoints.resolve import described
    from ..costs.presets import preset
    from ..costs.units import gib, parse_bytes

    options = dict(call.params)
    given = {name for name in options if call.get_parameter_source(name).name in ("COMMANDLINE", "ENVIRONMENT")}  # type: ignore[union-attr]
    run = None
    if _trains(call, given, train, serve, is_run(model)):
        run = run_of(model, options, given, changes or [])
    name = model if run is None else run.model
    source = described(name)
    most = source.config.max_position
    asked = "seq_len" in given or any(each.partition("=")[0].strip() == "data.seq_len" for each in changes or [])
    if run is not None and not is_run(model) and not asked and run.data.seq_len > most:
        run = run.changed([f"data.seq_len={most}"])
    card = None if gpu is None else preset(gpu)
    if card is None:
        kind = _device(run.device if run is not None and device == "auto" else device, device_memory)
    else:
        kind = "cpu" if card.processor else "cuda"
        if device not in ("auto", kind):
            raise ValueError(f"--gpu {card.name} is of --device {kind}, not {device}: leave --device out")
        device_memory = device_memory or f"{card.memory_bytes}B"
    budget = _free(kind) if device_memory is None else parse_bytes(device_memory)
    if device_memory is not None and budget < LEAST_BUDGET:
        raise ValueError(f"--device-memory {device_memory} is {budget} bytes: give the unit too, such as 80GB")
    if card is not None and not json:
        print(f"{card.name}: {card.device}, {gib(card.memory_bytes)} (data sheet figures, not measured)")
    if run is not None:
        return 0 if show_training(run, source, kind, budget, json) else 1
    engine = {name: value for name, value in settings.items() if name not in OPTIONS}
    engine |= {"max_model_len": context, "tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    engine |= _sharing(tp, ep, dp)
    streamed, engines = _link(kind, link, card), dp if ep == 1 else 1
    return 0 if _serve(source, engine, kind, budget, json, streamed, engines, card) else 1


def _trains(call: typer.Context, given: set[str], train: bool, serve: bool, file: bool) -> bool:
    """Return True for the memory of a training run, False for that of an engine.

    Raises:
        ValueError: the options do not say which, or mix both.
    """
    own = {name: [_option(call, each) for each in names if each in given]
           for name, names in (("--train", TRAINING), ("--serve", SERVING))}  # fmt: skip
    if serve or own["--serve"]:
        own["--train"] = [option for option in own["--train"] if option != "--dp"]
    if (train and serve) or not (train or serve or file or own["--train"] or own["--serve"]):
        raise ValueError("say which memory: --train or --serve")
    if file and serve:
        raise ValueError("the file of a run is for --train: give the model to --serve")
    trains = train or (not serve and (file or bool(own["--train"])))
    kind, other = ("--train", "--serve") if trains else ("--serve", "--train")
    if own[other]:
        raise ValueError(f"{', '.join(own[other])} is for {other}, and this asks for {kind}: give one or the other")
    return trains


def _option(call: typer.Context, name: str) -> str:
    """Return the option's name on the command line."""
    return next(param.opts[0] for param in call.command.params if param.name == name)


def _sharing(tp: int, ep: int, dp: int) -> dict[str, Any]:
    """Return the settings for ``ep`` devices that share experts.

    Raises:
        ValueError: the devices are not whole tensor groups (the message names the nearest number that is), or the
            number of groups differs from ``dp``.
    """
    if ep == 1:
        return {}
    if dp > 1 and ep != dp * tp:
        raise ValueError(
            f"--ep is {ep}, and --dp {dp} groups of --tp {tp} devices share experts between {dp * tp}: give --ep "
            f"{dp * tp}"
        )
    if ep % tp:
        raise ValueError(
            f"--ep is {ep}, and experts are shared between whole groups of --tp {tp} devices: give --ep "
            f"{max(1, round(ep / tp)) * tp}"
        )
    return {"enable_expert_parallel": True, "data_parallel_size": ep // tp}


def _device(name: str, memory: str | None) -> str:
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, not {name!r}")
    if name == "auto":
        return "cuda" if memory is not None or torch.cuda.is_available() else "cpu"
    if name == "cuda" and memory is None and not torch.cuda.is_available():
        raise ValueError("no GPU was found to read its free memory: give --gpu or --device-memory")
    return name


def _free(kind: str) -> int:
    import torch

    from ..train.loop.memory import free_bytes

    free = free_bytes(torch.device(kind))
    if free is None:
        raise ValueError("this system does not report its free memory: give --gpu or --device-memory")
    return free


def _layouts(source: ModelSource) -> Layouts:
    """Return the layouts in which a model's files pack its matrices; none if there are no weights."""
    from pathlib import Path

    from ..checkpoints.layouts import held_layouts
    from ..checkpoints.resolve import resolve

    folder = Path(source.name)
    if source.kind == "shape" and folder.is_dir() and any(folder.glob("*.safetensors")):
        source = resolve(source.name)
    return held_layouts(source)


def _serve(
    source: ModelSource,
    settings: dict[str, Any],
    kind: str,
    budget: int,
    json: bool,
    link: tuple[float, str],
    engines: int = 1,
    card: Preset | None = None,
) -> bool:
    """Account for an engine with ``settings``, and say the smallest change or layout that fits.

    Args:
        link: bytes per second that layers stream at, and where that figure is from.
        card: predict decode steps on it.

    Returns:
        True if it fits.
    """
    from dataclasses import asdict
    from functools import partial

    from ..costs.memory.serving import smallest_layout, smallest_sharing, stages
    from ..costs.units import gib
    from ..engine.config import EngineConfig
    from ..engine.offload import planned_stream
    from .memory_tables import dump, show

    config = EngineConfig(model=source.name, **{k: v for k, v in settings.items() if v is not None})
    processes = engines * config.ranks
    share = ""
    if kind == "cpu" and processes > 1:  # they share the memory of the host
        share = f", the share of one of {processes} processes in {gib(budget)}"
        budget //= processes
    plan, storage = _plan(source, config, kind, budget)
    streams = partial(planned_stream, config, source.config, storage)
    each = stages(source.config, config.layout, plan, storage, budget, streams)
    worst = min(each, key=lambda stage: (stage.estimate.fits, stage.estimate.cache_tokens))
    found = worst.estimate
    rate, whence = link
    apart = not found.fits and kind == "cuda"  # more ranks on a CPU bring no memory
    layout = smallest_layout(source.config, plan, storage, budget) if apart else None
    shared = None
    if layout is None and apart and source.config.moe is not None:
        shared = smallest_sharing(source.config, plan, storage, budget)
    if json:
        facts = {name: value for name, value in asdict(found).items() if name != "account"}
        facts["ranks"] = [{"weights": _weights(stage), "share": str(stage.shard)} for stage in each]
        facts["stream"] = [_stream_facts(stage, rate) for stage in each]
        facts["engines"] = engines
        facts["layout"] = None if layout is None else {"tp": layout.tensor, "pp": layout.pipeline}
        if shared is not None:
            facts["layout"] = {"tp": shared.tensor, "pp": 1, "ep": shared.size}
        facts["predicted_decode_s"] = _predicted(source, config, storage, plan, found, card)
        dump(found.account, {"budget": budget, "context": plan.context, **facts})
        return found.fits
    place = "" if config.ranks == 1 else f", on each of {config.ranks} ranks"
    show(f"serving {source.name}, {plan.max_num_seqs} sequences of up to {plan.context} tokens{place}", found.account)
    for number, stage in enumerate(each if config.ranks > 1 else []):
        what = f"stage {number}, {config.tensor_parallel_size} ranks" if len(each) > 1 else "each rank"
        print(f"{what}: {gib(_weights(stage))} of weights, the first of them {stage.shard}")
    for stage in each:
        if stage.stream is not None:
            print(f"{stage.stream}: at least {stage.stream.seconds(rate):.2f} s a step over {whence}")
    if found.fits:
        held = f"{found.cache_tokens} tokens, {found.sequences} full sequences"
        print(f"fits in {gib(budget)}{share}: the cache holds {held}")
        for sequences, seconds in _predicted(source, config, storage, plan, found, card).items():
            tokens = f"{1e3 * seconds:.1f} ms a step, {sequences / seconds:,.0f} tokens/s"
            many = "sequences" if sequences > 1 else "sequence"
            print(f"predicted, not measured: {sequences} {many} with {plan.context // 2} tokens: {tokens}")
        if engines > 1:
            where = f"{processes} devices" if kind == "cuda" else f"{gib(processes * budget)} of this host"
            print(f"{engines} engines like this one need {where}")
        return True
    print(f"does not fit in {gib(budget)}{share}: the cache would not hold one sequence of {plan.context} tokens")
    print(f"smallest change that does: {found.change}")
    if shared is not None:
        print(f"smallest layout that does: --tp {shared.tensor} --ep {shared.size} ({shared.size} devices)")
    if layout is not None:
        print(f"smallest layout that does: --tp {layout.tensor} --pp {layout.pipeline} ({layout.size} devices)")
    return False


def _predicted(
    source: ModelSource,
    config: EngineConfig,
    storage: Storage,
    plan: ServingPlan,
    found: ServingEstimate,
    card: Preset | None,
) -> dict[int, float]:
    """Predict the seconds of a decode step on a card, for one sequence and for as many as fit, half of their context
    long. Empty if the cost model has no coefficients: CPUs, experts that ranks share, other formats and dtypes."""
    from dataclasses import replace

    from ..costs.machine import Machine
    from ..costs.serving import HOPPER, steps_on
    from ..costs.steps import StepLoad

    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    form = config.quantization or "bf16"
    if card is None or card.processor or config.layout.expert or not found.fits:
        return {}
    if form not in HOPPER or dtype not in card.flops_per_second or dtype == "float32":
        return {}
    storage = replace(storage, kv=8 * plan.kv_element)
    steps = steps_on(Machine.of(card), source.config, storage, config.layout, dtype=dtype, efficiency=HOPPER[form])
    at = plan.context // 2
    most = min(plan.max_num_seqs, found.cache_tokens // max(1, at))
    return {rows: steps.seconds(StepLoad.of([(at, 1)] * rows)) for rows in sorted({1, most})}


def _plan(source: ModelSource, config: EngineConfig, kind: str, budget: int) -> tuple[ServingPlan, Storage]:
    """Plan the memory of an engine on a device of ``kind`` with ``budget`` bytes; also return how it stores weights."""
    from ..costs.memory.serving import ServingPlan
    from ..costs.model import weight_bytes
    from ..costs.storage import storage_for, storage_held
    from ..engine.executors.gpu.step_sizes import row_buckets
    from ..engine.kv_size import DEFAULT_MOST_BYTES, SHARE_OF_FREE_MEMORY
    from ..spec.numbers.registry import cache_bits

    context, positions = config.max_model_len, source.config.max_position
    if context is not None and context > positions:
        raise ValueError(f"--context is {context}, but the model knows {positions} positions: set it to that or less")
    seqs, tokens = config.limits(kind)
    element = 4 if config.dtype == "float32" or kind == "cpu" else 2
    bytes_each = 4 if config.dtype == "float32" else 2
    storage = storage_for(bytes_each, config.quantization, native=kind == "cpu")
    if kind == "cuda" and config.quantization is None and config.dtype != "float32" and not config.cpu_offload_gb:
        layouts = _layouts(source)
        by_row = source.config.moe is None and all(layout.batch_invariant for _, layout in layouts)
        storage = storage_held(storage, layouts) if by_row or not config.deterministic else storage
    if source.kind == "gguf" and kind == "cpu" and config.dtype in ("auto", "bfloat16") and config.quantization is None:
        weights = sum(file.stat().st_size for file in source.gguf_files)  # the C++ kernels keep the file's own blocks
    else:
        weights = int(weight_bytes(source.config, storage))
    plan = ServingPlan(
        weights=weights,
        element=element,
        kv_element=cache_bits(config.kv_cache_dtype, 8 * bytes_each, source.config.head_dim) / 8,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        context=context or positions,
        block_size=config.block_size,
        graphs=len(row_buckets(seqs)) if kind == "cuda" else 0,
        share=config.gpu_memory_utilization if kind == "cuda" else 1.0,
        most_cache=None if kind == "cuda" else min(budget // SHARE_OF_FREE_MEMORY, DEFAULT_MOST_BYTES),
        backend="gpu" if kind == "cuda" else "cpu",
    )
    return plan, storage


def _stream_facts(stage: StageEstimate, rate: float) -> dict[str, Any] | None:
    plan = stage.stream
    if plan is None:
        return None
    seconds = plan.seconds(rate)
    return {"layers": len(plan.layers), "of": plan.total, "bytes": plan.bytes, "slots": plan.slots, "seconds": seconds}


def _link(kind: str, given: float | None, card: Preset | None) -> tuple[float, str]:
    """Find the bytes per second that layers stream at, and where that figure is from."""
    import torch

    from ..hardware.device import detect
    from ..hardware.measured import kept

    if given is not None:
        if not given > 0:
            raise ValueError(f"--link must be above 0 GB/s, got {given}")
        return given * 1e9, f"a link of {given:g} GB/s"
    if card is not None and not card.processor:
        return card.host_bytes_per_second, f"a link of {card.host_bytes_per_second / 1e9:g} GB/s, by the data sheet"
    known = kept(detect("cuda")) if kind == "cuda" and torch.cuda.is_available() else None
    rate = None if known is None else known.ceilings.host_to_device_bytes_per_second
    if rate is not None:
        return rate, f"the host link, measured at {rate / 1e9:.1f} GB/s"
    return TYPICAL_LINK, f"a link of {TYPICAL_LINK / 1e9:g} GB/s, as PCIe 5.0 x16 gives (--link sets another)"


def _weights(stage: StageEstimate) -> int:
    return next(term.bytes for term in stage.estimate.account.terms if term.name == "weights")
