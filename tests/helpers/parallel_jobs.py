"""Jobs that tests have the other rank do: the counterparts of what the test does itself."""

import contextlib
from functools import partial

import pytest
import torch

from transect.bench import collectives as collectives_of_bench
from transect.checkpoints.load import load_on_device
from transect.checkpoints.resolve import resolve
from transect.engine.executors.gpu.measure import runner_of
from transect.engine.scheduling.clock import WallClock
from transect.engine.scheduling.core import EngineCore
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler import Scheduler
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.models.context import VarlenContext
from transect.models.fused_stack import FusedStack
from transect.models.weights.dense import Dense
from transect.models.weights.int4_serving import Int4Products, ServingInt4, _gated_by_torch
from transect.ops.comm import all_reduce
from transect.ops.linear.packed.int4 import int4_matmul
from transect.ops.norm import add_rms_norm
from transect.ops.opset import resolve_ops
from transect.ops.sampling import sampling
from transect.parallel.exchange import Exchange
from transect.parallel.group import Group
from transect.parallel.load import load_shard_on_device
from transect.parallel.mesh import Mesh
from transect.parallel.ring import RingContext
from transect.parallel.ring_pairs import own_tokens
from transect.parallel.shared_sums import shared_sums
from transect.parallel.spread_logits import spread_logits
from transect.parallel.world import Failure
from transect.spec.layouts.ranks import RankLayout
from transect.spec.layouts.shards import vocabulary_part
from transect.train.loop.follow import follow
from transect.train.objectives.base import StepFailed
from transect.train.objectives.next_token import NextToken


def collectives(world, given):
    mesh = Mesh(world, RankLayout(tensor=2))
    group = Mesh(world, RankLayout(tensor=2)).tensor
    assert group.group is mesh.tensor.group  # each has threads, so another mesh has no others
    group.all_reduce(torch.tensor([10.0, 10.0]))
    group.all_gather(torch.arange(10, 13))
    group.reduce_scatter(torch.arange(10, 14))
    group.all_to_all(torch.arange(10, 14))
    got = group.receive(torch.tensor([0]), 0)
    group.send(got + 1, 0).wait()
    world.exchange(given["long"])
    for shown in (lambda: world.agree({"the seed": 2}), lambda: world.exchange(Failure("turn it off", user=True))):
        with contextlib.suppress(ValueError):
            shown()


def fail(world, given):
    raise RuntimeError("on purpose")


def follow_without_data(world, given):
    """Trains as the first rank does, until the data of a step (from 0) cannot be read here."""
    run, step = given
    with pytest.MonkeyPatch.context() as patch:
        fail_at(step, patch)
        follow(world, run)


def fail_at(step, patch):
    """Data that cannot be read from a step on."""
    whole = NextToken.batches

    def batches(self, number):
        if number >= step:
            raise StepFailed("the disk is gone")
        return whole(self, number)

    patch.setattr(NextToken, "batches", batches)


def tables_of_a_run(world, run):
    """Trains; each rank's part of the embedding afterwards, None where it has none."""
    trainer = run.trainer(world)
    trainer.run()
    table = trainer.optimizer.parameters.get("embed.weight")
    return world.exchange(None if table is None else table.detach())


def measure_with_other_numbers(world, plan):
    """This rank sends what nobody expects."""
    numbers = collectives_of_bench._numbers
    collectives_of_bench._numbers = lambda *arguments: numbers(*arguments) + 1
    try:
        collectives_of_bench.measure(world, plan)
    finally:
        collectives_of_bench._numbers = numbers


def layout_along(axis="tensor", *, size):
    """So many ranks; those along the data axis share experts."""
    return RankLayout(**{axis: size}, expert=axis == "data")


def gpu_tokens(world, given):
    """The tokens of the executor for GPUs, on CPU tensors, over this rank's part of a model: layers fused, logits
    gathered. ``given``: the model's folder, and what kind its matrices are."""
    path, quantization, prompts, *axis = given
    source, mesh = resolve(path), Mesh(world, layout_along(*axis, size=world.size))
    ops = resolve_ops("cpu", batch_invariant=True)
    # torch computes: in the interpreter the kernels take minutes
    int4 = partial(ServingInt4, products=Int4Products(int4_matmul.reference, _gated_by_torch))
    kinds = None if quantization is None else lambda name: Dense if name == "head" else int4
    options = {"dtype": torch.float32, "ops": ops, "max_positions": 64, "kinds": kinds}
    if world.size > 1:
        model = load_shard_on_device(source, mesh=mesh, **options)
    else:
        model = load_on_device(source, device=torch.device("cpu"), **options)
    assert isinstance(model.stack, FusedStack)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 64}
    caches = model.new_kv_cache(33, 16, torch.float32)
    for cache in caches:
        cache.zero_()
    depth = mesh.pipeline.size
    config = SchedulerConfig(num_blocks=32, block_size=16, seed=3, pipeline_depth=depth, **limits)
    core = EngineCore(Scheduler(config, WallClock()), runner_of(model, caches, mesh, **limits), lag=1)
    together = mesh.data if mesh.layout.expert else Group.alone()
    core.idle = core.executor.idle if together.size > 1 else None
    for index, prompt in enumerate(prompts):
        if index and index % together.size != together.rank:  # the first one is everybody's
            continue
        params = SamplingParams(max_tokens=10, temperature=float(index % 2), logprobs=2 if index == 1 else None)
        core.add(Request(str(index), tuple(prompt), params))
    found = {}
    while together.most(core.has_work):
        for output in core.step():
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
    return found


