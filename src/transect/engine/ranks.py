"""One engine on several ranks. Every rank has the whole ``EngineCore``, and a part of the model.

The scheduler reads no wall clock to decide, and draws are stateless (``ops/lang/philox.py``). So ranks that are told
the same plan the same batches, compute together, and draw the same tokens: only requests, aborts and "step" travel
between them. Rank 0 has the callers (``leading.py``). The others follow its instructions (``follow``). Ranks along the
data axis have requests of their own (``sharing.py``).

Before the first request the ranks show each other what they must have in common: version, configuration, model, seed,
size of the cache. With ``EngineConfig.check_plans`` they compare what they planned in every step too.
"""

from __future__ import annotations

import gc
import hashlib
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from ..checkpoints.kernel_choice import kv_dtype
from ..checkpoints.resolve import resolve
from ..ops.lang.jit import has_dependent_launch
from ..parallel.children import Children
from ..parallel.gathering import under_torchrun
from ..parallel.launch import Ranks
from ..parallel.mesh import Mesh
from ..parallel.rank import serve_jobs
from ..parallel.world import Failure, SharedError, World
from ..spec.layouts.ranks import RankPlace
from ..spec.layouts.shards import first_shard
from ..version import __version__
from .build import BuiltEngine, build_engine
from .config import EngineConfig
from .device import device_for
from .executors.gpu.compilers import Compilers
from .leading import HOLD, FollowingCore, LeadingCore
from .scheduling.batch import Executor, Handle, LateWork, ScheduledBatch
from .scheduling.core import EngineCore
from .sharing import GroupCore, SharingCore

if TYPE_CHECKING:
    from ..parallel.peer_sums import PeerSums

FOLLOW = "transect.engine.ranks:follow"


class _Checked:
    """An executor that first checks that all ranks of a group (at one coordinate of the data axis) have planned the
    same step."""

    def __init__(self, inner: Executor, mesh: Mesh) -> None:
        self.inner, self._mesh = inner, mesh
        self.late_work = getattr(inner, "late_work", LateWork)

    @property
    def launched(self) -> str:
        """Kind of launch of the inner executor's newest step."""
        return getattr(self.inner, "launched", "")

    def submit(self, batch: ScheduledBatch) -> Handle:
        self._compare((batch.step, plan_digest(batch)))
        return self.inner.submit(batch)

    def abandon(self) -> None:
        """Forget earlier steps (``Executor``)."""
        if (abandon := getattr(self.inner, "abandon", None)) is not None:
            abandon()

    def idle(self) -> None:
        """Take part in a step without a batch."""
        self._compare(None)
        if (idle := getattr(self.inner, "idle", None)) is not None:
            idle()

    def _compare(self, mine: tuple[int, str] | None) -> None:
        layout = self._mesh.layout
        digests = self._mesh.world.exchange(mine)
        firsts = [layout.rank(RankPlace(layout.place(rank).data, 0, 0)) for rank in range(layout.size)]
        other = [rank for rank, first in enumerate(firsts) if digests[rank] != digests[first]]
        if other:
            raise RuntimeError(f"ranks {other} have planned other steps than the first of their group: {digests}")


