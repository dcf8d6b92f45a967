"""Needless work: gradients without a use, sequences and layers computed again, tensors of all pairs."""

import json
import types

import numpy as np
import pytest
import torch
from planted_faults import ceilings
from torch import nn

from transect.explain.program.doing import LIBRARY, calls_itself, doing_of, loop_at
from transect.explain.program.explain import explain_trace, waiting_share
from transect.explain.program.finding import SURE, Finding, Material
from transect.explain.program.findings import _certain, conversions
from transect.explain.program.findings_calls import _most_rows, looped_share, training_loops
from transect.explain.program.findings_host import restarted, whole_shares
from transect.explain.program.sampler import Frame, Sample, StackSamples
from transect.explain.program.split import OpStat
from transect.explain.program.steps import StepWatch
from transect.explain.program.trace import RUNTIME, Key, Trace
from transect.explain.program.trace_file import read_trace

CHECKPOINT, ENGINE = "/lib/torch/utils/checkpoint.py", "/lib/torch/autograd/graph.py"


@pytest.fixture
def watch():
    watch = StepWatch(lambda mark: None)
    watch.start()
    yield watch
    watch.stop()


def explained(tmp_path, ops, **facts):
    """Explain a trace of (operator, shapes, microseconds), one after the other on a host."""
    events, at = [], 0.0
    for name, shapes, length in ops:
        kinds = ["long int" if name == "aten::embedding" and i else "float" for i in range(len(shapes))]
        args = {"Input Dims": shapes, "Input type": kinds}
        events.append(
            {"ph": "X", "cat": "cpu_op", "name": name, "ts": at, "dur": length, "pid": 1, "tid": 1, "args": args}
        )
        at += length + 1.0
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = explain_trace(read_trace(path), ceilings(), facts={"backward": True, **facts})
    return {each.kind: each.share for each in found.findings}


