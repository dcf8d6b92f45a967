"""Captures of CUDA graphs: what must not happen in their midst."""

import gc
from types import SimpleNamespace

import pytest
import torch
from gpu_engine import TINY

from transect.engine.executors.gpu.graphs import GraphCache, without_collector
from transect.engine.executors.gpu.runner import GPURunner
from transect.engine.executors.gpu.step_inputs import StepLayout
from transect.engine.scheduling.batch import Draw, ScheduledBatch, ScheduledRow
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.models.decoder import Decoder
from transect.ops.opset import resolve_ops


class Cycle:
    """Goes only when the collector comes."""

    def __init__(self, held: object = None) -> None:
        self.held, self.me = held, self


def test_the_collector_is_off_within_and_as_before_afterwards():
    assert gc.isenabled()
    with without_collector():
        assert not gc.isenabled()
        with without_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), without_collector():
        raise KeyError
    assert gc.isenabled()


class Refusing(GraphCache):
    """No graph can be captured."""

    tried = 0

    def _capture(self, key, work):
        self.tried += 1
        raise RuntimeError("no memory")


def test_work_that_cannot_be_captured_goes_on_without_a_graph(caplog):
    graphs = Refusing(stream=None)
    assert [graphs.run("decode", lambda: 5) for _ in range(3)] == [5, 5, 5] and graphs.tried == 1
    assert [graphs.run_rare("chunks", lambda: 6) for _ in range(4)] == [6, 6, 6, 6] and graphs.tried == 2
    assert caplog.text.count("could not be captured, and its steps run kernel by kernel: no memory") == 2
    with pytest.raises(RuntimeError, match="no memory"):
        graphs.prepare("at the start", lambda: 7)


@pytest.mark.parametrize(("own", "anyone"), [(False, False), (True, True), (False, True)])
def test_all_ranks_run_a_step_again_where_one_could_not_capture_it(own, anyone):
    model = Decoder(TINY, "cpu", torch.float32, ops=resolve_ops("cpu")).requires_grad_(False)
    caches = model.new_kv_cache(5, 16, torch.float32)
    said, steps, prepared = [], [], []
    runner = GPURunner(
        model, *caches, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64,
        anyone=lambda failed: said.append(failed) or anyone,
    )  # fmt: skip

    def prepare(key, work):
        prepared.append(key)
        if own and len(prepared) == 1:
            raise RuntimeError("a kernel was not loaded")

    runner.graphs = SimpleNamespace(prepare=prepare)
    runner._run_padding = lambda *_, **how: steps.append(how["eager"])
    runner._warm(StepLayout(2, 2, 2, 1), run=False)
    assert said == [own] and steps == [True] * anyone and len(prepared) == 1 + anyone
    prepared.clear()
    if anyone:
        with pytest.raises(RuntimeError, match="not loaded" if own else "another rank"):
            runner._warm(StepLayout(2, 2, 2, 1), run=True)


class Recording(GraphCache):
    """Runs work as it comes, and knows under which keys."""

    def _capture(self, key, work):
        self._graphs[key] = SimpleNamespace(replay=work), None

    def run(self, key, work):
        self._graphs[key] = None, None
        return work()


def test_layers_and_head_are_one_graph_for_all_draws_that_need_more_than_logits():
    """A graph of the layers takes tens of milliseconds to capture, one of the draws one; requests wait for it."""
    torch.manual_seed(0)
    model = Decoder(TINY, "cpu", torch.float32, ops=resolve_ops("cpu")).requires_grad_(False)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    caches = model.new_kv_cache(9, 16, torch.float32)
    runner = GPURunner(model, *caches, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
    runner.graphs = Recording(stream=None)

    def step(rows: int, **params) -> None:
        made = []
        for _ in range(rows):
            step.ids += 1
            draw = Draw(step.ids, 0, 0, SamplingParams(temperature=0.0, **params), (1,), [])
            made.append(ScheduledRow(step.ids, 0, 1, (1,), [], [step.ids % 8], (draw,)))
        result = runner.submit(ScheduledBatch(step.ids, tuple(made))).result()
        assert len(result.tokens) == rows and len(result.logprobs) == rows * ("logprobs" in params)

    step.ids = 0
    step(8)
    plain = set(runner.graphs._graphs)
    for params in ({"logprobs": 2}, {"frequency_penalty": 1.0}, {"logprobs": 1, "logit_bias": {3: 2.0}}):
        step(8, **params)
    step(8, presence_penalty=1.0)
    assert runner._adjust.generation > 1, "its tables have grown"
    more = set(runner.graphs._graphs) - plain
    assert len(plain) == 1 and sum(key[0] != "draws" for key in more) == 1
    assert {key[2][:2] for key in more if key[0] == "draws"} == {(False, True), (True, False), (True, True)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_an_engine_that_is_gone_does_not_end_a_capture():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.ones(1 << 20, device="cuda")
        gone = GraphCache(stream)
        for key in range(4):
            gone.run(key, lambda: x * 2)

        def work() -> torch.Tensor:
            litter = [Cycle() for _ in range(2000)]  # each may be the one with which the collector comes
            assert litter
            return x + 1

        graphs = GraphCache(stream)
        graphs.run("warm", work)
        thresholds = gc.get_threshold()
        Cycle((gone, torch.empty(1 << 26, device="cuda")))
        del gone
        gc.set_threshold(10, 1, 1)
        try:
            graphs._capture("captured", work)
        finally:
            gc.set_threshold(*thresholds)
        x.fill_(5)
        result = graphs.run("captured", work)
        assert bool((result == 6).all())
