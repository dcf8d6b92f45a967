"""Training on two ranks takes the steps of one rank: replicas, shards, checkpoints."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from effort import quick_first
from parallel_jobs import fail_at
from parallel_runs import STEPS, curve, same_curves, same_runs, tensors_of
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from training_runs import tiny_run

from transect.checkpoints.resolve import resolve
from transect.models.decoder import Decoder
from transect.ops.opset import resolve_ops
from transect.parallel import replicas
from transect.parallel.group import Group
from transect.parallel.launch import Ranks
from transect.parallel.replicas import GradientReplicas
from transect.parallel.sharded import Sharded
from transect.parallel.world import SharedValueError
from transect.train.config import TrainConfig
from transect.train.loop import checkpoint
from transect.train.loop.crew import Crew
from transect.train.loop.follow import JOB, RunArguments, follow, started_again
from transect.train.loop.health import TrainingStopped, first_bad_number
from transect.train.loop.stored_state import StoredTensors, write_tensors
from transect.train.loop.trainer import Trainer
from transect.train.objectives.base import StepFailed
from transect.train.objectives.share import RolloutShare

torch.set_num_threads(1)
HOW = {"steps": STEPS, "accumulate": 4, "eval_every": STEPS // 2, "data": {"seq_len": 32, "micro_batch": 64}}


def spread(tmp_path, zero, run="spread", **changes):
    return tiny_run(tmp_path, run_dir=str(tmp_path / run), parallel={"data": 2, "zero": zero}, **changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one rank to compare with."""
    tmp_path = tmp_path_factory.mktemp("alone")
    return tmp_path, curve(None, tiny_run(tmp_path, **HOW))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_steps_are_those_of_one_rank(pair, alone, zero):
    """Fifty with ``--prove``."""
    tmp_path, one = alone
    found = curve(pair, spread(tmp_path, zero, f"zero{zero}", **HOW))
    assert len(found[0]) >= STEPS
    same_runs(one, found)


def test_a_run_goes_on_with_another_number_of_ranks_or_another_cut(pair, tmp_path):
    """Two steps each on one rank, two with sharded weights, two with a sharded optimizer, one again; and all on one."""
    how = {"accumulate": 2, "data": {"seq_len": 32, "micro_batch": 64}, "schedule": {"kind": "constant"}}
    whole, _ = curve(None, tiny_run(tmp_path, steps=8, run_dir=str(tmp_path / "whole"), **how))
    log, found = curve(None, tiny_run(tmp_path, steps=2, run_dir=str(tmp_path / "cut"), **how))
    for steps, parallel in ((4, {"data": 2, "zero": 3}), (6, {"data": 2, "zero": 1}), (8, {"data": 1})):
        config = tiny_run(tmp_path, steps=steps, run_dir=str(tmp_path / "cut"), parallel=parallel, **how)
        more, found = curve(pair, config, found)
        log += more
    assert [loss for loss, _ in log] == pytest.approx([loss for loss, _ in whole], abs=1e-5)


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_any_number_of_ranks_finds_its_part_of_a_state(tmp_path, zero, ranks):
    """Written by two ranks, here one after the other."""
    torch.manual_seed(0)
    whole = dict(trained_shapes_of(tiny_run(tmp_path).model))
    state = {f"{name}/m": torch.randn(shape) for name, shape in whole.items()}
    for rank in range(2):
        spread = spread_over(tmp_path, zero, rank, 2)
        own = spread.own_state(state)
        kept = {spread.stored_name(name): own[name] for name in own if spread.writes(name.rpartition("/")[0])}
        write_tensors(kept, tmp_path / f"{rank}.safetensors")
    stored = StoredTensors([tmp_path / "0.safetensors", tmp_path / "1.safetensors"])
    assert all(torch.equal(stored[name], state[name]) for name in state) and len(stored) == len(state)
    found = {}
    for rank in range(ranks):
        spread = spread_over(tmp_path, zero, rank, ranks)
        for name, values in spread.own_state(stored).items():
            assert values.shape == spread.owned[name.rpartition("/")[0]].shape
            found.setdefault(name, []).append(values.reshape(-1))
    for name, values in state.items():
        parts = found[name] if zero else found[name][:1]
        assert torch.equal(torch.cat(parts), values.reshape(-1))


