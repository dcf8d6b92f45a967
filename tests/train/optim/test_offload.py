"""Optimizer states in host memory and on a disk: the steps of AdamW, resumed from and to a run without."""

import pytest
import torch
from safetensors.torch import load_file
from training_runs import tiny_run

from transect.parallel.offload.groups import StatePiece, cut
from transect.parallel.offload.pieces import FilePieces, FileUpload
from transect.parallel.offload.states import DiskStates, HostStates
from transect.train.config import OptimizerConfig
from transect.train.loop import checkpoint
from transect.train.loop.health import LEAST
from transect.train.loop.trainer import Trainer
from transect.train.optim.adamw import AdamW
from transect.train.optim.offloaded import Offload, OffloadedAdamW

torch.set_num_threads(1)
SIZES = {"norm": 5, "table": 3000, "middle": 1024, "last": 1}


def test_groups_hold_every_number_once():
    groups = cut(SIZES, 1024)
    assert [(g.start, g.count) for g in groups] == [
        (0, 5),
        (5, 1024),
        (1029, 1024),
        (2053, 952),
        (3005, 1024),
        (4029, 1),
    ]
    held = {name: [] for name in SIZES}
    for group in groups:
        for piece in group.pieces:
            held[piece.name] += range(piece.begin, piece.end)
            assert piece.place.stop <= group.count
    assert held == {name: list(range(size)) for name, size in SIZES.items()}
    assert cut({}, 8) == [] and len(cut(SIZES, 10**6)) == 1


@pytest.mark.parametrize("wanted", [[0], [1, 0], [0, 1, 2, 3, 4, 5], [5, 3, 1], [2, 3, 4, 5, 0, 1]])
def test_states_on_a_disk_are_those_in_memory(tmp_path, wanted):
    host, disk = HostStates(SIZES, 2, 1024), DiskStates(tmp_path, SIZES, 2, 1024)
    assert host.nbytes == disk.nbytes == 8 * sum(SIZES.values())
    assert not any(tmp_path.iterdir())  # it has no name: nothing is left of a process that is killed
    for states in (host, disk):
        for kind in (0, 1):
            for name, size in SIZES.items():
                states.write(kind, name, torch.arange(size) + 1000.0 * kind)
        for turn in range(4):
            for group, rows in states.walk(wanted if turn != 2 else wanted[::-1]):
                rows.mul_(0.5).add_(group.start + turn)
    for kind in (0, 1):
        for name in SIZES:
            assert torch.equal(host.read(kind, name), disk.read(kind, name))


def two(folder, dtype, **offload):
    """The same parameters under AdamW and under the offloaded one."""
    made = []
    for kind in (AdamW, OffloadedAdamW):
        generator = torch.Generator().manual_seed(0)
        shapes = {"norm": (9,), "table": (64, 33), "unused": (4, 4), "last": (40, 3)}
        parameters = {n: torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in shapes.items()}
        how = {"master_weights": dtype != torch.float32}
        config = OptimizerConfig(learning_rate=0.01)
        if kind is AdamW:
            made.append(AdamW(config, parameters, **how))
        else:
            made.append(OffloadedAdamW(config, parameters, Offload(folder=folder, most=500, **offload), **how))
    return made


def descend(optimizer, step, micro_batches=1):
    generator = torch.Generator().manual_seed(step)
    for _ in range(micro_batches):
        used = [p for name, p in optimizer.parameters.items() if name != "unused"]
        sum((p.float() * torch.randn(p.shape, generator=generator)).square().sum() for p in used).backward()
        if micro_batches > 1:
            optimizer.gather()
    norm = optimizer.gradient_norm()
    optimizer.step(0.9, optimizer.clip_scale(norm, 1.0))
    optimizer.zero_grad()
    return float(norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_steps_are_those_of_adamw(tmp_path, dtype, where, micro_batches):
    folder = str(tmp_path / "states") if where == "disk" else ""
    plain, ours = two(folder, dtype, wide=micro_batches > 1)
    for step in range(5):
        assert descend(ours, step, micro_batches) == pytest.approx(descend(plain, step, micro_batches), rel=1e-5)
    for name, parameter in plain.parameters.items():
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-5}
        torch.testing.assert_close(ours.parameters[name], parameter, **tolerance)
    one, other = plain.state_tensors(), ours.state_tensors()
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=1e-4, atol=1e-6)
    assert torch.equal(ours.state_tensors()["unused/m"], torch.zeros(4, 4))


