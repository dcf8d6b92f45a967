"""What an engine captures and compiles after its start, while requests wait: nothing."""

import json
import random

import pytest
import torch

from transect.engine.build import build_engine
from transect.engine.config import EngineConfig
from transect.engine.executors.gpu.capture import large_steps
from transect.engine.executors.gpu.graphs import GraphCache
from transect.engine.executors.gpu.runner import GPURunner
from transect.engine.scheduling.batch import LateWork
from transect.engine.scheduling.clock import VirtualClock
from transect.engine.scheduling.core import EngineCore
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler import Scheduler
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.models.decoder import Decoder
from transect.spec.hf import to_hf
from transect.spec.model import ModelConfig

SHAPE = ModelConfig(
    architecture="llama",
    vocab_size=512,
    dim=256,
    n_layers=2,
    n_heads=8,
    n_kv_heads=2,
    head_dim=64,
    ffn_dim=512,
    max_position=32768,
)


def test_captures_after_the_start_are_counted():
    class Graphs(GraphCache):
        def _capture(self, key, work):
            self._graphs[key] = None, work()
            self.late += self.started

    graphs = Graphs(None)
    graphs.prepare("a", int)
    graphs.started = True
    graphs.prepare("a", int)
    assert graphs.late == 0
    graphs.prepare("b", int)
    assert graphs.late == 1


def test_steps_too_large_for_a_graph_run_before_requests_come(monkeypatch):
    """Whole prompts and chunks, alone and beside decodes, of no size that has a graph; nobody's cache is written."""
    limits = {"max_num_seqs": 24, "max_num_batched_tokens": 400, "max_model_len": 512}
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    caches = model.new_kv_cache(5, 16, torch.float32)
    for cache in caches:
        cache.zero_()
    runner = GPURunner(model, *caches, **limits, graph_tokens=300, whole_prompts=(100, 8), prune_last_layer=True)
    plans = []
    plan = runner._planner.plan
    monkeypatch.setattr(runner._planner, "plan", lambda *given: plans.append(plan(*given)) or plans[-1])
    for batch in large_steps(runner.graph_tokens, 4, **limits):
        assert runner.submit(batch).result().tokens
    kinds = {(each.whole is not None, sum(row.num_tokens == 1 for row in each.rows)) for each in plans}
    assert kinds == {(True, 0), (False, 0), (True, 16), (False, 16)}
    assert not any(each.graph or each.decode for each in plans)
    assert all(not cache[:, :4].any() for cache in caches) and all(cache[:, 4].any() for cache in caches)
    assert list(large_steps(400, 4, **limits)) == []  # graphs are for all
    assert list(large_steps(300, 4, **limits | {"max_model_len": 16})) == []  # nothing has room to have begun


def test_late_work_is_among_the_stats():
    config = SchedulerConfig(num_blocks=8, block_size=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16)
    model = Decoder(SHAPE)
    limits = {name: getattr(config, name) for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")}
    runner = GPURunner(model, *model.new_kv_cache(9, 4, torch.float32), **limits)
    runner.started()
    assert runner.late_work() == LateWork(0, 0)
    runner._compilations = lambda: 3
    stats = EngineCore(Scheduler(config, VirtualClock()), runner).stats()
    assert (stats.late_captures, stats.late_compilations) == (0, 3 - runner._compiled_before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_irregular_arrivals_capture_and_compile_nothing(tmp_path):
    """Prompts of all lengths that come one by one, and long ones, beside sequences that decode; many short at once."""
    (tmp_path / "config.json").write_text(json.dumps(to_hf(SHAPE)))
    config = EngineConfig(
        model=str(tmp_path), load_format="dummy", max_num_seqs=64, kv_cache_tokens=1 << 17, mixed_step_limit="auto"
    )
    core = build_engine(config).core
    rng = random.Random(0)
    left = [rng.choice((1, 3, 40, 130, 700, 2500)) for _ in range(150)] + [9000, 30000]
    rng.shuffle(left)
    number = 0
    while left or core.has_work:
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 5)) if left else 0):
            if not left:
                break
            number += 1
            prompt = tuple(rng.randrange(512) for _ in range(left.pop()))
            options = rng.choice(({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 20}))
            params = SamplingParams(max_tokens=rng.randint(1, 60), ignore_eos=True, **options)
            core.add(Request(str(number), prompt, params, 0, None, ()))
        core.step()
    for burst in range(40):
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        core.add(Request(f"burst {burst}", (burst, 1, 2, 3, 4), params, 0, None, ()))
    while core.has_work:
        core.step()
    stats = core.stats()
    assert stats.steps > 100
    assert (stats.late_captures, stats.late_compilations) == (0, 0)
