"""One engine on several ranks. Every rank has the whole ``EngineCore``, and a part of the model.

The scheduler reads no wall clock to decide, and draws are stateless (``ops/lang/philox.py``). So ranks that are told
the same plan the same batches, compute together, and draw the same tokens: only requests, aborts and "step" travel
between them. Rank 0 has the callers (``LeadingCore``). The others do as they are told (``follow``).

Before the first request the ranks show each other what they must have in common: version, configuration, model, seed,
size of the cache. With ``EngineConfig.check_plans`` they compare what they planned in every step too.
"""

from __future__ import annotations

import gc
import hashlib
import secrets
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import torch

from ..parallel.launch import Ranks
from ..parallel.layout import Layout, under_torchrun
from ..parallel.load import shard_of
from ..parallel.mesh import Mesh
from ..parallel.rank import serve_jobs
from ..parallel.world import Failure, SharedError, World
from ..version import __version__
from .batch import Executor, Handle, ScheduledBatch
from .build import BuiltEngine, build_engine
from .config import EngineConfig
from .core import EngineCore, Step
from .gpu.build import device_for
from .gpu.compilers import Compilers
from .gpu.runner import GPURunner
from .outputs import EngineOutput
from .request import Request
from .step_time import StepLoad

FOLLOW = "transect.engine.ranks:follow"
Message = tuple[str, tuple[Any, ...]]
"""A method of ``EngineCore`` and its arguments."""


@dataclass(frozen=True, slots=True)
class _Orders:
    """What rank 0 tells the others between two steps; after them comes a step."""

    messages: tuple[Message, ...] = ()


class LeadingCore(EngineCore):
    """The engine of rank 0: does what it is asked, and has the other ranks do the same."""

    def __init__(self, core: EngineCore, ranks: Ranks) -> None:
        super().__init__(core.scheduler, core.executor, lag=core.lag, decisions=core.decisions)
        self._ranks = ranks
        self._messages: list[Message] = []

    def add(self, request: Request) -> None:
        super().add(request)
        # A grammar stays in its process: the others compile it from the parameters.
        self._messages.append(("add", (msgspec.structs.replace(request, constraint=None),)))

    def abort(self, request_id: str, choice: int | None = None) -> None:
        super().abort(request_id, choice)
        self._messages.append(("abort", (request_id, choice)))

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self._messages.append(("reset_prefix_cache", ()))

    def step(self) -> list[EngineOutput]:
        self._ranks.check()
        orders, self._messages = _Orders(tuple(self._messages)), []
        try:
            self._ranks.world.announce(orders)
            outputs = super().step()
            self._ranks.check()  # what a GPU computed with a rank that has ended is worth nothing
            return outputs
        except Exception as error:
            reason = self._ranks.explain(error)
            if reason is error:
                raise
            raise reason from error

    def release(self) -> None:
        """Let the other ranks go; they wait for another job."""
        if self._ranks.failure is None:
            self._ranks.world.announce(None)

    def _learn(self, done: Step, ended: float, late: bool) -> float:
        seconds = super()._learn(done, ended, late)
        self._messages.append(("learned", (self._work_of(done.batch), seconds)))
        return seconds