def trained_shapes_of(model):
    return {name: tensor.shape for name, tensor in decoder_of(model).named_parameters()}


def decoder_of(model):
    source = resolve(model)
    return Decoder(source.config, ops=resolve_ops(torch.device("cpu"), ("torch",), differentiable=True))


def spread_over(tmp_path, zero, rank, ranks):
    """A rank's part of the tiny model; nobody else is there."""
    group = SimpleNamespace(rank=rank, size=ranks, ranks=list(range(ranks)))
    model = decoder_of(str(tmp_path / "model"))
    if zero == 3:
        return Sharded(group, model)
    return GradientReplicas(group, dict(model.named_parameters()), zero)


def test_the_same_layout_goes_on_to_the_bit(pair, tmp_path):
    how = {"accumulate": 2, "precision": "mixed", "parallel": {"data": 2, "zero": 3}, "schedule": {"kind": "constant"}}
    whole, end = curve(pair, tiny_run(tmp_path, steps=4, run_dir=str(tmp_path / "whole"), **how))
    first, found = curve(pair, tiny_run(tmp_path, steps=2, run_dir=str(tmp_path / "cut"), **how))
    second, other = curve(pair, tiny_run(tmp_path, steps=4, run_dir=str(tmp_path / "cut"), **how), found)
    assert first + second == whole
    one, two = tensors_of(end), tensors_of(other)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("zero", "changes"),
    [
        (0, {"precision": "bfloat16", "optimizer": {"rounding": "nearest"}}),
        (1, {"optimizer": {"name": "muon"}}),
        (2, {"optimizer": {"name": "lamb"}}),
        (1, {"optimizer": {"name": "adamw8bit"}}),
        (2, {"task": "lora", "precision": "mixed"}),
        (2, {"objective": "dpo"}),
        (3, {"checkpointing": "full"}),
    ],
    ids=["bfloat16", "muon", "lamb", "8 bits", "lora", "dpo", "recomputed"],
)
def test_ways_to_train_are_the_same_on_two_ranks(pair, tmp_path, zero, changes):
    if changes.get("objective") == "dpo":
        pairs = write_pairs(tmp_path / "pairs.jsonl")
        changes = changes | {"data": {"train": [pairs], "seq_len": 64, "micro_batch": 128}}
    how = {"steps": 4, "accumulate": 4} | changes
    one, _ = curve(None, tiny_run(tmp_path, run_dir=str(tmp_path / "one"), **how))
    two, _ = curve(pair, spread(tmp_path, zero, **how))
    rough = how.get("precision", "float32") != "float32"
    assert [loss for loss, _ in two] == pytest.approx([loss for loss, _ in one], abs=3e-2 if rough else 2e-5)