def plan_digest(batch: ScheduledBatch) -> str:
    """Compute a checksum of everything that a step computes: its rows, their tokens and blocks, and the block
    copies."""
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
    children: Children | None = None,
) -> BuiltEngine:
    """Build an engine of one rank or of several; missing ranks are started.

    Args:
        compilers, began: as for ``build_engine``.
        leads: rank 0 tells the others what to do. False: under ``torchrun`` all ranks run one program, which asks the
            same of each.
        ranks: that are there already; they are not ended with the engine.
        children: processes that will be the other ranks, if they have been started.

    Raises:
        ValueError: the model or a setting is at fault, or the ranks would disagree; the message says what to change.
        RankFailure: a rank ended meanwhile.
    """
    if config.ranks == 1:
        return build_engine(config, compilers, began)
    if config.speculation is not None and config.shares_data:
        raise ValueError(
            "groups of ranks in one engine take their steps together, and drafts would make those of one group longer: "
            "leave out speculative_config, or data_parallel_size"
        )
    if config.speculation is not None and config.speculation.adaptive and not leads and under_torchrun():
        raise ValueError(
            "the number of drafts follows from step times, which one rank measures, and under torchrun all ranks "
            "decide: leave out speculative_config, or use `transect serve`"
        )
    own = ranks is None
    kind: Literal["cpu", "cuda"] = "cuda" if device_for(config)[0].type == "cuda" else "cpu"
    config = replace(config, device=kind)
    if kind == "cuda" and config.deterministic and config.enable_expert_parallel and config.layout.data > 2:
        raise ValueError(
            f"NCCL adds over {config.layout.data} GPUs in another order for other batches: leave out deterministic, or "
            "let data_parallel_size be 2"
        )
    leads = leads or ranks is not None or not under_torchrun()
    if ranks is None and under_torchrun():
        ranks = Ranks.join(kind)
    elif ranks is None:
        shard_check(config)
        ranks = Ranks.start(config.ranks, kind, config.first_device, children)
    if not leads and config.shares_data:
        raise ValueError(
            "under torchrun every script has the answers of all requests, and data_parallel_size shares them out: "
            "leave it out, or use `transect serve`"
        )
    if not leads and config.step_limit.seconds is not None:
        raise ValueError(
            "mixed_step_limit is a time, which one rank measures, and here all ranks decide: give full, fill or tokens"
        )
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
    return replace(built, core=_leading(built, ranks, config) if leads else built.core, ranks=ranks if own else None)


def _leading(built: BuiltEngine, ranks: Ranks, config: EngineConfig) -> EngineCore:
    """Return the core of rank 0."""
    if not config.shares_data:
        return LeadingCore(built.core, ranks, built.adapters)
    assert built.mesh is not None
    seed = built.core.scheduler.config.seed
    assert seed is not None
    return SharingCore(built.core, ranks, built.mesh, built.kv_tokens, seed)


def end(core: EngineCore, ranks: Ranks | None) -> None:
    """End the other ranks of an engine. ``ranks``: those that end with it."""
    if ranks is None and not isinstance(core, LeadingCore):
        return
    executor = core.executor.inner if isinstance(core.executor, _Checked) else core.executor
    lives = ranks is None or ranks.failure is None
    graphs = getattr(executor, "graphs", None)
    if lives and graphs is not None:
        graphs.clear()  # NCCL's end waits for graphs that hold its kernels
    if ranks is not None:
        ranks.close()
    elif isinstance(core, LeadingCore):
        core.release()


def shard_check(config: EngineConfig) -> None:
    """Check that the model can be sharded as configured, before processes are started for it.

    Raises:
        ValueError: it cannot.
    """
    source = resolve(config.model, load_format=config.load_format, revision=config.revision)
    first_shard(source.config, config.layout)


def follow_rank_0(config: EngineConfig) -> None:
    """Follow the engine of rank 0 to its end, on every other rank that ``torchrun`` has started for a server.

    Raises:
        ValueError: the configuration cannot run under torchrun.
    """
    if config.replicas > 1:
        raise ValueError("under torchrun there is one engine: leave data_parallel_size out")
    ranks = Ranks.join("cuda" if device_for(config)[0].type == "cuda" else "cpu")
    try:
        serve_jobs(ranks.world)
    except RuntimeError as error:
        raise ranks.explain(error) from error


def follow(world: World, config: EngineConfig) -> None:
    """Run the job of all ranks but 0: build the same engine, then follow the requests and steps of rank 0."""
    _follow(world, config)
    gc.collect()  # a model and its stack hold each other, and with that memory of a GPU
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def _follow(world: World, config: EngineConfig) -> None:
    try:
        built = _build(world, config)
    except SharedError:
        return  # rank 0 says it
    assert built.mesh is not None
    place, grammars = built.mesh.place, built.grammars(checked=False)
    reports = place.data > 0 and place.tensor == place.pipeline == 0
    core = GroupCore(built.core, world, place.data) if reports else FollowingCore(built.core)
    while (orders := world.listen()) is not None:
        for name, arguments, group in orders.messages:
            if group not in (None, place.data):
                continue
            if name == "add" and (wanted := arguments[0].params.structured_outputs) is not None:
                arguments = (msgspec.structs.replace(arguments[0], constraint=grammars.compile(wanted)),)
            getattr(built.adapters if name == HOLD else core, name)(*arguments)
        core.step()


