"""Steps with prefill chunks: whole prompts apart, a pruned last layer; on the CPU, against ``Runner``."""

import random

import pytest
import torch
from effort import quick_first
from runner_fuzz import assert_same, random_arrivals, run_workload

from transect.engine.executors.gpu.graphs import GraphCache
from transect.engine.executors.gpu.runner import GPURunner
from transect.engine.executors.gpu.step_sizes import mixed_size, mixed_sizes, row_bucket, row_buckets, token_bucket
from transect.engine.executors.runner import Runner
from transect.engine.scheduling.batch import StepResult
from transect.engine.scheduling.clock import VirtualClock
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler import Scheduler
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack
from transect.ops.opset import resolve_ops
from transect.spec.model import ModelConfig

VOCAB = 61
CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=VOCAB,
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    ffn_dim=48,
    max_position=128,
    qk_norm=True,
)


@pytest.fixture(scope="module", params=["layer by layer", "fused"])
def model(request):
    ops = resolve_ops("cpu", batch_invariant=True)
    decoder = Decoder(CONFIG, dtype=torch.float32, ops=ops).requires_grad_(False)
    decoder.init_weights(0.3, torch.Generator().manual_seed(0))
    if request.param == "fused":
        decoder.stack = FusedStack(decoder, max_positions=128)
    return decoder


def scheduler_config(rng: random.Random) -> SchedulerConfig:
    seqs = rng.choice([3, 9, 20])
    return SchedulerConfig(
        num_blocks=rng.choice([24, 80]),
        block_size=4,
        max_num_seqs=seqs,
        max_num_batched_tokens=rng.choice([seqs, 32, 64]),
        max_model_len=60,
        enable_prefix_caching=rng.random() < 0.7,
        seed=1,
    )


def runner(model, config, kind=GPURunner, **options):
    caches = model.new_kv_cache(config.num_blocks + (kind is GPURunner), config.block_size, torch.float32)
    for cache in caches:
        cache.zero_()
    if kind is Runner:
        return Runner(model, *caches)
    limits = {name: getattr(config, name) for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")}
    return GPURunner(model, *caches, **limits, **options)


class Shapes:
    """An executor that notes which layouts its steps had."""

    def __init__(self, inner):
        self.inner, self.seen = inner, set()
        planned = inner._planner._ragged

        def plan(batch, memory, adapters):
            made = planned(batch, memory, adapters)
            if made.whole is None:
                self.seen.add("none")
            else:
                row, token = made.whole.row, made.whole.token
                self.seen.add("alone" if row == 0 else "after decodes" if row == token else "after chunks")
            return made

        inner._planner._ragged = plan

    def submit(self, batch):
        return self.inner.submit(batch)


@pytest.mark.parametrize("seed", quick_first(range(6), 3))
def test_same_tokens_as_the_cpu_runner(model, seed):
    torch.set_num_threads(1)
    rng = random.Random(seed)
    config = scheduler_config(rng)
    arrivals = random_arrivals(rng, VOCAB, 14)
    expected, _ = run_workload(runner(model, config, Runner), config, arrivals, lag=0)
    options = {"whole_prompts": (2, 0), "prune_last_layer": seed % 2 == 0}
    found, _ = run_workload(runner(model, config, **options), config, arrivals, lag=1)
    assert_same(expected, found, arrivals)


def test_every_layout_comes_up(model):
    torch.set_num_threads(1)
    seen, layouts = set(), {"none", "alone", "after decodes", "after chunks"}
    for seed in range(6):
        if seen == layouts:
            break
        rng = random.Random(seed)
        config = scheduler_config(rng)
        executor = Shapes(runner(model, config, whole_prompts=(2, 0)))
        run_workload(executor, config, random_arrivals(rng, VOCAB, 14), lag=1)
        seen |= executor.seen
    assert seen == layouts


@pytest.mark.parametrize("fill_tokens", [None, 64])
def test_graphs_of_irregular_steps_are_there_before_the_first_of_them(model, monkeypatch, fill_tokens):
    """What is captured at the start, against what the planner makes of prompts that come one by one."""
    sizes = {"max_num_seqs": 40, "max_num_batched_tokens": 256, "max_model_len": 60}
    config = SchedulerConfig(num_blocks=600, block_size=4, longest_first=True, fill_tokens=fill_tokens, seed=1, **sizes)
    executor = runner(model, config, graph_tokens=128, prune_last_layer=True)
    captured = set()

    def on_padding(layout, starts=None, *, decode, graph, prune=False, chunk_rows=None, **rest):
        captured.add((layout, decode, prune, chunk_rows))

    monkeypatch.setattr(executor, "_run_padding", on_padding)
    executor.warm(row_buckets(40), mixed=True)
    scheduler = Scheduler(config, VirtualClock())
    rng = random.Random(0)
    wanted = set()
    waiting = list(range(120))
    while waiting or scheduler.has_unfinished:
        for index in [waiting.pop() for _ in range(min(len(waiting), rng.choice([0, 0, 1, 1, 9])))]:
            params = SamplingParams(max_tokens=rng.randint(1, 30), temperature=0.0, ignore_eos=True)
            prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 29)))
            scheduler.add(Request(str(index), prompt, params, 0, None, ()))
        batch = scheduler.schedule()
        if batch is None:
            continue
        plan = executor._planner.plan(batch, executor._ring.memory())
        if plan.graph or plan.decode:
            wanted.add((plan.layout, plan.decode, plan.prune, plan.chunk_rows))
        scheduler.commit(batch, StepResult({draw.seq_id: 7 for row in batch.rows for draw in row.draws}))
    assert len({layout.tokens for layout, *_ in wanted}) >= 4 and wanted <= captured


