"""Changes from outside of a script: they give its results, and say where they are not possible."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from transect.explain.program import apply as applying
from transect.explain.program import changes, steps, timing
from transect.explain.program.apply import Applied, _batching, apply, kept
from transect.explain.program.changes import Batched, NotPossible, calls_by, compiled, pinned
from transect.explain.program.finding import Finding
from transect.explain.program.script import Script

HEAD = "import torch\nfrom torch import nn\ntorch.manual_seed(0)\nmodel = nn.Sequential(nn.Linear(8, 8), nn.ReLU())\n"


def write(path, body):
    path.write_text(HEAD + body)
    return Script(path)


class Explained:
    """Findings alone, as ``apply`` looks at them."""

    steps = None

    def __init__(self, *names):
        self.findings = [Finding("launch", "", "", 0.01, "", name) for name in names]


@pytest.mark.parametrize("shape", ["(8,)", "(3, 8)"])
def test_a_loop_is_batched(tmp_path, shape):
    """Each call gets its part of one batch; what the script prints is what it printed."""
    body = (
        f"rows = torch.randn(40, *{shape})\nwith torch.no_grad():\n    found = [float(model(x).sum()) for x in rows]\n"
    )
    script = write(tmp_path / "s.py", body + "print(sum(found))\n")
    change = _batching(script)
    calls = []
    with change() as running, calls_by(lambda module, args, kwargs: calls.append(1) or module(*args)):
        assert running.setup_s == 0
    (done,) = apply(script, Explained("batching"))
    assert not done.failed and done.before > 0 and done.after > 0 and "predicted" in str(done)
    assert done.predicted == min(0.01, done.before)  # no more than there is


def test_a_script_without_a_seed_is_batched(tmp_path):
    """It has other weights and rows in every run of its own; here it has the same."""
    body = "import random, numpy, torch\nfrom torch import nn\nmodel = nn.Linear(8, 8)\nwith torch.no_grad():\n"
    body += "    for row in torch.randn(20, 8) + random.random() + float(numpy.random.rand()):\n        model(row)\n"
    script = tmp_path / "s.py"
    script.write_text(body)
    before = torch.get_rng_state()
    (done,) = apply(Script(script), Explained("batching"))
    assert not done.failed and torch.equal(torch.get_rng_state(), before)


def test_one_module_behind_another_is_batched(tmp_path):
    """The second is called with results of the first, not with its own; a loop through both is left out."""
    body = "second = nn.Linear(8, 8)\nx = torch.ones(8)\nwith torch.no_grad():\n    for i in range(5):\n        "
    chain = write(tmp_path / "chain.py", f"{body}y = second(model(x * i))\n")
    loop = write(tmp_path / "loop.py", f"{body}x = second(model(x))\n")
    assert not apply(chain, Explained("batching"))[0].failed
    assert "of its own" in apply(loop, Explained("batching"))[0].failed


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("x = torch.ones(8)\nfor _ in range(3):\n    x = model(x) + 1\n", "depends on earlier"),
        ("model(torch.ones(8))\n", "called twice"),
        ("nn.Linear(2, 2).forward(torch.ones(2))\n", "called twice"),
        ("nn.MultiheadAttention(8, 2)(*[torch.ones(1, 8)] * 3)\n", "returns something else"),
    ],
)
def test_what_cannot_be_batched_is_left_out(tmp_path, body, why):
    script = write(tmp_path / "s.py", f"with torch.no_grad():\n    {body.strip().replace(chr(10), chr(10) + '    ')}\n")
    (done,) = apply(script, Explained("batching"))
    assert done.failed and why in done.failed and "left out" in str(done)


def test_chance_in_a_batch_is_noticed():
    model, batched = nn.Dropout(), Batched()
    with batched.record():
        for _ in range(3):
            model(torch.ones(50))
    with pytest.raises(NotPossible, match="other numbers"), batched.check(0, set()):
        model(torch.ones(50))


def test_only_outermost_modules_are_compiled_once(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "compile", lambda call: seen.append(call) or call)
    monkeypatch.setattr(changes, "_graphs", lambda: 0)  # other tests of this process have compiled some
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    wanted = model(torch.ones(4))
    with compiled() as running:
        assert torch.equal(model(torch.ones(4)), wanted) and torch.equal(model(torch.ones(4)), wanted)
    assert len(seen) == 1 and running.setup_s > 0
    model(torch.ones(4))
    assert len(seen) == 1, "what is changed is changed back"


def test_modules_are_as_before_after_an_error():
    plain = nn.Module.__call__
    with pytest.raises(ZeroDivisionError), calls_by(lambda module, args, kwargs: 1 // 0):
        nn.Linear(2, 2)(torch.ones(2))
    assert nn.Module.__call__ is plain


def test_bfloat16_and_inference_mode_are_on_inside():
    with changes.bfloat16():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with changes.inference():
        assert not torch.is_grad_enabled()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_graphs_need_a_gpu(tmp_path):
    (done,) = apply(write(tmp_path / "s.py", "model(torch.ones(8))\n"), Explained("CUDA graph, threads"))[:1]
    assert "no CUDA GPU" in done.failed


def test_pinning_touches_nothing_on_the_host():
    plain = torch.Tensor.to
    with pinned():
        assert torch.Tensor.to is not plain and torch.ones(3).to(torch.float64).dtype == torch.float64
        assert torch.ones(3).to("cpu").device.type == "cpu"
    assert torch.Tensor.to is plain


def test_pinned_copies_are_of_what_is_copied(monkeypatch):
    """A view of the same memory is another tensor, and calls may say by position whether they wait."""
    seen = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: seen.append(kwargs) or self)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    square = torch.arange(256.0 * 256).view(256, 256)
    with pinned():
        sent = [square.to("cuda"), square.T.to(device="cuda"), square.view(torch.int32).to("cuda", torch.int32, False)]
        assert square.to(torch.ones(1)) is square
    for found, wanted in zip(sent, (square, square.T, square.view(torch.int32)), strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    assert seen == [{"non_blocking": True}, {"device": "cuda", "non_blocking": True}, {}, {}]


def test_results_of_several_tensors_are_compared():
    one = torch.ones(3)
    assert changes._close((one, {"a": one}), (one, {"a": one.clone()}))
    assert not changes._close((one, {"a": one}), (one, {"a": one + 1}))
    assert not changes._close((one, one), (one,))


@pytest.mark.gpu
def test_graphs_and_pinned_copies_on_a_gpu(tmp_path):
    """The numbers of the script as it is, from replays and from pinned copies."""
    body = (
        "model = model.cuda()\nhost = torch.randn(64, 4096)\nwith torch.no_grad():\n    for _ in range(30):\n"
        "        y = model(host.to('cuda')[:, :8]).sum()\nprint(float(y))\n"
    )
    script = write(tmp_path / "s.py", body)
    graph, pins, both = apply(script, Explained("CUDA graph, pinned memory, batching"))
    assert not graph.failed and graph.setup > 0, graph.failed
    assert not pins.failed and not both.failed


def test_loaders_get_workers_and_give_the_same_batches(tmp_path):
    body = "from torch.utils.data import DataLoader\nimport os\nif __name__ == '__main__':\n"
    body += f"    said = open({str(tmp_path / 'said')!r}, 'a')\n"
    body += "    for x in DataLoader(torch.arange(12), 4):\n        said.write(f'{x.tolist()} ')\n"
    script = write(tmp_path / "s.py", body)
    (done,) = apply(script, Explained("loader workers"))
    assert not done.failed
    runs = (tmp_path / "said").read_text().split("[0, 1, 2, 3] [4, 5, 6, 7] [8, 9, 10, 11] ")
    assert len(runs) > 2 and not any(runs)
    with changes.loader_workers():
        loader = torch.utils.data.DataLoader(torch.arange(4))
        kept = torch.utils.data.DataLoader(torch.arange(4), num_workers=2)
    assert loader.num_workers >= 1 and loader.persistent_workers and kept.num_workers == 2
    assert torch.utils.data.DataLoader(torch.arange(4)).num_workers == 0


TRAIN = """optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("body", "kind"),
    [(TRAIN, "optimizer step"), ("while True:\n    model(torch.ones(2, 8))\n", "forward call")],
)
def test_steps_are_timed_and_the_script_ends_after_them(tmp_path, monkeypatch, body, kind):
    """Each script would never end by itself. The clock is read a few times a step, and advances 10 ms each time."""
    clock = itertools.count()
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: 0.01 * next(clock)))
    monkeypatch.setattr(timing, "STEPS_S", 1.0)
    assert 0.009 < timing.timed(write(tmp_path / "s.py", body), kind) < 0.05