def test_memory_disk_and_threads_give_the_same_bits(tmp_path):
    results = []
    for folder, threads in (("", 1), ("", 3), (str(tmp_path / "states"), 2)):
        ours = two(folder, torch.bfloat16, threads=threads)[1]
        for step in range(4):
            descend(ours, step)
        results.append({**ours.state_tensors(), **ours.parameters})
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in results[0])


def test_a_delayed_step_reaches_the_weights_one_step_later():
    plain, ours = two("", torch.float32, delay=True)
    before = {name: p.detach().clone() for name, p in ours.parameters.items()}
    descend(ours, 0)
    assert all(torch.equal(p, before[name]) for name, p in ours.parameters.items())
    descend(plain, 0)
    after_one = {name: p.detach().clone() for name, p in plain.parameters.items()}
    descend(ours, 1)
    for name, p in ours.parameters.items():  # the first step alone
        torch.testing.assert_close(p.detach(), after_one[name], rtol=1e-5, atol=1e-6)
    ours.settle()
    assert not torch.equal(ours.parameters["table"], after_one["table"])


def losses(config, found=None):
    log = []

    class Listener:
        def step(self, record):
            log.append((record.loss, record.gradient_norm))

    path = Trainer(config, found).run([Listener()])
    return log, checkpoint.newest(path)


def tensors_of(found):
    return {**found.tensors, **load_file(found.path / "model.safetensors")}


@pytest.mark.parametrize("changes", [{}, {"precision": "mixed", "accumulate": 2}], ids=["float32", "mixed"])
def test_a_run_has_the_losses_of_one_without_and_goes_on_as_either(tmp_path, changes):
    def config(run, steps, **parallel):
        how = {"steps": steps, "run_dir": str(tmp_path / run), "schedule": {"kind": "constant"}, "log_to": []}
        return tiny_run(tmp_path, parallel=parallel, **how, **changes)

    plain, _ = losses(config("plain", 3))
    ours, _ = losses(config("ours", 3, offload="optimizer"))
    close = {"abs": 1e-5} if not changes else {"abs": 5e-3}
    assert [loss for loss, _ in ours] == pytest.approx([loss for loss, _ in plain], **close)
    assert [norm for _, norm in ours] == pytest.approx([norm for _, norm in plain], rel=2e-3 if not changes else 3e-2)
    first, found = losses(config("mixed", 1, offload="optimizer"))
    second, found = losses(config("mixed", 2), found)
    third, found = losses(config("mixed", 3, offload="optimizer", offload_path=str(tmp_path / "disk")), found)
    assert [loss for loss, _ in first + second + third] == pytest.approx([loss for loss, _ in plain], **close)


@pytest.mark.parametrize("delayed", [False, True])
def test_a_run_goes_on_to_the_bit(tmp_path, delayed):
    def config(run, steps):
        parallel = {"offload": "optimizer", "delayed_update": delayed}
        how = {"run_dir": str(tmp_path / run), "schedule": {"kind": "constant"}, "precision": "mixed", "log_to": []}
        return tiny_run(tmp_path, steps=steps, parallel=parallel, save_every=2, **how)

    whole, end = losses(config("whole", 4))
    first, found = losses(config("cut", 2))
    second, other = losses(config("cut", 4), found)
    assert first + second == whole
    one, two_ = tensors_of(end), tensors_of(other)
    assert all(torch.equal(one[name], two_[name]) for name in one)


