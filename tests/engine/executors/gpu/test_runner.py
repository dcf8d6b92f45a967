"""``GPURunner`` on the CPU against ``Runner``: its bookkeeping is the same on every device, only graphs are not."""

import itertools
import random
from collections import deque
from dataclasses import replace

import pytest
import torch
from effort import proving, quick_first
from runner_fuzz import VOCAB, Breaking, assert_same, random_arrivals, random_model, run_workload

from transect.engine.executors.drafted import Drafted
from transect.engine.executors.gpu.runner import GPURunner
from transect.engine.executors.gpu.step_inputs import StepFields
from transect.engine.executors.gpu.step_sizes import row_bucket, width_bucket, widths
from transect.engine.executors.runner import Runner
from transect.engine.scheduling.drafters.registry import SpeculativeConfig
from transect.engine.scheduling.scheduler_config import SchedulerConfig


@pytest.fixture(scope="module")
def model():
    return random_model()


def scheduler_config(rng: random.Random) -> SchedulerConfig:
    seqs = rng.choice([3, 5, 9])
    return SchedulerConfig(
        num_blocks=rng.choice([16, 24, 80]),
        block_size=4,
        max_num_seqs=seqs,
        max_num_batched_tokens=rng.choice([seqs, 16, 64]),
        max_model_len=60,
        enable_prefix_caching=rng.random() < 0.7,
        seed=1,
    )


def executors(model, config, **options):
    caches = model.new_kv_cache(config.num_blocks, config.block_size, torch.float32)
    limits = {name: getattr(config, name) for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")}
    padded = model.new_kv_cache(config.num_blocks + 1, config.block_size, torch.float32)
    for cache in padded:
        cache.zero_()
    return Runner(model, *caches), GPURunner(model, *padded, **limits, **options)


@pytest.mark.parametrize("seed", quick_first(range(30), 3))
def test_same_tokens_as_the_cpu_runner(model, seed):
    torch.set_num_threads(1)
    rng = random.Random(seed)
    config = scheduler_config(rng)
    arrivals = random_arrivals(rng, VOCAB, 14)
    plain, device = executors(model, config)
    expected, _ = run_workload(plain, config, arrivals, lag=0)
    for lag in (0, 1):
        found, _ = run_workload(executors(model, config)[1] if lag else device, config, arrivals, lag=lag)
        assert_same(expected, found, arrivals)


@pytest.mark.parametrize("seed", quick_first(range(30), 3))
def test_same_tokens_with_drafts(model, seed):
    rng = random.Random(seed)
    plain = scheduler_config(rng)
    arrivals = random_arrivals(rng, VOCAB, 14)
    expected, _ = run_workload(executors(model, plain)[0], plain, arrivals, lag=0)
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, adaptive=False)
    config = replace(plain, speculation=drafts, max_num_seqs=3 * plain.max_num_seqs, max_num_batched_tokens=64)
    for at, runner in enumerate(executors(model, config)):
        found, _ = run_workload(Drafted(runner), config, arrivals, lag=at)
        assert_same(expected, found, arrivals)


def test_rows_that_share_a_sequence_wait_for_each_other_s_keys(model):
    """Kernels may ask for all keys but a row's last before the kernel that writes them has ended, unless told."""
    plain = scheduler_config(random.Random(0))
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, adaptive=False)
    config = replace(plain, speculation=drafts, max_num_seqs=3 * plain.max_num_seqs, max_num_batched_tokens=64)
    runner, found = executors(model, config)[1], []
    context = runner._context

    def record(plan):
        made = context(plan)
        found.append((made.batch.fresh, len(made.batch.block_tables.unique(dim=0)) < len(set(plan.seq_ids))))
        return made

    runner._context = record
    run_workload(Drafted(runner), config, random_arrivals(random.Random(0), VOCAB, 14), lag=1)
    assert {True, False} == {fresh for fresh, _ in found}
    assert all(fresh or not shared for fresh, shared in found)


@pytest.mark.parametrize(("seed", "lag"), quick_first(itertools.product(range(12), (0, 1)), [(0, 0), (1, 1)]))
def test_steps_that_fail_change_no_token(model, seed, lag):
    torch.set_num_threads(1)
    rng = random.Random(seed)
    config = scheduler_config(rng)
    drawn = random_arrivals(rng, VOCAB, 14 if proving() else 9)
    arrivals = [replace(arrival, abort_after=None) for arrival in drawn]
    expected, _ = run_workload(executors(model, config)[0], config, arrivals, lag=0)
    for runner in executors(model, config):
        breaking = Breaking(runner, rng)
        found, _ = run_workload(breaking, config, arrivals, lag=lag)
        assert_same(expected, found, arrivals)
        assert breaking.failures > 0