@pytest.mark.parametrize("objective", quick_first(["dpo", "distill", "kto", "orpo"], 2))
def test_the_numbers_of_a_step_are_those_of_one_rank(pair, tmp_path, objective):
    """However many tokens or examples each rank's micro-batches have."""
    answers = ("completion",) if objective == "distill" else ("chosen", "rejected")
    rows = [{"prompt": f"{i}?", **dict(zip(answers, ("yes" * i * i, "no"), strict=False))} for i in range(1, 10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": [str(tmp_path / "rows.jsonl")], "seq_len": 256, "micro_batch": 400}
    how = {"steps": 3, "accumulate": 2, "objective": objective, "data": data, "optimizer": {"learning_rate": 1e-3}}
    how |= {"distill": {"teacher": str(tmp_path / "model")}} if objective == "distill" else {}
    one, two = [], []
    curve(None, tiny_run(tmp_path, run_dir=str(tmp_path / "one"), **how), each=one)
    curve(pair, spread(tmp_path, 0, **how), each=two)
    assert one[1].extra and [record.extra.keys() for record in one] == [record.extra.keys() for record in two]
    for mine, theirs in zip(one, two, strict=True):
        assert theirs.extra == pytest.approx(mine.extra, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("zero", "objective"), [(0, "next_token"), (3, "next_token"), (0, "dpo")])
def test_validation_is_shared_and_gives_the_same_number(pair, tmp_path, monkeypatch, zero, objective):
    """An odd number of batches: of the last row one rank has none."""
    held = tmp_path / "held.jsonl"
    if objective == "dpo":
        train = write_pairs(tmp_path / "pairs.jsonl")
        held.write_text("".join(Path(train).read_text().splitlines(True)[:27]))
        data = {"train": [train], "validation": [str(held)], "seq_len": 64, "micro_batch": 256}
    else:
        held.write_text("".join(json.dumps({"text": f"{i} comes after {i - 1}."}) + "\n" for i in range(9)))
        data = {"validation": [str(held)], "seq_len": 64, "micro_batch": 64}
    how = {"steps": 2, "accumulate": 2, "eval_every": 1, "objective": objective, "data": data}
    shares = []
    monkeypatch.setattr(RolloutShare, "of", partialmethod(noted, RolloutShare.of, shares))
    one, _ = curve(None, tiny_run(tmp_path, run_dir=str(tmp_path / "one"), **how))
    two, _ = curve(pair, spread(tmp_path, zero, **how))
    assert len(one) == 4 and [loss for loss, _ in two] == pytest.approx([loss for loss, _ in one], abs=2e-5)
    whole, part = shares[0], shares[-1]
    assert whole % 2 and part == (whole + 1) // 2


def noted(share, of, shares, batches):
    """``RolloutShare.of``, which notes how many batches there were."""
    found = list(of(share, batches))
    shares.append(len(found))
    return found


@pytest.mark.parametrize("zero", [0, 3])
def test_tokens_that_are_new_have_rows_on_all_ranks(pair, tmp_path, zero):
    """Each rank grows the model before it is cut; the checkpoint has the tokenizer of one."""
    how = {"steps": 2, "accumulate": 2, "new_tokens": ["<tool>"], "data": {"seq_len": 32, "micro_batch": 64}}
    one = curve(None, tiny_run(tmp_path, run_dir=str(tmp_path / "one"), **how))
    two = curve(pair, spread(tmp_path, zero, **how))
    same_runs(one, two)
    tokenizer = Tokenizer.from_file(str(two[1].path / "tokenizer.json"))
    assert tokenizer.token_to_id("<tool>") == len(tensors_of(two[1])["model.embed_tokens.weight"]) - 1


@pytest.mark.parametrize("zero", quick_first([0, 3, "all", None, 1, 2, "disk"], 4))
def test_offloaded_states_are_cut_as_others_are(pair, tmp_path, zero):
    """The steps of one rank without; and on from there without, on one rank."""
    how = {"accumulate": 4, "data": {"seq_len": 32, "micro_batch": 64}, "schedule": {"kind": "constant"}}
    whole, _ = curve(None, tiny_run(tmp_path, steps=4, run_dir=str(tmp_path / "whole"), **how))
    parallel = {"data": 2, "zero": zero} if zero is not None else {"tensor": 2}
    parallel |= {"offload": "optimizer", "offload_path": str(tmp_path / "disk") if zero in (1, 3, "disk") else ""}
    if zero in ("all", "disk"):  # sharded weights too
        parallel |= {"zero": 3, "offload": "all"}
    config = tiny_run(tmp_path, steps=3, run_dir=str(tmp_path / "cut"), parallel=parallel, **how)
    first, found = curve(pair, config)
    last, _ = curve(None, tiny_run(tmp_path, steps=4, run_dir=str(tmp_path / "cut"), **how), found)
    assert [loss for loss, _ in first + last] == pytest.approx([loss for loss, _ in whole], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "zero", "precision"),
    [
        ("onebit_adam", 0, "float32"),
        ("onebit_adam", 1, "bfloat16"),
        pytest.param("onebit_lamb", 1, "mixed", marks=pytest.mark.prove),
        pytest.param("zero_one_adam", 0, "mixed", marks=pytest.mark.prove),
    ],
)
def test_ranks_that_exchange_signs_learn_as_those_that_sum(pair, tmp_path, name, zero, precision):
    how = {"steps": 24, "accumulate": 2, "precision": precision, "schedule": {"kind": "constant"}}
    rate = 1e-2 if name == "onebit_lamb" else 1e-3
    settings = {"name": name, "freeze_step": 8, "learning_rate": rate, "sync_every": 2}
    plain, _ = curve(None, tiny_run(tmp_path, run_dir=str(tmp_path / "one"), **how, optimizer={"learning_rate": 1e-3}))
    signs, end = curve(pair, spread(tmp_path, zero, **how, optimizer=settings))
    assert signs[-1][0] < 0.9 * signs[7][0]  # it goes on learning when only signs travel
    if name == "onebit_adam":
        assert signs[-1][0] == pytest.approx(plain[-1][0], rel=0.15)
    assert {"m", "v"} <= {tensor.rpartition("/")[2] for tensor in end.tensors}


def write_pairs(path):
    with path.open("w") as file:
        for i in range(40):
            said = {"prompt": f"{i} + 1?", "chosen": f" {i + 1}", "rejected": f" {i + 2}!"}
            file.write(json.dumps(said) + "\n")
    return str(path)


def test_each_rank_keeps_its_part(pair, tmp_path):
    """About half of the state with 1, and of the weights too with 3."""
    for zero in (1, 3):
        run = RunArguments(spread(tmp_path, zero, f"part{zero}", accumulate=2, steps=1).to_dict())
        pair.call(JOB, run)
        trainer = run.trainer(pair.world)
        numbers = sum(parameter.numel() for parameter in trainer.crew.strategy.parallel.spread.parameters.values())
        owned = sum(parameter.numel() for parameter in trainer.crew.strategy.parallel.spread.owned.values())
        assert owned == pytest.approx(numbers / 2, rel=0.1)
        assert trainer.optimizer.state_bytes() == 8 * owned
        if zero == 3:
            kept = sum(unit.piece.numel() for unit in trainer.crew.strategy.parallel.spread.units)
            assert kept == pytest.approx(numbers / 2, rel=0.01)
            assert not any(unit.whole for unit in trainer.crew.strategy.parallel.spread.units)
        trainer.run()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulate": 3}, "set accumulate to 4"),
        ({"objective": "grpo"}, "draws its answers on one device"),
        ({"task": "lora", "parallel": {"data": 2, "zero": 3}}, r"not for adapters: set parallel\.zero to 2"),
        ({"optimizer": {"name": "muon"}, "parallel": {"data": 2, "zero": 3}}, r"or parallel\.zero to 2"),
        ({"optimizer": {"name": "onebit_adam"}, "parallel": {"data": 2, "zero": 2}}, r"set parallel\.zero to 1"),
        ({"optimizer": {"name": "zero_one_adam"}, "parallel": {"data": 2, "zero": 1}}, r"or parallel\.zero to 0"),
        ({"optimizer": {"name": "zero_one_adam"}, "precision": "bfloat16"}, 'set precision to "mixed"'),
        ({"parallel": {"data": 1, "zero": 1}}, r"set parallel\.data to 2 or more"),
        ({"parallel": {"data": 2, "zero": 3, "sums": "fused"}}, r"set parallel\.zero to 0, 1 or 2"),
        ({"parallel": {"offload": "all", "sums": "fused"}}, r'set parallel\.offload to "optimizer", or'),
        ({}, "2 ranks .*and 1 were started"),
    ],
)
def test_what_cannot_be_spread_is_refused_with_what_can(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        Trainer(tiny_run(tmp_path, **{"accumulate": 2, "parallel": {"data": 2}} | changes))


def test_what_one_rank_alone_is_at_fault_with_is_said(pair, tmp_path):
    """Here the second one finds a file where it would keep its part."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "rank-1").touch()
    how = {"accumulate": 2, "data": {"seq_len": 32, "micro_batch": 64}}
    parallel = {"data": 2, "zero": 3, "offload": "all", "offload_path": str(disk)}
    with pytest.raises(ValueError, match=r"^rank 1: parallel\.offload_path .*rank-1 cannot be made"):
        curve(pair, tiny_run(tmp_path, parallel=parallel, **how))
    (disk / "rank-1").unlink()
    curve(pair, tiny_run(tmp_path, steps=1, parallel=parallel, **how))  # the ranks are free for another run


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_number_that_is_not_finite_is_named(pair, tmp_path, zero):
    """By whoever has it: with 1 and 3 one of the ranks."""
    config = spread(tmp_path, zero, steps=2, accumulate=2)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = torch.inf
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(TrainingStopped, match=r"step 1 .*not finite is the weight layers\.1\.mlp\.up\.weight"):
        curve(pair, config)


def test_the_first_of_what_ranks_have_found():
    order = {"embed": 0, "a": 1, "head": 2}
    fine, bad = torch.ones(3), torch.tensor([1.0, torch.nan])
    assert first_bad_number(order, {"a": fine}, {"a": fine}) is None
    mine = first_bad_number(order, {"a": fine}, {"a": bad, "embed": bad, "head": fine})
    assert mine[1] == "the gradient of a" and mine < first_bad_number(order, {}, {"embed": bad})
    assert first_bad_number(order, {"head": bad}, {}) < mine

    def said(*found):
        world = SimpleNamespace(exchange=lambda own: list(found))
        return Crew.first(SimpleNamespace(world=world), found[0])

    assert said(mine, mine) == "the gradient of a"
    assert said(None, mine) == "the gradient of a, on rank 1"
    assert said((-1, "the weight b"), mine) == "the weight b, on rank 0"
    assert "no rank keeps" in said(None, None)


@pytest.mark.parametrize("rank", [0, 1])
def test_data_that_one_rank_alone_cannot_read_ends_all(pair, tmp_path, rank, monkeypatch):
    """At once, with its reason, and from before the step; then the ranks are free for another run."""
    data = {"seq_len": 32, "micro_batch": 64, "streaming": True, "buffer_mib": 2000 / 2**20}
    how = {"steps": 5, "accumulate": 2, "data": data, "schedule": {"kind": "constant"}, "save_every": 0}
    whole, _ = curve(None, tiny_run(tmp_path, run_dir=str(tmp_path / "whole"), **how))
    run = RunArguments(tiny_run(tmp_path, parallel={"data": 2}, **how).to_dict())
    pair.call("parallel_jobs:follow_without_data", (run, 3 if rank else 9))
    if not rank:
        fail_at(3, monkeypatch)
    where = "rank 1: " if rank else ""
    with pytest.raises(StepFailed, match=f"^step 4: {where}the disk is gone; .*step-00000003 is whole"):
        run.trainer(pair.world).run()
    monkeypatch.undo()
    found = checkpoint.newest(tmp_path / "run")
    more, _ = curve(pair, TrainConfig.from_dict(found.state["config"]), found)
    same_curves(whole[3:], more)


def test_what_one_rank_alone_knows_to_be_wrong_ends_it(tmp_path):
    """Then the others hear why: they would wait for it."""

    def ran(error):
        def run(should_stop):
            raise error

        follow(None, SimpleNamespace(trainer=lambda world: SimpleNamespace(run=run)))

    for known in (StepFailed("no"), SharedValueError("no"), TrainingStopped("no"), checkpoint.NotWritten("no")):
        ran(known)
    with pytest.raises(ValueError, match="a layer is odd"):
        ran(ValueError("a layer is odd"))


@pytest.mark.prove
def test_a_rank_that_ends_ends_the_run_with_one_message(tmp_path):
    """The command itself, in a process of its own; what it had written is whole, and it goes on."""
    config = tiny_run(tmp_path, steps=4000, accumulate=2, save_every=5, parallel={"data": 2, "zero": 2})
    file = tmp_path / "run.toml"
    file.write_text(toml_of(config))
    command = [sys.executable, "-m", "transect", "train"]
    with subprocess.Popen([*command, str(file)], stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 90
        while not checkpoint.list_steps(config.run_dir) and time.monotonic() < until:
            time.sleep(0.05)
        (child,) = (int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        os.kill(child, signal.SIGKILL)
        errors = process.stderr.read()
        assert process.wait(60) == 3
    assert errors.count("rank 1") == 1 and "was killed by signal 9" in errors and "is whole" in errors
    assert not Path(f"/proc/{child}").exists()
    done = checkpoint.newest(Path(config.run_dir)).step
    again = [*command, "--resume", "--run", config.run_dir, "--steps", str(done + 1)]
    assert subprocess.run(again, capture_output=True, check=False).returncode == 0


@pytest.mark.prove
def test_torchrun_starts_ranks_again_and_the_run_goes_on(tmp_path, port):
    config = tiny_run(tmp_path, steps=60, accumulate=2, save_every=5, parallel={"data": 2, "zero": 3})
    file = tmp_path / "run.toml"
    file.write_text(toml_of(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--master-port", str(port), "-m", "transect", "train", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 90
        while not checkpoint.list_steps(config.run_dir) and time.monotonic() < until:
            time.sleep(0.05)
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(ranks[1]), signal.SIGKILL)
        errors = process.stderr.read()
        assert process.wait(120) == 0, errors
    assert "resumes from step-" in errors
    lines = [json.loads(line) for line in (Path(config.run_dir) / "log.jsonl").read_text().splitlines()]
    assert sorted({line["step"] for line in lines if line["kind"] == "step"}) == list(range(1, 61))


@pytest.mark.prove
def test_torchrun_that_is_asked_to_end_leaves_a_checkpoint(tmp_path, port):
    config = tiny_run(tmp_path, steps=10000, accumulate=2, save_every=0, parallel={"data": 2})
    (tmp_path / "run.toml").write_text(toml_of(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(port), "-m", "transect", "train", str(tmp_path / "run.toml")]
    log = Path(config.run_dir) / "log.jsonl"
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + 90
        while not (log.exists() and log.read_text().count("\n") > 2) and time.monotonic() < until:
            time.sleep(0.05)
        process.terminate()
        process.wait(60)
    assert checkpoint.newest(config.run_dir).step > 2


def test_one_host_that_counts_a_restart_is_enough(monkeypatch, tmp_path):
    """Else the ranks of another host would find a run that is there already, and end."""
    world = SimpleNamespace(exchange=lambda mine: [mine, not mine])
    monkeypatch.setattr(Ranks, "join", lambda device: SimpleNamespace(world=world))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, value)
    assert started_again(tiny_run(tmp_path, accumulate=2, parallel={"data": 2}))


def toml_of(config):
    lines = [f'model = "{config.model}"', f'run_dir = "{config.run_dir}"', f"steps = {config.steps}"]
    lines += [f"accumulate = {config.accumulate}", f"save_every = {config.save_every}", 'device = "cpu"', "threads = 1"]
    lines += ["[data]", f"train = {json.dumps(list(config.data.train))}", "seq_len = 64", "micro_batch = 128"]
    lines += ["[parallel]", f"data = {config.parallel.data}", f"zero = {config.parallel.zero}"]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("by_owner", [False, True])
def test_large_parameters_travel_alone_and_stay_where_they_are(by_owner):
    sizes = {"a": 4, "b": 100, "c": 5, "d": 30, "e": 40, "f": 2}
    parameters = {name: torch.nn.Parameter(torch.randn(size)) for name, size in sizes.items()}
    owner = {name: number % 2 for number, name in enumerate(sizes)}
    buckets = replicas._buckets(parameters, owner, by_owner, 4 * 40)
    assert sorted(name for bucket in buckets for name in bucket) == sorted(sizes)
    assert buckets[:2] == [["e"], ["b"]]
    table = {"table": torch.nn.Parameter(torch.randn(99)), **parameters}
    assert replicas._buckets(table, dict.fromkeys(table, 0), by_owner, 4 * 40)[-1] == ["table"]
    if by_owner:
        assert all(len({owner[name] for name in bucket}) == 1 for bucket in buckets)
    spread = replicas.GradientReplicas(Group.alone(), parameters)
    gradient = parameters["b"].grad = torch.randn(100)
    assert spread._filled(["b"]).data_ptr() == gradient.data_ptr()
    parameters["d"].grad = torch.ones(30)
    assert spread._filled(["d", "c"]).tolist() == [1.0] * 30 + [0.0] * 5
    parameters["e"].grad = torch.ones(40, dtype=torch.float32)
    spread._sums["e"] = torch.full((40,), 2.0)
    assert spread._filled(["e"]).tolist() == [3.0] * 40
    assert spread._given == {"b", "d", "e"}


def test_a_model_that_is_done_with_is_given_back():
    parameters = {"a": torch.nn.Parameter(torch.randn(4))}
    spread, kept = replicas.GradientReplicas(Group.alone(), parameters), weakref.ref(parameters["a"])
    with spread.last():
        parameters["a"].sum().backward()
    assert spread._missing is None
    del spread, parameters
    gc.collect()
    assert kept() is None