class Alone:
    """A world of this process alone, for comparison."""

    rank, size, device, on_host = 0, 1, torch.device("cpu"), 1


def own_sums(world, given):
    """Sums of many sizes between GPUs in a CUDA graph, alone and in norms, while ranks and blocks dawdle; how many
    numbers are wrong on each rank."""
    group = Mesh(world, RankLayout(tensor=world.size)).tensor
    if group.ranks not in world.sums:
        world.sums[group.ranks] = shared_sums(world, group)
    peers = world.sums[group.ranks].peers
    shapes = [(1, 4096), (1, 64), (256, 4096), (33, 8192), (2, 64), (128, 4096)]
    parts = []
    for seed, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(seed)
        parts.append(torch.randn(world.size, *shape, generator=generator, dtype=torch.bfloat16).to(world.device))
    mine = [part[world.rank].contiguous() for part in parts]
    weights = [torch.ones(shape[1], dtype=torch.bfloat16, device=world.device) for shape in shapes]

    def work():
        found = []
        for x, weight in zip(mine, weights, strict=True):
            found += [peers.sum(x, delay=30_000), *peers.add_norm(x, x, weight, 1e-5, delay=30_000)]
        return found

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    wrong = 0
    with torch.cuda.stream(stream):
        work()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            outs = work()
        for _ in range(20):
            for out in outs:
                out.zero_()
            graph.replay()
            for i, (part, x, weight) in enumerate(zip(parts, mine, weights, strict=True)):
                total = all_reduce.reference(part)[0]
                normed, stream_after = add_rms_norm.reference(total, x, weight, 1e-5)
                found = outs[3 * i : 3 * i + 3]
                wrong += int((found[0] != total).sum()) + int((found[2] != stream_after).sum())
                wrong += int(((found[1].float() - normed.float()).abs() > 0.03).sum())
    return world.exchange(wrong)


def ring_attention(world, given):
    """Attention to packed documents by a ring, with its gradients, each beside that of one rank."""
    mesh = Mesh(world, RankLayout(context=world.size))
    total, generator = given["ends"][-1], torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(total, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4))
    cu_seqlens = torch.tensor(given["ends"], dtype=torch.int32)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = VarlenContext(cu_seqlens).attend(0, *whole, 0.3, given["window"])
    expected.backward(g)
    parts = own_tokens(total, world.rank, world.size)

    def own(x):
        return torch.cat([x[part] for part in parts])

    mine = [own(x).requires_grad_() for x in (q, k, v)]
    found = RingContext(cu_seqlens, mesh.context).attend(0, *mine, 0.3, given["window"])
    found.backward(own(g))
    return [(found, own(expected)), *((a.grad, own(b.grad)) for a, b in zip(mine, whole, strict=True))]


def spread_draws(world, given):
    """Draws of every kind in a CUDA graph, from logits that stay on the rank that made them, beside draws from whole
    rows; how many tokens differ on each rank."""
    group = Mesh(world, RankLayout(tensor=world.size)).tensor
    if group.ranks not in world.sums:
        world.sums[group.ranks] = shared_sums(world, group)
    group.sums = world.sums[group.ranks].used(dependent_launch=True, exact=False)
    wrong = 0
    for rows, vocab, dtype in ((1, 128256, torch.bfloat16), (64, 128256, torch.bfloat16), (13, 5000, torch.float32)):
        spread = spread_logits(world, group, vocab, 64, dtype)
        whole = torch.zeros(rows, vocab, dtype=dtype, device=world.device)
        made = sampling.inputs(whole, sampling.SETTINGS, rows)
        tokens = vocabulary_part(vocab, group.rank, group.size)
        mine = torch.zeros(rows, tokens.stop - tokens.start, dtype=dtype, device=world.device)
        parameters = {name: value for name, value in made.items() if name != "logits"}
        draw = partial(sampling.sample, mine, **parameters, spread=spread)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            draw()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                out = draw()
            for turn in range(20):
                generator = torch.Generator(world.device).manual_seed(turn)
                scale = (0.3, 3.0, 12.0)[turn % 3]  # flat rows too
                whole.copy_(torch.randn(whole.shape, generator=generator, device=world.device) * scale)
                mine.copy_(whole[:, tokens])
                group.all_reduce(torch.zeros(64, device=world.device))  # as the layers of a step do: nobody still reads
                graph.replay()
                wrong += int((out != sampling.sample(**made)).sum())
    torch.cuda.synchronize()
    return world.exchange(wrong)


def exchanged(world, given):
    """Tokens with two of four experts, two on each rank; what comes back, its gradient, and the tokens that came."""
    tokens, dtype = given
    group = Mesh(world, RankLayout(data=2)).data
    generator = torch.Generator().manual_seed(world.rank)
    own = tokens[world.rank]
    x = torch.randn(own, 6, generator=generator).to(dtype).requires_grad_(True)
    experts = torch.rand(own, 4, generator=generator).argsort(1)[:, :2]
    exchange = Exchange(experts, 2, group)
    sent = exchange.send(x)
    out = exchange.bring_back(sent * (world.rank + 1))
    (gradient,) = torch.autograd.grad((out * (out / x).detach()).sum(), x)
    return x.detach(), experts, out.detach(), gradient, len(sent)