@pytest.mark.parametrize("seed", quick_first(range(6), 2))
def test_draws_on_the_host_are_the_same(model, seed):
    torch.set_num_threads(1)
    rng = random.Random(seed)
    config = scheduler_config(rng)
    arrivals = random_arrivals(rng, VOCAB, 14)
    expected, _ = run_workload(executors(model, config)[0], config, arrivals, lag=0)
    found, _ = run_workload(executors(model, config, sample_on_device=False)[1], config, arrivals, lag=1)
    assert_same(expected, found, arrivals)


@pytest.mark.prove
def test_workloads_meet_what_is_hard(model):
    """The fuzz above would prove little without preemption, prefix hits and errors-to-be in it."""
    totals = {"preemptions": 0, "hits": 0}
    for seed in range(16):
        rng = random.Random(seed)
        config = scheduler_config(rng)
        arrivals = random_arrivals(rng, VOCAB, 14)
        _, core = run_workload(executors(model, config)[1], config, arrivals, lag=1)
        stats = core.stats()
        totals["preemptions"] += stats.preemptions
        totals["hits"] += stats.prefix_hit_tokens
    assert totals["preemptions"] > 10 and totals["hits"] > 100


class InTwoWays:
    """Two runners on the same batches: one leaves in host memory what stays from step to step, one writes all anew."""

    def __init__(self, model, config):
        depth = config.pipeline_depth
        self.usual, self.anew = (executors(model, config, stages=depth)[1] for _ in range(2))
        for each in (self.usual, self.anew):
            each._planner.feeds = depth == 1
        self.kept = 0
        self.before = deque([()] * depth, maxlen=depth)

    def submit(self, batch):
        if batch.again:
            for row, before in zip(batch.rows, self.before[0], strict=True):
                assert (row.seq_id, row.start, row.num_tokens) == (before.seq_id, before.end, 1)
                assert row.block_ids is before.block_ids and [draw.seq_id for draw in row.draws] == [row.seq_id]
        self.before.append(batch.rows)
        memory = self.usual._ring.memory()
        held = memory.holds
        usual = self.usual.submit(batch)
        self.kept += held is not None and memory.holds == held
        for other in self.anew._ring._memory:
            other.holds = None
        self.anew._planner._groups.clear()
        self.anew._planner._groups.append(None)
        beside = self.anew._ring.memory()
        plans = []
        plan = self.anew._planner.plan
        self.anew._planner.plan = lambda *arguments: plans.append(plan(*arguments)) or plans[0]
        self.anew.submit(batch).draw()
        self.anew._planner.plan = plan
        layout = plans[0].layout
        found, wanted = (layout.numpy(each.memory) for each in (memory, beside))
        for name in StepFields._fields:
            assert (getattr(found, name) == getattr(wanted, name)).all(), name
        return usual


@pytest.mark.parametrize(("lag", "depth"), [(0, 1), (1, 1), (1, 2), (2, 3)])
def test_what_is_kept_in_host_memory_is_what_would_be_written(model, lag, depth):
    torch.set_num_threads(1)
    kept = 0
    for seed in range(8) if proving() else (3, 4)[: 1 + (depth == 1)]:
        rng = random.Random(seed)
        config = replace(scheduler_config(rng), pipeline_depth=depth)
        twice = InTwoWays(model, config)
        run_workload(twice, config, random_arrivals(rng, VOCAB, 14 if proving() else 9), lag=lag)
        kept += twice.kept
    assert kept > 5


def test_buckets():
    assert [row_bucket(n) for n in (1, 2, 3, 5, 9, 64, 65, 256, 257)] == [1, 2, 4, 8, 16, 64, 128, 256, 512]
    assert [width_bucket(n, 16, 8192) for n in (1, 64, 65, 256, 8000)] == [64, 64, 256, 256, 8192]
    assert widths(16, 8192) == [64, 256, 1024, 4096, 8192] and widths(16, 3) == [3]
    assert width_bucket(3, 16, 40) == 40