@pytest.mark.parametrize("precision", ["float32", "mixed"])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_device_that_holds_two_layers_takes_the_same_steps(tmp_path, precision, where):
    """Weights come layer by layer; on from there with everything kept, and the other way round."""

    def config(run, steps, **parallel):
        how = {"run_dir": str(tmp_path / run), "schedule": {"kind": "constant"}, "log_to": [], "accumulate": 2}
        how |= {"precision": precision, "data": {"seq_len": 32, "micro_batch": 64}, "checkpointing": "full"}
        return tiny_run(tmp_path, steps=steps, parallel=parallel, **how)

    elsewhere = {"offload": "all", "offload_path": str(tmp_path / "disk") if where == "disk" else ""}
    whole, _ = losses(config("whole", 4))
    first, found = losses(config("parts", 2, **elsewhere))
    second, found = losses(config("parts", 3), found)
    third, _ = losses(config("parts", 4, **elsewhere), found)
    near = 1e-5 if precision == "float32" else 3e-3
    assert [loss for loss, _ in first + second + third] == pytest.approx([loss for loss, _ in whole], abs=near)


def test_a_pass_before_the_update_leaves_no_old_weights_behind(tmp_path):
    """A loss that stands out has a batch of a moment ago measured again, when the gradients are there."""

    def jumped(where):
        config = tiny_run(tmp_path, parallel={"offload": where}, data={"seq_len": 32, "micro_batch": 64}, log_to=[])
        trainer = Trainer(config)
        first = trainer.step()
        trainer.watch.losses.extend([0.0] * LEAST)
        return [first.loss, trainer.step().loss, trainer.step().loss]

    assert jumped("all") == pytest.approx(jumped("none"), abs=1e-5)