def _build(
    world: World, config: EngineConfig, compilers: Compilers | None = None, began: float | None = None
) -> BuiltEngine:
    """Build this rank's part of the engine; every rank calls this."""
    try:
        mesh = Mesh(world, config.layout)
        seed = world.exchange(secrets.randbits(64) if config.seed is None else config.seed)[0]
        sums = _own_sums(mesh, config)
        logits = _own_logits(mesh, config)
        built = build_engine(config, compilers, began, mesh, seed)
    except SharedError:
        raise
    except (ValueError, OSError) as error:
        world.exchange(Failure(str(error), user=True))
        raise
    world.agree(_facts(config, built))
    lines = world.exchange(_role(built, mesh))
    if mesh.tensor.size > 1:
        lines.append(f"sums over {mesh.tensor.size} ranks {sums or _link_times(mesh)}")
        lines += [f"logits {logits}"] if logits else []
    core = built.core
    if core.decisions is not None:
        core.decisions.rank_seconds = mesh.seconds
    if config.check_plans:
        core.executor = _Checked(core.executor, mesh)
    if config.shares_data:
        core.idle = getattr(core.executor, "idle", None)
        groups, experts = mesh.layout.data, config.enable_expert_parallel
        many = f"experts shared between {groups * mesh.layout.tensor} ranks"
        lines.append(many if experts else f"{groups} groups of ranks, each with requests of its own")
    return replace(built, core=core, mesh=mesh, report=(*built.report, *lines), speaks=world.rank == 0)


def _facts(config: EngineConfig, built: BuiltEngine) -> dict[str, Any]:
    """Return the facts that must be equal on all ranks."""
    limits = built.core.scheduler.config
    return {
        "the version of transect": __version__,
        "the version of torch": torch.__version__,
        "the configuration": str(replace(config, first_device=0, decisions=False, decision_log=None)),
        "the model": str(built.source.config),
        "the scheduler's limits": str(limits),
        "what computes": built.kernels,
    }


def _own_sums(mesh: Mesh, config: EngineConfig) -> str:
    """Let GPUs of the tensor axis sum by our kernels if those are faster than NCCL. Returns a note for the start-up
    line.

    Raises:
        ValueError: NCCL alone can sum, and would do it in another order for other batches where that must not be.
    """
    group, world = mesh.tensor, mesh.world
    if group.size == 1 or world.device.type != "cuda":
        return ""
    found: PeerSums | str = "that was asked for"
    if config.gpu.peer_sums:
        from ..parallel.shared_sums import shared_sums

        if group.ranks not in world.sums:
            world.sums[group.ranks] = shared_sums(world, group)
        found = world.sums[group.ranks]
    if not isinstance(found, str):
        dependent = config.gpu.dependent_launch and has_dependent_launch(world.device)
        group.sums = found.used(dependent_launch=dependent, exact=config.deterministic)
        return str(group.sums)
    if config.deterministic and group.size > 2:
        raise ValueError(
            f"NCCL alone can sum here ({found}), and over {group.size} GPUs it adds in another order for other "
            "batches: leave out deterministic, or take two GPUs"
        )
    return f"by NCCL: {found}"


def _own_logits(mesh: Mesh, config: EngineConfig) -> str:
    """Let GPUs of the tensor axis read each other's logits for draws. Returns a note for the start-up line."""
    group, world = mesh.tensor, mesh.world
    group.logits = None
    if group.sums is None or not config.gpu.device_sampling:
        return ""
    from ..parallel.spread_logits import spread_logits
    from .executors.gpu.step_sizes import row_bucket

    vocab = resolve(config.model, load_format=config.load_format, revision=config.revision).config.vocab_size
    rows = row_bucket(config.max_rows("cuda"))
    found = spread_logits(world, group, vocab, rows, kv_dtype(config.dtype))
    if isinstance(found, str):
        return f"are gathered for every draw: {found}"
    group.logits = found
    return (
        "stay where they are; gathered for penalties, grammars and logprobs "
        f"({_size(found.kept.nbytes)} of shared memory)"
    )


def _link_times(mesh: Mesh) -> str:
    how = "NCCL" if mesh.world.device.type == "cuda" else "gloo"
    said = [f"{_size(size)} in {seconds * 1e6:.0f} us" for size, seconds in mesh.link_times().items()]
    return f"by {how}: {', '.join(said)}"


def _role(built: BuiltEngine, mesh: Mesh) -> str:
    shard = mesh.shard(built.source.config)
    device = mesh.world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    return f"rank {mesh.world.rank}: {device}, {name}: {shard}"


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