def test_token_buckets():
    assert [token_bucket(n) for n in (1, 64, 65, 129, 200, 1025, 2049)] == [64, 64, 80, 160, 256, 1280, 3072]
    for tokens in range(65, 3000):
        assert tokens <= token_bucket(tokens) <= (1.6 if tokens <= 256 else 1.34 if tokens <= 2048 else 1.5) * tokens


def test_sizes_of_mixed_steps_are_few_and_hold_what_they_are_for():
    sizes = mixed_sizes(866, 16, 8192, 256)
    assert len(sizes) < 130 and len(mixed_sizes(8192, 16, 8192, 512)) < 170
    rng = random.Random(0)
    for _ in range(500):
        decodes = rng.randint(0, 256)
        tokens = rng.randint(decodes + 2, 866)
        blocks = rng.randint(1, 8192)
        size = mixed_size(tokens, 16 + decodes, blocks, 16, 8192, 16 + 256)
        assert size in sizes
        assert size.tokens >= tokens and size.rows >= 16 + decodes and size.width >= blocks and size.rows != size.tokens


def test_fine_buckets_of_rows():
    assert [row_bucket(n, fine=True) for n in (3, 24, 32, 33, 49, 65, 97, 129, 160, 161, 193, 209, 256, 257, 400)] == [
        *(4, 32, 32, 48, 64, 96, 128, 160, 160, 192, 208, 256, 256, 384, 512),
    ]  # fmt: skip
    assert row_buckets(200, fine=True) == [208, 192, 160, 128, 96, 64, 48, 32, 16, 8, 4, 2, 1]


class Recorded:
    """In place of a CUDA graph."""

    def __init__(self, work):
        self.replay = work


def test_rare_work_is_captured_when_it_comes_again():
    class Graphs(GraphCache):
        def _capture(self, key, work):
            self._graphs[key] = Recorded(lambda: calls.append(f"replay {key}")), f"result of {key}"

    calls = []
    graphs = Graphs(None, most_rare=2)

    def run(key):
        return graphs.run_rare(key, lambda: calls.append(f"eager {key}") or "eager")

    assert [run("a"), run("a"), run("a")] == ["eager", "result of a", "result of a"]
    assert calls == ["eager a", "replay a", "replay a"]
    graphs.prepare("ready", lambda: calls.append("eager ready"))
    assert run("ready") == "result of ready" and calls.pop() == "replay ready"
    assert [run("b"), run("b"), run("c"), run("c"), run("c")] == ["eager", "result of b", "eager", "eager", "eager"]