def test_pieces_in_a_file_come_in_any_order(tmp_path):
    """Those that were foreseen, and those that were not; also while others are made anew, and some of one is not."""
    sizes, dtype = [300, 1024, 5, 700, 2048], torch.bfloat16
    pieces = FilePieces(tmp_path, [2 * size for size in sizes], torch.device("cpu"))
    held = [torch.randn(size).to(dtype) for size in sizes]
    stood = [pieces.keep(unit, values) for unit, values in enumerate(held)]
    assert all(each.is_meta and each.shape == values.shape for each, values in zip(stood, held, strict=True))
    assert not any(tmp_path.iterdir())  # nothing is left of a process that is killed
    places = {
        f"{unit}.{half}": (unit, half * (n // 2), n if half else n // 2)
        for unit, n in enumerate(sizes)
        for half in (0, 1)
    }
    upload = FileUpload(pieces, places, dtype)
    a_step = [4, 0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3, 3, 2, 1, 0]
    for step, wanted in enumerate([a_step, a_step, [3, 1, 0, 4, 2], a_step]):
        for unit in wanted:
            out = torch.empty(sizes[unit], dtype=dtype)
            pieces.send(unit, out)
            assert torch.equal(out, held[unit])
        with upload.begun():
            for name, (unit, begin, end) in places.items():
                if name == "1.0" or (step == 2 and unit == 3):
                    continue
                for part in (StatePiece(name, 0, 2, 0), StatePiece(name, 2, end - begin, 2)):
                    with upload.piece(part) as new:
                        new.fill_(step + unit)
                held[unit][begin:end] = step + unit
    upload.whole("1.0", torch.ones(512, dtype=dtype))
    upload.whole("1.1", torch.zeros(512, dtype=dtype))
    upload.wait()
    assert torch.equal(upload.read("1.0"), torch.ones(512, dtype=dtype)) and not upload.read("1.1").any()


@pytest.mark.parametrize("again", [True, False])
def test_what_is_read_ahead_of_a_file_is_what_comes(tmp_path, again):
    """Also where the last layer stays whole for its backward pass (``again`` False), and after an evaluation."""
    layers = 6
    pieces = FilePieces(tmp_path, [64] * (layers + 1), torch.device("cpu"))
    for unit in range(layers + 1):
        pieces.keep(unit, torch.full((32,), float(unit), dtype=torch.bfloat16))
    read, begin = [], pieces.file.read
    pieces.file.read = lambda at, memory: (read.append(at), begin(at, memory))[1]
    up = list(range(layers))
    step = [*up, *(up if again else up[:-1])[::-1]]
    wanted = [layers, *step, *step, layers, *up, layers, *step, *step]
    out = torch.empty(32, dtype=torch.bfloat16)
    for unit in wanted:
        pieces.send(unit, out)
        assert out[0] == unit
    # In vain: what the first piece outside the layers, and the end of each pass, had made come instead.
    assert len(read) <= len(wanted) + 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"name": "muon"}}, 'set optimizer.name to "adamw"'),
        ({"task": "lora"}, "adapters are small"),
        ({"precision": "bfloat16"}, 'set precision to "mixed"'),
        ({"parallel": {"offload": "all", "data": 2}, "accumulate": 2}, r"set parallel\.zero to 3"),
        ({"parallel": {"offload": "all"}, "samples": {"prompts": ["a"]}}, 'set parallel.offload to "optimizer"'),
        ({"parallel": {"offload": "none", "offload_path": "x"}}, 'set parallel.offload to "optimizer"'),
        (
            {"parallel": {"offload": "optimizer", "offload_path": "x", "delayed_update": True}},
            "leave parallel.offload_path",
        ),
        ({"parallel": {"offload": "optimizer", "offload_path": "/proc/x"}}, "cannot be made"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        Trainer(tiny_run(tmp_path, **{"parallel": {"offload": "optimizer"}} | changes))


def test_a_gradient_that_is_not_finite_stops_the_run_and_is_named(tmp_path):
    from transect.train.loop.health import TrainingStopped

    trainer = Trainer(tiny_run(tmp_path, parallel={"offload": "optimizer"}, optimizer={"clip": 0.0}))
    trainer.step()
    weight = trainer.trainable.parameters["layers.0.mlp.down.weight"]
    weight.register_hook(lambda gradient: gradient * float("nan"))
    before = weight.detach().clone()
    with pytest.raises(TrainingStopped, match=r"the gradient of layers\.0\.mlp\.down\.weight"):
        trainer.step()
    assert torch.equal(weight, before)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="gradients and weights cross a link to a GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["memory", "disk", "delayed"])
def test_on_a_gpu_steps_are_those_of_adamw(tmp_path, dtype, where):
    """Large parameters, so that many parts are on their way at once; the same bits as on the CPU."""
    folder = str(tmp_path) if where == "disk" else ""
    shapes = {"norm": (9,), "table": (9000, 2048), "last": (4000, 333)}
    made = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        parameters = {name: torch.nn.Parameter(weight.to(device)) for name, weight in weights.items()}
        offload = Offload(folder=folder, most=2**20, delay=where == "delayed", threads=4)
        config = OptimizerConfig(learning_rate=0.01)
        made.append(OffloadedAdamW(config, parameters, offload, master_weights=dtype != torch.float32))
    for step in range(4):
        norms = []
        for optimizer in made:
            generator = torch.Generator().manual_seed(step)
            for parameter in optimizer.parameters.values():
                given = torch.randn(parameter.shape, generator=generator).to(dtype).to(parameter.device)
                (parameter * given).sum().backward()
            assert all(parameter.grad is None for parameter in optimizer.parameters.values())
            norms.append(float(optimizer.gradient_norm()))
            optimizer.step(0.9, torch.tensor(0.3))
            optimizer.zero_grad()
        assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    for optimizer in made:
        optimizer.settle()
    for name, parameter in made[0].parameters.items():
        assert torch.equal(made[1].parameters[name].cpu(), parameter)
    states = [optimizer.state_tensors() for optimizer in made]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("what", ["optimizer", "all", "all, disk"])
def test_a_run_on_a_gpu_has_the_losses_of_one_without(tmp_path, accumulate, what):
    logs = []
    for offload in ("none", what.partition(",")[0]):
        how = {"device": "cuda", "precision": "mixed", "accumulate": accumulate, "run_dir": str(tmp_path / offload)}
        parallel = {"offload": offload}
        if offload == "all" and what.endswith("disk"):
            parallel["offload_path"] = str(tmp_path / "disk")
        logs.append(losses(tiny_run(tmp_path, parallel=parallel, log_to=[], **how))[0])
    assert [loss for loss, _ in logs[1]] == pytest.approx([loss for loss, _ in logs[0]], abs=5e-3)
    assert [norm for _, norm in logs[1]] == pytest.approx([norm for _, norm in logs[0]], rel=2e-2)