def test_changes_that_help_are_measured_together(tmp_path, monkeypatch):
    script = write(tmp_path / "s.py", "for _ in range(20):\n    model(torch.ones(2, 8))\n")
    finding = Explained("threads").findings[0]
    done = [Applied(finding, name, 9.0, 5.0 + i) for i, name in enumerate(("threads", "one thread", "inference mode"))]
    said = kept(script, Explained(), done)
    assert said.startswith("kept: threads, inference mode, ") and "less time" in said
    assert kept(script, Explained(), [Applied(finding, "threads", 9.0, 9.0)]) == ""

    def failing(*arguments):
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(applying, "timed", failing)
        said = kept(script, Explained(), done)
    assert said.startswith("kept: threads, 44% less time; ") and said.endswith("fail together: no room")
    monkeypatch.setattr(applying, "MOST_S", -1.0)
    assert "other changes" in apply(script, Explained("threads"))[0].failed


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizers_are_fused_and_give_the_same_weights(kind):
    def trained():
        torch.manual_seed(0)
        net = nn.Linear(8, 8)
        optimizer = kind(net.parameters(), lr=0.1, foreach=False)
        for _ in range(3):
            net(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
        return net.weight.detach(), optimizer.defaults["fused"]

    plain, fused = trained()
    assert not fused
    with changes.fused_optimizers():
        mended, fused = trained()
    assert fused
    torch.testing.assert_close(mended, plain)
    assert not trained()[1]
