"""Options that the commands with an engine share, and the ``EngineConfig`` that they make."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ..spec.numbers.registry import AUTO, cache_uses, listed, roundings

if TYPE_CHECKING:
    from ..engine.config import EngineConfig

BUILTIN = "smollm2-135m"

Command = TypeVar("Command", bound=Callable[..., Any])

ModelArgument = Annotated[
    str, typer.Argument(help="A built-in name, a .gguf file, a directory in Hugging Face layout, or a hub id.")
]
Dtype = Annotated[str, typer.Option(help="auto (what is fastest here), bfloat16, float16 or float32.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
Adapter = Annotated[
    str | None, typer.Option("--adapter", help="An adapter in PEFT's layout for MODEL: a directory or a hub id.")
]
TokenizerName = Annotated[
    str | None, typer.Option("--tokenizer", help="Where the tokenizer is, if not with the model; a name as MODEL is.")
]
TokenizerRevision = Annotated[str | None, typer.Option(help="Branch, tag or commit of --tokenizer.")]
ChatTemplateText = Annotated[
    str | None, typer.Option("--chat-template", help="A file with a Jinja template, or the template itself.")
]
GenerationConfig = Annotated[
    str, typer.Option(help="auto: the model's own sampling defaults; none; or a folder with a generation_config.json.")
]
OverrideGenerationConfig = Annotated[
    str | None, typer.Option(help='JSON that goes over them: {"temperature": 0.5}.', metavar="JSON")
]
Quantization = Annotated[
    str | None, typer.Option(help=f"{listed(roundings())}: the layers' matrices are rounded when they are loaded.")
]
KVCacheDtype = Annotated[
    str,
    typer.Option(help="; ".join((AUTO, *(f"{name}: {use.words}" for name, use in cache_uses().items()))) + "."),
]
LoadFormat = Annotated[
    str, typer.Option(help="auto, or dummy: random weights in the shape of MODEL's config.json or of a built-in shape.")
]
MaxModelLen = Annotated[int | None, typer.Option(help="Context length in tokens; default: the model's.")]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Sequences that run at the same time.")]
MaxBatchedTokens = Annotated[int | None, typer.Option(help="Tokens in one step, prefill and decode together.")]
MaxMixedTokens = Annotated[int | None, typer.Option(help="Tokens in one step in which sequences decode.")]
FillSteps = Annotated[
    bool | None,
    typer.Option(help="Prompts little by little beside what decodes, where all ends sooner (GPU, large models)."),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: the cores that this process may use.")]
Native = Annotated[
    bool | None,
    typer.Option("--native/--no-native", help="Demand, or do without, the compiled CPU kernels; default: if possible."),
]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="The same logits to the bit alone and in any batch, at any chunk size.")
]
GpuMemory = Annotated[float | None, typer.Option(help="Share of the GPU's memory that the engine may fill.")]
CpuOffload = Annotated[
    float,
    typer.Option("--cpu-offload-gb", help="GiB by which each device's weights shrink: layers stream from host memory."),
]
OffloadFolder = Annotated[
    str | None, typer.Option("--offload-folder", help="Layers stream from a file in this folder, not from host memory.")
]
CudaGraphs = Annotated[str | None, typer.Option(help="on, lazy (captured when first needed) or off.")]
AsyncScheduling = Annotated[
    bool | None, typer.Option(help="Plan a step ahead of its tokens; default: on a GPU.", show_default=False)
]
FusedOperators = Annotated[bool, typer.Option(help="On a GPU: several operators in one kernel.")]
DependentLaunch = Annotated[bool, typer.Option(help="On a GPU: kernels start while the one before ends.")]
DeviceSampling = Annotated[bool, typer.Option(help="On a GPU: tokens are drawn there.")]
DecisionLog = Annotated[
    str | None,
    typer.Option("--decision-log", help="Write what the scheduler decides to this file; see `transect explain`."),
]
PrefixCaching = Annotated[bool, typer.Option(help="Keep the KV of finished prompts for later ones that begin alike.")]
JumpAhead = Annotated[
    bool, typer.Option(help="Compute tokens that a grammar forces together; off: draw them one by one.")
]
SpeculativeSettings = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help='Speculative decoding: {"method": "ngram"} or "suffix"; same answers.',
    ),
]
TensorParallel = Annotated[
    int, typer.Option("--tensor-parallel-size", "-tp", min=1, help="Devices between which every matrix is cut.")
]
PipelineParallel = Annotated[
    int, typer.Option("--pipeline-parallel-size", "-pp", min=1, help="Groups of devices, each with some of the layers.")
]
DataParallel = Annotated[
    int,
    typer.Option(
        "--data-parallel-size",
        "-dp",
        min=1,
        help="Whole models, each with devices of its own: engines behind one server, or groups of ranks.",
    ),
]
ExpertParallel = Annotated[
    bool,
    typer.Option("--enable-expert-parallel", help="The ranks of -tp and -dp share the experts of a mixture."),
]
CheckPlans = Annotated[
    bool, typer.Option("--check-plans", help="To find errors: the ranks compare what they planned in every step.")
]


def where_it_runs(
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    cpu_offload_gb: CpuOffload = 0.0,
    offload_folder: OffloadFolder = None,
    threads: Threads = None,
    native: Native = None,
    tensor_parallel_size: TensorParallel = 1,
    pipeline_parallel_size: PipelineParallel = 1,
    enable_expert_parallel: ExpertParallel = False,
) -> None:
    """The options of every command with an engine: on which devices it runs, and in how many bits."""


def how_it_runs(
    load_format: LoadFormat = "auto",
    deterministic: Deterministic = False,
    gpu_memory_utilization: GpuMemory = None,
    cuda_graphs: CudaGraphs = None,
    async_scheduling: AsyncScheduling = None,
    fused_operators: FusedOperators = True,
    dependent_launch: DependentLaunch = True,
    device_sampling: DeviceSampling = True,
) -> None:
    """The options of those that serve or measure it: what may be random, and each optimization of a GPU."""


def takes(*groups: Callable[..., None]) -> Callable[[Command], Command]:
    """Gives a command the options that ``groups`` have as parameters; their values come in its
    ``**engine_settings``.

    typer reads options from a signature, so this writes one: the command's own parameters, then those of the groups.
    """

    def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
        found = inspect.signature(function, eval_str=True).parameters.values()
        return [each.replace(kind=each.KEYWORD_ONLY) for each in found if each.kind is not each.VAR_KEYWORD]

    def add(command: Command) -> Command:
        added = [each for group in groups for each in parameters(group)]
        command.__signature__ = inspect.Signature([*parameters(command), *added])  # type: ignore[attr-defined]
        return command

    return add


def engine_config(model: str, **settings: Any) -> EngineConfig:
    """An ``EngineConfig`` of the settings that were given, those of its ``gpu`` among them; None leaves a field at its
    default.

    The model is found, and fetched if needed, before anything starts, so that Ctrl-C ends a download at once.

    Raises:
        ValueError: a setting is out of range, or there is no such model.
    """
    from ..checkpoints.resolve import resolve
    from ..engine.config import EngineConfig
    from ..engine.executors.gpu.options import GPUOptions

    given = {name: value for name, value in settings.items() if value is not None}
    for name in ("override_generation_config", "speculative_config"):
        if isinstance(given.get(name), str):
            given[name] = json_object(given[name], f"--{name.replace('_', '-')}")
    switches = {name: given.pop(name) for name in GPUOptions.__dataclass_fields__ if name in given}
    config = EngineConfig(model=model, gpu=GPUOptions(**switches), **given)
    resolve(model, load_format=config.load_format, revision=config.revision, adapter=config.adapter)
    return config


def json_object(text: str, option: str) -> dict[str, Any]:
    """The JSON object in an option's value.

    Raises:
        ValueError: it is none.
    """
    import json

    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option} is not JSON ({error}): write it as '{{\"name\": 1}}'") from None
    if not isinstance(value, dict):
        raise ValueError(f"{option} must be a JSON object, got {text[:60]!r}")
    return value