class FollowingCore(EngineCore):
    """The engine of another rank. How long steps take, which may size the next ones, it has from rank 0."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core.scheduler, core.executor, lag=core.lag)

    def learned(self, load: StepLoad, seconds: float) -> None:
        """How long a step took on rank 0."""
        self.scheduler.times.learn(load, seconds)

    def _learn(self, done: Step, ended: float, late: bool) -> float:
        return 0.0


class _Checked:
    """An executor that first sees that all ranks have planned the same."""

    def __init__(self, inner: Executor, world: World) -> None:
        self.inner, self._world = inner, world

    def submit(self, batch: ScheduledBatch) -> Handle:
        digests = self._world.exchange((batch.step, plan_digest(batch)))
        other = [rank for rank, each in enumerate(digests) if each != digests[0]]
        if other:
            raise RuntimeError(f"ranks {other} have planned other steps than rank 0: {digests}")
        return self.inner.submit(batch)


def plan_digest(batch: ScheduledBatch) -> str:
    """A checksum of all that a step computes: its rows, their tokens and blocks, and the copies before them."""
    digest = hashlib.blake2b(repr((batch.step, batch.block_copies)).encode(), digest_size=8)
    for row in batch.rows:
        draws = [(draw.seq_id, draw.seed) for draw in row.draws]
        digest.update(repr((row.seq_id, row.start, row.num_tokens, row.token_ids, row.block_ids, draws)).encode())
    return digest.hexdigest()


def start_engine(
    config: EngineConfig,
    compilers: Compilers | None = None,
    began: float | None = None,
    *,
    leads: bool = True,
    ranks: Ranks | None = None,
) -> BuiltEngine:
    """Build an engine of one rank or of several, started here if need be.

    Args:
        compilers, began: as for ``build_engine``.
        leads: rank 0 tells the others what to do. False: under ``torchrun`` all ranks run one program, which asks the
            same of each.
        ranks: that are there already; they are not ended with the engine.

    Raises:
        ValueError: the model or a setting is at fault, or the ranks would disagree; the message says what to change.
        RankFailure: a rank ended meanwhile.
    """
    if config.ranks == 1:
        return build_engine(config, compilers, began)
    own = ranks is None
    kind: Literal["cpu", "cuda"] = "cuda" if device_for(config)[0].type == "cuda" else "cpu"
    config = replace(config, device=kind)
    if kind == "cuda" and config.pipeline_parallel_size > 1:
        raise ValueError("pipeline stages run on CPUs so far: leave pipeline_parallel_size out, or give device='cpu'")
    leads = leads or ranks is not None or not under_torchrun()
    if ranks is None and under_torchrun():
        ranks = Ranks.join(kind)
    elif ranks is None:
        shard_check(config)
        ranks = Ranks.start(config.ranks, kind, config.first_device)
    if not leads and config.step_seconds is not None:
        raise ValueError("itl_target sizes steps by the time of one rank, and here every rank decides: leave it out")
    try:
        if leads:
            ranks.call(FOLLOW, replace(config, decisions=False, decision_log=None))
        built = _build(ranks.world, config, compilers, began)
    except BaseException as error:
        if own:
            ranks.close()
        reason = error if isinstance(error, SharedError) else ranks.explain(error)
        if reason is error:
            raise
        raise reason from error
    return replace(built, core=LeadingCore(built.core, ranks) if leads else built.core, ranks=ranks if own else None)


def end(core: EngineCore, ranks: Ranks | None) -> None:
    """End what an engine has beside this process: the other ranks. ``ranks``: those that end with it."""
    if ranks is None and not isinstance(core, LeadingCore):
        return
    executor = core.executor.inner if isinstance(core.executor, _Checked) else core.executor
    lives = ranks is None or ranks.failure is None
    if lives and isinstance(executor, GPURunner) and executor.graphs is not None:
        executor.graphs.clear()  # NCCL's end waits for graphs that hold its kernels
    if ranks is not None:
        ranks.close()
    elif isinstance(core, LeadingCore):
        core.release()


def shard_check(config: EngineConfig) -> None:
    """See that the model can be cut as is asked, before processes are started for it.

    Raises:
        ValueError: it cannot.
    """
    from ..models.resolve import resolve
    from ..parallel.shards import Shard

    source = resolve(config.model, load_format=config.load_format, revision=config.revision)
    Shard(source.config, 0, config.tensor_parallel_size, 0, config.pipeline_parallel_size)


def follow_rank_0(config: EngineConfig) -> None:
    """What a server does on every rank but 0 that ``torchrun`` has started: follow the engine of rank 0 to its end.

    Raises:
        ValueError: the configuration asks for what cannot be here.
    """
    if config.data_parallel_size > 1:
        raise ValueError("under torchrun there is one engine: leave data_parallel_size out")
    ranks = Ranks.join("cuda" if device_for(config)[0].type == "cuda" else "cpu")
    try:
        serve_jobs(ranks.world)
    except RuntimeError as error:
        raise ranks.explain(error) from error


def follow(world: World, config: EngineConfig) -> None:
    """The job of all ranks but 0: build the same engine, then take its requests and steps from rank 0."""
    _follow(world, config)
    gc.collect()  # a model and its stack hold each other, and with that memory of a GPU
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def _follow(world: World, config: EngineConfig) -> None:
    try:
        built = _build(world, config)
    except SharedError:
        return  # rank 0 says it
    core, grammars = FollowingCore(built.core), built.grammars(checked=False)
    while (orders := world.listen()) is not None:
        for name, arguments in orders.messages:
            if name == "add" and (wanted := arguments[0].params.structured_outputs) is not None:
                arguments = (msgspec.structs.replace(arguments[0], constraint=grammars.compile(wanted)),)
            getattr(core, name)(*arguments)
        core.step()


def _build(
    world: World, config: EngineConfig, compilers: Compilers | None = None, began: float | None = None
) -> BuiltEngine:
    """What every rank does to have its part of the engine."""
    try:
        mesh = Mesh(world, Layout(config.tensor_parallel_size, config.pipeline_parallel_size))
        seed = world.exchange(secrets.randbits(64) if config.seed is None else config.seed)[0]
        built = build_engine(config, compilers, began, mesh, seed)
    except SharedError:
        raise
    except (ValueError, OSError) as error:
        world.exchange(Failure(str(error), user=True))
        raise
    world.agree(_facts(config, built))
    lines = world.exchange(_role(built, mesh))
    times = mesh.link_times()
    if mesh.tensor.size > 1:
        how = "NCCL" if world.device.type == "cuda" else "gloo"
        said = ", ".join(f"{_size(size)} in {seconds * 1e6:.0f} us" for size, seconds in times.items())
        lines.append(f"sums over {mesh.tensor.size} ranks by {how}: {said}")
    core = built.core
    if config.check_plans:
        core.executor = _Checked(core.executor, world)
    return replace(built, core=core, report=(*built.report, *lines), speaks=world.rank == 0)


def _facts(config: EngineConfig, built: BuiltEngine) -> dict[str, Any]:
    """What all ranks must have in common."""
    limits = built.core.scheduler.config
    return {
        "the version of transect": __version__,
        "the version of torch": torch.__version__,
        "the configuration": str(replace(config, first_device=0, decisions=False, decision_log=None)),
        "the model": str(built.source.config),
        "the scheduler's limits": str(limits),
        "what computes": built.kernels,
    }


def _role(built: BuiltEngine, mesh: Mesh) -> str:
    shard = shard_of(built.source.config, mesh)
    device = mesh.world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    return f"rank {mesh.world.rank}: {device}, {name}: {shard}"


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
