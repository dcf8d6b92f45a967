"""The steps of a program are found, timed without profiling, and explained; nothing is found that is not there."""

import copy
import pickle
import traceback
from dataclasses import replace

import pytest
import torch
from planted_faults import ceilings
from torch import nn
from torch.utils.data import DataLoader

from transect.explain.program import steady
from transect.explain.program.explain import Explain, explain_script, fit
from transect.explain.program.finding import Material
from transect.explain.program.findings_host import crowded, library, threads
from transect.explain.program.sampler import Frame, Sample, StackSamples
from transect.explain.program.script import Script
from transect.explain.program.steps import StepWatch, UnprofiledSteps

TRAIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for (x,) in DataLoader(TensorDataset(torch.randn(8 * 400, 16)), batch_size=8):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
"""
INFER = """
import torch
net = torch.nn.Linear(16, 16)
with torch.inference_mode():
    for _ in range(3000):
        net(torch.ones(4, 16))
"""
ACCUMULATED = """
import torch
net = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for _ in range(300):
    for _ in range(20):
        net(torch.ones(4, 16)).sum().backward()
    optimizer.step()
"""
RECORDED = "while torch.autograd.profiler._is_profiler_enabled"
NO_STEPS = "import torch\nx = torch.ones(8, 8)\nfor _ in range(300):\n    x = (x @ x).tanh()\n"


def explained(folder, body, **options):
    path = folder / "script.py"
    path.write_text(body)
    return explain_script(Script(path), Explain(ceilings(), cores=1, window_s=0.2), **options)


@pytest.mark.parametrize(
    ("body", "kind"), [(TRAIN, "optimizer step"), (INFER, "forward call"), (ACCUMULATED, "optimizer step")]
)
def test_steps_are_found_and_timed_plain(tmp_path, body, kind):
    found = explained(tmp_path, body)
    steps = found.steps
    assert steps is not None and steps.kind == kind and steps.count > steps.explained >= 1
    assert steps.plain_s > 0 and found.split.measured
    assert sum(found.split.parts.values()) == pytest.approx(found.split.wall)
    assert found.split.own == pytest.approx(found.split.wall * (1 - found.facts["delayed"]) * steps.plain_share)
    assert all(each.gain <= found.split.own for each in found.findings)
    assert f"each a {kind}" in str(found) and "plain" in str(found)


def test_a_program_without_steps_is_timed_by_a_second_run(tmp_path):
    log = tmp_path / "log"
    body = f"{NO_STEPS}open({str(log)!r}, 'a').write('run ')\n"
    found = explained(tmp_path, body, again_s=60.0)
    assert found.steps is None and found.split.measured and log.read_text() == "run run "
    assert all(each.gain <= found.split.own for each in found.findings)
    log.unlink()
    assert not explained(tmp_path, body).split.measured and log.read_text() == "run "


def test_a_long_program_without_steps_is_recorded_for_a_limited_time(tmp_path, monkeypatch):
    monkeypatch.setattr(steady, "FIRST_S", 0.1)
    found = explained(tmp_path, NO_STEPS.replace("for _ in range(300)", RECORDED))  # it ends after the recording
    assert found.split.wall >= 0.1 and any("no step repeats" in note for note in found.split.notes)
    assert not torch.autograd.profiler._is_profiler_enabled


def test_imports_are_start_up_and_no_finding(tmp_path):
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "slow_to_import.py").write_text("total = 0\nfor i in range(3_000_000):\n    total += i * i\n")
    found = explained(tmp_path, f"import sys\nsys.path.append({str(library)!r})\nimport slow_to_import\n" + NO_STEPS)
    assert found.split.parts["startup"] > 0.5 * found.split.own
    assert not any(each.kind in ("import", "python") and each.share > 0.3 for each in found.findings)


def test_parts_fit_the_time_without_profiling(tmp_path):
    found = explained(tmp_path, NO_STEPS)
    for plain in (0.3 * found.split.own, found.split.own, min(found.split.wall, 1.01 * found.split.own)):
        fit(found.split, found.named, plain)
        assert found.split.own == pytest.approx(plain)
        assert sum(found.split.parts.values()) == pytest.approx(found.split.wall)
        assert min(found.split.parts.values()) >= 0


def test_a_slow_first_step_warms_up():
    times = UnprofiledSteps(0.0)
    times.seconds, times._last = [9.0, 1.0, 1.1], times._last
    times.mark()
    assert 9.0 not in times.seconds


def test_marks_of_other_threads_and_of_compiled_code_do_not_count():
    watch = StepWatch(lambda mark: None)
    watch.start()
    try:
        for _ in DataLoader(torch.zeros(8, 2), batch_size=2):
            pass
    finally:
        watch.stop()
    assert watch.step()[0] == "batch of a loader"
    before = sum(watch.counts.values())
    list(DataLoader(torch.zeros(8, 2), batch_size=2))
    nn.Linear(2, 2)(torch.zeros(1, 2))
    assert sum(watch.counts.values()) == before  # the hooks are gone


class Encoder(nn.Module):
    def __init__(self, pad=0):
        super().__init__()
        self.words, self.types = nn.Embedding(50, 8, padding_idx=pad), nn.Embedding(2, 8)

    def forward(self, ids, attention_mask=None):
        return self.words(ids) + self.types(torch.zeros_like(ids))


def padding(ids, *, pad=0, **options):
    model, watch = Encoder(pad), StepWatch()
    watch.start()
    try:
        for _ in range(3):
            model(ids, **options)
    finally:
        watch.stop()
    return watch.padding


def test_padding_is_what_a_mask_or_a_pad_id_says():
    full = torch.randint(1, 50, (4, 12))
    assert padding(full) == 0.0  # zeros in token_type_ids are no padding
    assert padding(torch.full((4, 12), 7), pad=None) == 0.0  # nor is a token that ends most rows
    half = full.clone()
    half[:, 6:] = 0
    assert padding(half) == pytest.approx(0.5)
    assert padding(half.flip(1)) == pytest.approx(0.5)  # decoders have it on the left
    mask = torch.ones(4, 12, dtype=torch.long)
    assert padding(half, attention_mask=mask) == 0.0  # the mask knows better
    mask[1:, 9:] = 0
    assert padding(full, attention_mask=mask) == 0.0  # up to the longest row, as batches usually are
    mask[1:, 3:] = 0
    assert padding(full, attention_mask=mask) == pytest.approx(0.5625)
    mask[:, 3:] = 0
    assert padding(full, attention_mask=mask) == pytest.approx(0.75)


@pytest.fixture
def material(tmp_path):
    found = explained(tmp_path, NO_STEPS)
    return Material(found.split, ceilings(), found.named, None, found.facts)


def test_writing_a_stack_is_no_anomaly_detection(material):
    stack = (Frame(traceback.__file__, "format_stack", 9), Frame("/home/me/train.py", "f", 3))
    samples = StackSamples(samples=[Sample(0.01 * number, stack, 0) for number in range(20)])
    assert [each.kind for each in library(replace(material, samples=samples))] == []
    samples.anomalies = 20
    assert [each.kind for each in library(replace(material, samples=samples))] == ["stacks"]


@pytest.mark.parametrize(("idle", "kinds"), [(0.2, []), (5.9, ["threads"])])
def test_threads_are_advised_where_the_machine_has_cores_left(material, idle, kinds):
    for op in material.split.ops:
        op.seconds = 1.0 * op.calls
    facts = {"threads": 2, "cores": 8, "idle_cores": idle}
    found = list(threads(replace(material, facts=facts)))
    assert [each.kind for each in found] == kinds
    assert all("set_num_threads(8)" in each.advice for each in found)


def test_watched_models_can_be_copied_and_saved():
    net, watch = Encoder(), StepWatch(lambda mark: None)
    watch.start()
    try:
        net(torch.ones(2, 4, dtype=torch.long))
        other = copy.deepcopy(net)
        assert b"transect" not in pickle.dumps(net._forward_pre_hooks) + pickle.dumps(other._forward_hooks)
    finally:
        watch.stop()
    assert not net._forward_pre_hooks and not net._forward_hooks


def test_operators_that_wait_for_threads_are_no_calls(material):
    op = next(each for each in material.split.ops if each.tiny)
    op.seconds, op.usual, op.calls = 1.0, 1.0, 100
    assert op.launch < 0.1
    (found,) = crowded(replace(material, facts={"threads": 2}))
    assert found.apply == "one thread" and found.gain >= 1.0 and "10.0 ms with 2 threads" in found.evidence
    assert not list(crowded(replace(material, facts={"threads": 1})))


def test_steps_are_those_of_the_window_where_models_train_one_after_another(tmp_path):
    body = TRAIN.replace("net = ", "kept = []\nfor _ in range(8):\n    net = ", 1)
    head, _, loop = body.partition("    net = ")
    loop = "    net = " + loop.replace("\n", "\n    ").rstrip() + "\n    kept.append(optimizer)\n"
    found = explained(tmp_path, head + loop)
    assert found.steps is not None and found.steps.explained > 3 and found.steps.count > 400
