"""Predicted gains refer to the time without profiling: what profiling adds, and what a loop or a statement is."""

import gc
import json
import linecache
import time
import types

import numpy as np
import pytest
import torch
from planted_faults import ceilings
from torch import nn
from undisturbed import undisturbed

from transect.explain.program.doing import doing_of, loop_at, needs_itself, statement, whole_kind
from transect.explain.program.explain import explain_trace
from transect.explain.program.finding import Finding, Material, weighed
from transect.explain.program.findings import EVICTED, WARMER, _warmed
from transect.explain.program.gaps import COMPUTES, _find_python
from transect.explain.program.libraries import fused_seconds, placed
from transect.explain.program.overhead import LARGEST_S, IdleGap, segment_costs
from transect.explain.program.recording import Recording, autograd_seconds
from transect.explain.program.sampler import Frame, Sample, StackSamples, own_times
from transect.explain.program.steady import Steps
from transect.explain.program.steps import StepWatch
from transect.explain.program.switches import SWITCHES
from transect.explain.program.trace import OP
from transect.explain.program.trace_file import read_trace

SOURCE = """import json

def work(rows):
    for row in rows:
        x = make([
            json.loads(each)
            for each in row])
        model(x)
    done()
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SOURCE)
    linecache.checkcache(str(path))
    return str(path)


def test_profiling_costs_a_constant_for_each_segment_and_never_all_of_it():
    lengths = np.array([2e-6] * 1000 + [5e-3])
    costs = segment_costs(lengths, 0.0, 6e-3)  # 7 ms were profiled
    assert costs.sum() == pytest.approx(1e-3)
    assert costs[-1] == pytest.approx(costs[0]), "Python between operators is as long as it was"
    assert (segment_costs(lengths, 0.0, 1e-4) < lengths).all()
    assert segment_costs(lengths, 0.0, 1.0).sum() == 0.0
    assert segment_costs(lengths, 1e-6, None)[-1] == 1e-6
    assert segment_costs(np.array([1.0]), 0.0, 0.5)[0] == pytest.approx(LARGEST_S)


def test_a_sample_stands_for_the_time_since_the_one_before():
    samples = [Sample(at, (Frame("a.py", name, 1),), 0) for at, name in ((0.0, "x"), (0.01, "x"), (0.04, "y"))]
    assert weighed(samples, lambda sample: sample.stack[0].function) == pytest.approx({"x": 0.25, "y": 0.75})


def test_a_statement_has_several_lines_and_a_loop_is_found(source):
    assert "json.loads" in statement(source, 5) and "json.loads" in statement(source, 7)
    assert "json" not in statement(source, 8) and "json" not in statement(source, 4)
    assert doing_of((Frame(source, "work", 5),)).kind == "parse"
    assert doing_of((Frame(source, "work", 8),)).kind == "python"
    assert doing_of((Frame("/x/site-packages/PIL/Image.py", "save", 1), Frame(source, "work", 9))).kind == "saving"
    assert loop_at(Frame(source, "work", 8)) == (source, 4)
    assert loop_at(Frame(source, "work", 9)) == ("", 0) == loop_at(None)


@pytest.mark.parametrize(("backward", "kinds"), [(False, ["python"]), (True, ["python", "launch"])])
def test_what_one_batch_replaces_is_one_finding(source, backward, kinds):
    samples = [Sample(0.002 * i, (Frame(source, "work", 8),), 0) for i in range(100)]
    found = [Finding("python", "Python", "", 0.6, "", share=0.6), Finding("launch", "calls", "", 0.3, "", share=0.3)]
    material = Material(None, None, plain_samples=StackSamples(samples=samples), facts={"backward": backward})
    merged = list(placed(found, material))
    assert [each.kind for each in merged] == kinds
    assert merged[0].share == pytest.approx(0.6 if backward else 0.9)
    assert merged[0].where.startswith("script.py:8 in work")


def test_calls_of_a_loop_inside_of_a_step_are_one_finding_with_its_python(tmp_path):
    """Most samples show the loop of training, which a batch does not replace."""
    path = tmp_path / "train.py"
    path.write_text("for x in batches:\n    for row in x:\n        make(row)\n    y.backward()\n    opt.step()\n")
    step, backward = Frame("/x/torch/optim/sgd.py", "step", 1), Frame("graph.py", "_engine_run_backward", 1)
    stacks = [(*inner, Frame(str(path), "train", line)) for inner, line in (((), 3), ((backward,), 4), ((step,), 5))]
    samples = [Sample(0.002 * i, stack, 0) for i, stack in enumerate(stacks * 40)]
    found = [Finding("launch", "calls", "", 0.4, "", share=0.4), Finding("python", "Python", "", 0.2, "", share=0.2)]
    (merged,) = placed(found, Material(None, None, plain_samples=StackSamples(samples=samples)))
    assert merged.kind == "launch" and merged.share == pytest.approx(0.6)
    assert merged.where.startswith("train.py:3")


@pytest.mark.parametrize(
    ("kind", "place", "words"),
    [
        ("launch", "transformers/generation/utils.py:_sample", "cache_implementation = 'static'"),
        ("loading", "transformers/trainer.py:_inner_training_loop", "dataloader_num_workers=4"),
        ("padding", "trl/trainer/sft_trainer.py:train", "packing=True"),
        ("float32 products", "transformers/trainer.py:training_step", "bf16=True"),
        ("eager", "transformers/trainer.py:training_step", "torch_compile=True"),
        ("optimizer", "transformers/trainer.py:training_step", "adamw_torch_fused"),
        ("sync", "lightning/pytorch/loops/fit_loop.py:run", "log_every_n_steps=50"),
        ("launch", "sentence_transformers/SentenceTransformer.py:encode", "batch_size=64"),
        ("python", "sklearn/base.py:transform", "once for all rows"),
        ("launch", "torch_geometric/nn/conv/gcn_conv.py:forward", "torch_geometric.loader.DataLoader"),
        ("float32 products", "accelerate/accelerator.py:backward", "mixed_precision='bf16'"),
    ],
)
def test_advice_names_the_users_line_and_the_librarys_own_switch(source, kind, place, words):
    file, _, function = place.rpartition(":")
    loader = (Frame("/x/torch/utils/data/dataloader.py", "__next__", 1),) if kind == "loading" else ()
    stack = (*loader, Frame(f"/x/site-packages/{file}", function, 1), Frame(source, "work", 8))
    material = Material(
        types.SimpleNamespace(on_gpu=False), None, plain_samples=StackSamples(samples=[Sample(0.0, stack, 0)] * 80)
    )
    (found,) = placed([Finding(kind, kind, "", 0.5, "the usual", share=0.5)], material)
    assert words in found.advice and found.advice.endswith("Else: the usual")
    assert found.where == f"script.py:8 in work, which calls {function} ({file})"


def test_calls_are_faster_without_other_code_between_them():
    split = types.SimpleNamespace(on_gpu=False, own=1.0, parts={"launch": 0.5}, loading=[])
    material = Material(split, None)
    assert _warmed(Finding("parse", "", "", 0.5, ""), 0.5, material) == pytest.approx(0.5 + EVICTED * 0.5)
    assert _warmed(Finding("parse", "", "", 0.9, ""), 0.9, material) == pytest.approx(0.9 + WARMER * 0.1)
    assert _warmed(Finding("sleep", "", "", 0.5, ""), 0.5, material) == 0.5


def test_gaps_between_the_same_operators_have_one_cause(source):
    """Samples in a few of them show Python that calls no operators: all of them are Python, though other gaps are as
    long, in which operators are called."""
    gaps = [IdleGap(0.001 * i, 0.001 * i + 0.0002) for i in range(40)]
    python, calls = gaps[::2], gaps[1::2]
    module = (Frame("/x/torch/nn/modules/linear.py", "forward", 1), Frame(source, "work", 8))
    stacks = [(Frame(source, "work", 8),), module]
    samples = StackSamples(samples=[Sample(gaps[i].begin + 0.0001, stacks[i % 2], 0) for i in range(10)])
    _find_python(types.SimpleNamespace(gaps=gaps), samples, [python, calls])
    assert {gap.label for gap in python} == {COMPUTES} and {gap.label for gap in calls} == {""}


def test_own_time_leaves_out_waits_for_a_core():
    """The thread waits from 2 to 6; the system says so when the wait has ended."""
    times, delays = [0.0, 1.0, 2.5, 4.0, 6.5, 7.5], [1.0, 1.0, 1.0, 1.0, 5.0, 5.0]
    assert own_times(times, delays) == [-1.0, 0.0, 1.5, 1.5, 1.5, 2.5]


@pytest.mark.parametrize(("waits", "share"), [((3.0, 3.0, 3.0), 0.0), ((3.0, 1e6, 1e6), 1.0)])
def test_a_recording_knows_how_long_its_thread_waited_for_a_core(monkeypatch, waits, share):
    seconds = iter(waits)
    monkeypatch.setattr("transect.explain.program.recording.delayed_seconds", lambda: next(seconds))
    recording = Recording(stacks=False)
    recording.start()
    own = recording.own_seconds
    recording.stop()
    recording.finish()
    assert recording.delayed == share and (own > 0) is (share < 1)


@pytest.mark.parametrize(("delayed", "python"), [(0.0, True), (0.75, False)])
def test_waits_for_a_core_are_no_python(tmp_path, source, delayed, python):
    """One of 400 gaps lasts 300 of 400 ms, with samples in it: the thread waited for a core if the system says so."""
    at, events, every = 0.0, [], {"ph": "X", "cat": "cpu_op", "name": "aten::neg", "dur": 200, "pid": 1, "tid": 1}
    for i in range(400):
        events.append(every | {"ts": at, "args": {"Input Dims": [[4, 4]], "Input type": ["float"]}})
        at += 250.0 if i != 200 else 300_000.0
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    samples = StackSamples(samples=[Sample(0.05 + 0.005 * i, (Frame(source, "work", 8),), 0) for i in range(70)])
    steps = Steps("optimizer step", 20, 10, 0.01, 0.01, 0.0, 0.0, 1.0)
    found = explain_trace(read_trace(path), ceilings(), samples, facts={"delayed": delayed}, steps=steps)
    assert (found.split.share("host") > 0.5) is python
    assert found.split.own == pytest.approx((1 - delayed) * found.split.wall)
    assert sum(found.split.parts.values()) == pytest.approx(found.split.wall)


def test_samples_have_the_clock_of_the_trace():
    def outside():
        """Seconds by which an operator lies before or after the time in which it ran."""
        recording = Recording(stacks=False)
        recording.start()
        first = time.perf_counter()
        torch.ones(3).neg()
        last = time.perf_counter()
        recording.stop()
        trace, _ = recording.read()
        (index,) = (i for i in trace.where(OP) if trace.key_of(int(i)).name == "aten::neg")
        at = trace.ts[index] - recording.offset
        return max(first - at, at - last)

    def is_near(seconds):
        return seconds <= 100e-6  # the profiler's clock may differ by some microseconds

    assert is_near(undisturbed(outside, is_near))


def test_events_are_made_after_the_program():
    """A recording that has stopped sees no more operators, and its events are made when it is read."""
    recording = Recording(stacks=False)
    recording.start()
    torch.ones(3).neg()
    recording.stop()
    torch.ones(3).abs()
    assert not torch.autograd.profiler._is_profiler_enabled
    trace, _ = recording.read()
    names = {key.name for key in trace.keys}
    assert "aten::neg" in names and "aten::abs" not in names


def test_a_single_long_wait_is_in_no_step():
    samples = [Sample(0.001 * i, (Frame("x", "work", 1),), 0) for i in range(40)]
    samples.append(Sample(9.0, (Frame("x", "collect", 1),), 0))
    assert weighed(samples, lambda sample: sample.stack[0].function)["collect"] < 0.1


HOOKED = Frame("/x/torch/nn/modules/module.py", "_call_impl", 1)


@pytest.mark.parametrize(
    ("stack", "kind"),
    [
        ((Frame("user.py", "watch", 1), HOOKED, Frame("user.py", "work", 2)), "hooks"),
        ((Frame("user.py", "forward", 1), HOOKED, Frame("user.py", "work", 2)), "python"),
        ((Frame("user.py", "forward", 1), Frame("user.py", "wrapper", 1), HOOKED), "python"),
        (
            (Frame("/site-packages/transformers/w/feature_extraction_w.py", "call", 1), Frame("user.py", "work", 2)),
            "preparing",
        ),
        (
            (Frame("/site-packages/lightning/pytorch/loggers/csv_logs.py", "save", 1), Frame("user.py", "work", 2)),
            "logging",
        ),
    ],
)
def test_hooks_and_prepared_inputs_contain_other_work(stack, kind):
    assert whole_kind(stack) == kind


@pytest.mark.parametrize(("body", "needs"), [("y = y * 0.9", True), ("y = f(x)", False), ("x = x * 2", False)])
def test_a_loop_may_need_its_own_results(tmp_path, body, needs):
    path = tmp_path / "loop.py"
    path.write_text(f"def work():\n    for x in range(3):\n        {body}\n")
    assert needs_itself((str(path), 2)) is needs


def test_forgetting_is_a_part_of_recording():
    measure = autograd_seconds.__wrapped__  # it is cached
    whole, forgotten = undisturbed(lambda: measure(False), lambda found: found[0] >= found[1])
    assert whole >= forgotten >= 0.0


def test_calls_that_need_the_result_of_the_one_before_are_a_chain():
    def chained(feed):
        watch, cell, x = StepWatch(), nn.RNNCell(4, 4), torch.ones(2, 4)
        watch.start()
        try:
            h = torch.zeros(2, 4)
            for _ in range(6):
                h = cell(x, h if feed else torch.zeros(2, 4))
        finally:
            watch.stop()
        return watch.chained

    assert chained(True) and not chained(False)


def test_a_tensor_that_each_call_passes_on_makes_no_chain():
    class Decoder(nn.Module):
        def forward(self, ids, encoded):
            return encoded.sum() + ids, encoded  # as models of transformers return the encoder's output

    watch, decoder, encoded = StepWatch(), Decoder(), torch.ones(2, 4)
    watch.start()
    try:
        for number in range(6):
            decoder(torch.full((2,), number), encoded)
    finally:
        watch.stop()
    assert not watch.chained


def test_a_new_optimizer_takes_the_number_of_one_that_is_gone():
    watch, net = StepWatch(lambda mark: None), nn.Linear(2, 2)
    watch.start()
    try:
        for _ in range(3):
            torch.optim.SGD(net.parameters()).step()
        first, second = torch.optim.SGD(net.parameters()), torch.optim.SGD(net.parameters())
        first.step(), second.step()
    finally:
        watch.stop()
    assert sorted(watch.counts.values()) == [1, 4]


def test_fused_attention_is_timed():
    assert fused_seconds(2, 16, 16, 8, torch.float32, "cpu") > 0


def test_switches_are_off_only_inside():
    seen = {}
    for name in ("no anomaly detection", "no collection", "no empty_cache"):
        with SWITCHES[name](), torch.autograd.set_detect_anomaly(True):
            seen[name] = torch.is_anomaly_enabled(), gc.isenabled(), gc.collect.__name__, torch.cuda.empty_cache()
    assert not seen["no anomaly detection"][0] and seen["no collection"][0]
    assert not seen["no collection"][1] and seen["no collection"][2] != "collect"
    assert gc.isenabled() and isinstance(gc.collect, types.BuiltinFunctionType)
    assert not torch.is_anomaly_enabled()
    with torch.autograd.set_detect_anomaly(True):
        assert torch.is_anomaly_enabled()


def test_models_are_built_with_fused_attention():
    from transformers import BertConfig, BertModel

    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    with SWITCHES["fused attention"]():
        inside = BertModel(BertConfig(**sizes, attn_implementation="eager"))
    outside = BertModel(BertConfig(**sizes, attn_implementation="eager"))
    assert inside.config._attn_implementation == "sdpa" and outside.config._attn_implementation == "eager"