def test_parameters_without_an_optimizer_need_no_gradient(watch):
    body, head = nn.Linear(30, 30, bias=False), nn.Linear(30, 10, bias=False)
    optimizer = torch.optim.SGD(head.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        head(body(torch.ones(2, 30))).mean().backward()
        optimizer.step()
    assert watch.unused == (pytest.approx(0.75), True)


@pytest.mark.parametrize("detached", [False, True])
def test_gradients_may_be_dropped_before_a_step(watch, detached):
    """A generator gets gradients from each step of its discriminator, unless what it made is detached."""
    make, judge = nn.Linear(32, 32), nn.Linear(32, 1)
    mine, theirs = (torch.optim.SGD(each.parameters()) for each in (make, judge))
    for step in range(16):
        made = make(torch.ones(4, 32))
        theirs.zero_grad()
        judge(made.detach() if detached else made).mean().backward()
        theirs.step()
        if step % 4 == 3:
            mine.zero_grad()
            judge(make(torch.ones(4, 32))).mean().backward()
            mine.step()
    share, before = watch.unused
    assert (share > 0.5, before, share < 0.05) == ((False, False, True) if detached else (True, True, False))


def test_optimizers_that_share_a_backward_pass_use_all_gradients(watch):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizers = [torch.optim.SGD(each.parameters()) for each in net]
    for _ in range(12):
        for each in optimizers:
            each.zero_grad()
        for _ in range(2):  # gradients are accumulated
            net(torch.ones(2, 8)).mean().backward()
        for each in optimizers:
            each.step()
    assert watch.unused == (0.0, False)


def test_a_sequence_that_grows_is_computed_again(watch):
    model, ids = nn.Embedding(10, 4), torch.zeros(2, 5, dtype=torch.long)
    with torch.no_grad():
        for length in range(12):
            model(torch.zeros(2, 5 + length, dtype=torch.long))
    assert 9 < watch.prefix < 14
    other = StepWatch()
    other.start()
    with torch.no_grad():
        for _ in range(12):
            model(ids)
    other.stop()
    assert other.prefix == 0.0


def test_a_new_model_takes_the_number_of_one_that_is_gone(watch):
    """A server that loads a model for each request repeats a step, and no model is kept alive by what watches it."""
    for _ in range(4):
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert watch.counts == {("forward call", ("Linear", 0)): 4}


def test_a_prefix_is_most_of_the_work(tmp_path):
    ops = [("aten::mm", [[32 * length, 256], [256, 256]], 500.0) for length in range(40, 60)]
    assert explained(tmp_path, ops, prefix=50.0)["prefix"] > 0.8 and "prefix" not in explained(tmp_path, ops)


def test_a_table_of_which_few_rows_are_read_has_dense_gradients(tmp_path):
    table = [[10_000, 32]]
    ops = [("aten::embedding", [*table, [64]], 5.0), ("aten::embedding_dense_backward", [[64, 32], [64]], 300.0)]
    ops.append(("aten::add_", [*table, *table], 400.0))
    assert explained(tmp_path, ops * 4)["dense gradients"] == pytest.approx(700 / 708, rel=0.02)
    tied = [*ops, ("aten::mm", [[64, 32], [32, 10_000]], 500.0)]
    assert "dense gradients" not in explained(tmp_path, tied * 4)


def test_a_tensor_of_all_pairs_may_be_a_product(tmp_path):
    whole = [256, 300, 64]
    ops = [
        ("aten::sub", [[256, 1, 64], [1, 300, 64]], 3000.0),
        ("aten::pow", [whole], 3000.0),
        ("aten::sum", [whole], 900.0),
    ]
    assert explained(tmp_path, ops)["broadcast"] > 0.9
    other = [*ops[:1], ("aten::tanh", [whole], 3000.0), *ops[2:]]
    assert "broadcast" not in explained(tmp_path, other), "no product computes that"


def test_products_with_one_hot_rows_look_rows_up(tmp_path):
    ops = [
        ("aten::one_hot", [[8, 16], []], 5.0),
        ("aten::scatter_", [[8, 16, 4000], [], [8, 16, 1], []], 300.0),
        ("aten::_to_copy", [[8, 16, 4000]], 300.0),
        ("aten::mm", [[128, 4000], [4000, 64]], 4000.0),
    ]
    assert explained(tmp_path, ops)["one-hot"] > 0.9
    assert "one-hot" not in explained(tmp_path, [*ops[:3], ("aten::mm", [[128, 4001], [4001, 64]], 4000.0)])


@pytest.mark.parametrize(("cores", "share"), [(1, 0.4), (9, 0.8)])
def test_workers_can_hide_what_a_batch_needs_too(tmp_path, cores, share):
    """A loader computes for 400 of 1,000 us in an operator that whole batches would need as well."""
    shapes = {"Input Dims": [[1000, 1000]], "Input type": ["float"]}
    events = [
        {"ph": "X", "cat": cat, "name": name, "ts": 1000.0 * step + at, "dur": length, "pid": 1, "tid": 1, "args": args}
        for step in range(20)
        for cat, name, at, length, args in (
            ("cpu_op", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0.0, 800.0, {}),
            ("cpu_op", "aten::exp", 200.0, 400.0, shapes),
            ("cpu_op", "aten::mul", 800.0, 200.0, shapes),
        )
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = explain_trace(read_trace(path), ceilings(), facts={"backward": True, "cores": cores, "idle_cores": 1.0})
    assert next(each for each in found.findings if each.kind == "loading").share == pytest.approx(share, abs=0.05)


def test_attention_may_be_written_by_hand(tmp_path):
    scores = [2, 4, 256, 256]
    ops = [("aten::bmm", [[8, 256, 32], [8, 32, 256]], 9000.0), ("aten::_softmax", [scores], 50_000.0)]
    ops.append(("aten::bmm", [[8, 256, 256], [8, 256, 32]], 9000.0))
    assert explained(tmp_path, ops)["attention"] > 0.3
    assert "attention" not in explained(tmp_path, ops[1:2])


def test_layers_are_computed_again_only_below_the_engine():
    user = Frame("train.py", "step", 3)
    again = (Frame("net.py", "forward", 9), Frame(CHECKPOINT, "recompute_fn", 1), Frame(CHECKPOINT, "unpack_hook", 1))
    assert doing_of((*again, Frame(ENGINE, "_engine_run_backward", 1), user)).kind == "recomputation"
    inner = (Frame(ENGINE, "_engine_run_backward", 1), Frame(CHECKPOINT, "backward", 1))
    assert doing_of((*inner, user)).kind != "recomputation", "a reentrant one also runs the backward pass"


def test_models_call_operators_that_the_user_cannot_change():
    user = Frame("train.py", "step", 3)
    assert calls_itself((user,)) and calls_itself((Frame("/x/site-packages/torch/nn/functional.py", "relu", 1), user))
    for file in ("/x/site-packages/transformers/models/bert/modeling.py", "/x/torch/nn/modules/transformer.py"):
        assert not calls_itself((Frame(file, "forward", 1), user))


SOURCE = """def train(net, batches, layers):
    for x in batches:
        for t in range(50):
            y = net(x, t)
        for layer in layers:
            y = layer(y)
        y.backward()
"""


def test_a_batch_replaces_only_loops_inside_of_a_step(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    file, backward = str(path), Frame(ENGINE, "_engine_run_backward", 1)
    assert loop_at(Frame(file, "train", 4)) == (file, 3)
    assert loop_at(Frame(file, "train", 6)) == (file, 2), "a loop over layers is none"
    trace = types.SimpleNamespace(having=lambda chosen: np.zeros(0, dtype=bool))
    split = types.SimpleNamespace(
        trace=trace, ops=[types.SimpleNamespace(calls=500, name="mm", key=types.SimpleNamespace(name="mm", nodes=True))]
    )

    def share(*lines, backward_ran=True):
        stacks = [(backward, Frame(file, "train", 7)) if line == 7 else (Frame(file, "train", line),) for line in lines]
        samples = [Sample(0.01 * i, stack, 0) for i, stack in enumerate([stacks[0], *stacks] * 30)]
        facts = {"backward": backward_ran, "steps": 10}
        return looped_share(Material(split, None, plain_samples=StackSamples(samples=samples), facts=facts))

    assert share(4, 7) == pytest.approx((1.0, 0.0)) and share(6, 7)[0] == 0.0
    assert share(4, 6, backward_ran=False) == (1.0, 0.0)


def test_a_softmax_of_a_single_row_is_no_attention(tmp_path):
    assert "attention" not in explained(tmp_path, [("aten::_softmax", [[4], [], []], 10.0)] * 20)


def test_a_loop_of_backward_passes_before_an_optimizers_step_is_replaced_by_a_batch(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("for x in batches:\n    for row in x:\n        net(row).backward()\n    optimizer.step()\n")
    backward, step = Frame(ENGINE, "_engine_run_backward", 1), Frame("/x/torch/optim/sgd.py", "step", 1)

    def loops(*stacks):
        samples = [Sample(0.01 * i, stack, 0) for i, stack in enumerate(stacks * 100)]
        return training_loops(Material(None, None, plain_samples=StackSamples(samples=samples)))

    inner, outer = (backward, Frame(str(path), "train", 3)), (step, Frame(str(path), "train", 4))
    assert loops(inner, outer) == {(str(path), 1)}
    assert loops(inner) == {(str(path), 2)}, "no optimizer was seen"


def test_a_function_that_is_seen_more_often_without_profiling_waits_for_the_gpu():
    reads, calls = ((Frame("/x/torch/model.py", name, 1),) for name in ("reads", "calls"))
    trace = Trace()
    trace.add({"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 0.0, "dur": 5e3})
    trace.close()
    split = types.SimpleNamespace(trace=trace, calls=lambda pattern: trace.where(RUNTIME))

    def samples(*stacks):
        return StackSamples(samples=[Sample(0.001 * i, stack, 0) for i, stack in enumerate(stacks)])

    profiled = samples(*[reads] * 5, *[calls] * 95)
    assert waiting_share(split, profiled, samples(*[reads, calls, calls, calls] * 25)) == pytest.approx(0.25, abs=0.02)
    assert waiting_share(split, profiled, samples(*[calls] * 100)) == 0.0
    assert waiting_share(split, samples(*[calls] * 4), samples(*[reads, calls] * 50)) == 0.0, "too few were profiled"


def test_workers_that_start_again_and_again_are_one_finding():
    loader = Frame("/x/torch/utils/data/dataloader.py", "__iter__", 1)
    starts = (Frame(f"{LIBRARY[0]}/multiprocessing/popen_fork.py", "_launch", 1), loader, Frame("train.py", "epoch", 2))
    waits = (Frame(f"{LIBRARY[0]}/selectors.py", "select", 1), loader, Frame("train.py", "epoch", 2))
    samples = [Sample(0.01 * i, starts if i % 2 else waits, 0) for i in range(100)]
    split = types.SimpleNamespace(own=1.0)
    found = [Finding(kind, kind, "", 0.4, "") for kind in ("process", "loading", "wait", "launch")]
    merged = restarted(found, Material(split, None, plain_samples=StackSamples(samples=samples)))
    assert [each.kind for each in merged] == ["process", "launch"]
    assert merged[0].gain == pytest.approx(1.0) and "persistent_workers" in merged[0].advice


def test_the_order_of_samples_is_drawn_once_an_epoch():
    inside = Frame("/x/torch/utils/data/dataloader.py", "__next__", 1), Frame("train.py", "epoch", 2)
    draws, fetches = ((Frame(file, "f", 1), *inside) for file in ("/x/torch/utils/data/sampler.py", "data.py"))
    samples = [Sample(0.01 * i, draws if i % 2 else fetches, 0) for i in range(100)]
    found = [Finding("loading", "loading", "", 0.3, ""), Finding("launch", "launch", "", 0.2, "")]
    material = Material(types.SimpleNamespace(own=1.0), None, plain_samples=StackSamples(samples=samples))
    first, rest = restarted(found, material)
    assert first.gain == pytest.approx(0.5, abs=0.02) and "iter(loader)" in first.advice and rest is found[1]


@pytest.mark.parametrize(("each", "found"), [(1, True), (50, False)])
def test_evaluation_is_a_finding_only_every_few_steps(each, found):
    user = Frame("train.py", "main", 2)
    step, evaluate = (Frame("/x/site-packages/transformers/trainer.py", name, 1) for name in ("step", "evaluate"))
    stacks = [(evaluate, user) if i // 2 % (each + 1) == each else (step, user) for i in range(400)]
    samples = StackSamples(samples=[Sample(0.01 * i, stack, 0) for i, stack in enumerate(stacks)])
    material = Material(types.SimpleNamespace(ops=[]), None, plain_samples=samples, facts={"steps": 200})
    assert ("evaluation" in whole_shares(material)) is found


@pytest.mark.parametrize(("gain", "least", "shown"), [(0.2, 0.01, 0.01), (0.2, 0.1, 0.2), (0.04, 0.0, 0.04)])
def test_a_large_gain_must_be_certain(gain, least, shown):
    material = Material(types.SimpleNamespace(own=1.0), None)
    assert _certain(Finding("launch", "", "", gain, "", least=least), SURE, material).gain == shown


def test_few_samples_prove_a_small_share_of_the_time():
    split = types.SimpleNamespace(own=1.0)
    for count, sure in ((100, False), (10_000, True)):
        samples = StackSamples(samples=[Sample(0.01 * i, (Frame("train.py", "main", 2),), 0) for i in range(count)])
        material = Material(split, None, plain_samples=samples)
        assert (_certain(Finding("file", "", "", 0.06, ""), SURE, material).gain == 0.06) is sure


@pytest.mark.parametrize(("name", "moved"), [("cudnn::ops::nchwToNhwcKernel<float>", True), ("sm90_xmma_fprop", False)])
def test_convolutions_may_change_the_layout_of_pictures(name, moved):
    op = OpStat(Key(name, [[8, 64, 32, 32]]), calls=100, seconds=0.3, operator="aten::cudnn_convolution")
    split = types.SimpleNamespace(on_gpu=True, own=1.0, ops=[op], named=lambda *names: [])
    layout = [each.gain for each in conversions(Material(split, None)) if each.kind == "layout"]
    assert layout == ([0.3] if moved else [])


def test_batches_of_two_rows_cost_as_many_calls_as_large_ones():
    def most(rows, steps=10, name="aten::addmm"):
        key = Key(name, [[64], [rows, 32], [32, 64]], nodes=True)
        split = types.SimpleNamespace(on_gpu=False, ops=[OpStat(key, calls=10)])
        return _most_rows(Material(split, None, facts={"steps": steps, "backward": True}))

    assert most(2) == 2 and most(64) == 64
    assert most(2, steps=0) == 0 and most(2, name="aten::mkldnn_convolution") == 0
