"""Checkpoints that several ranks write together: whole on all or not there, and read by any number of them."""

import json
import threading

import pytest
import torch
from safetensors.torch import load_file

from transect.parallel.part_names import parse, part_name
from transect.train.loop import parts
from transect.train.loop.checkpoint import Snapshot, Writer, list_steps, newest
from transect.train.loop.stored_state import Below, StoredTensors, write_tensors

WHOLE = torch.arange(35.0).view(5, 7)


def snapshot(step, rank, ranks=2, **changes):
    flat, half = WHOLE.reshape(-1) + step, 11
    own = flat[:half] if rank == 0 else flat[half:]
    tensors = {part_name("optimizer/w/m", 0 if rank == 0 else half, WHOLE.shape): own, f"alone/{rank}": own[:3].clone()}
    write = lambda folder: (folder / "model.txt").write_text("m")  # noqa: E731
    return Snapshot(step, write, changes.pop("tensors", tensors), {"loss": 0.1}, 0, rank, ranks, **changes)


def save(run, *steps, **changes):
    with Writer(run, 2) as first, Writer(run, 2, rank=1) as second:
        for step in steps:
            second.save(snapshot(step, 1))
            first.save(snapshot(step, 0, **changes))


def test_names_of_parts():
    assert part_name("embed.weight/m", 4096, (49152, 576)) == "embed.weight/m@4096of49152x576"
    assert parse("embed.weight/m@4096of49152x576") == ("embed.weight/m", 4096, (49152, 576))
    assert parse("embed.weight/m") == ("embed.weight/m", 0, None)
    assert parse(part_name("x", 0, ())) == ("x", 0, ())


def test_files_are_safetensors_of_every_dtype(tmp_path):
    kinds = (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.int8,
        torch.bool,
    )
    tensors = {str(kind): torch.arange(7).to(kind) for kind in kinds}
    tensors |= {"none": torch.empty(0, 3), "one": torch.tensor(2.5), "turned": torch.arange(6).view(2, 3).t()}
    write_tensors(tensors, tmp_path / "f.safetensors")
    found = load_file(tmp_path / "f.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype for name in found)


def test_parts_become_one_checkpoint(tmp_path):
    save(tmp_path, 1, 2, 3)
    assert [path.name for path in list_steps(tmp_path)] == ["step-00000002", "step-00000003"]
    assert not list(tmp_path.glob(".partial*"))
    found = newest(tmp_path)
    assert torch.equal(found.tensors["optimizer/w/m"], WHOLE + 3)
    assert set(found.tensors) == {"optimizer/w/m", "alone/0", "alone/1"} and len(found.tensors) == 3
    below = Below("optimizer/", found.tensors)
    assert list(below) == ["w/m"] and torch.equal(below["w/m"], WHOLE + 3)
    names = {path.name for path in found.path.iterdir()}
    assert {"train_state-00000-of-00002.safetensors", "train_state-00001-of-00002.safetensors"} < names
    (found.path / "train_state-00001-of-00002.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"train_state-00001-of-00002.safetensors has 1 bytes"):
        newest(tmp_path)


def test_a_part_that_is_missing_within_a_tensor_is_said(tmp_path):
    write_tensors({part_name("a", 0, (9,)): torch.zeros(4), part_name("a", 5, (9,)): torch.zeros(4)}, tmp_path / "a")
    with pytest.raises(ValueError, match="the state of a has a gap"):
        StoredTensors([tmp_path / "a"])["a"]


def test_nothing_gets_a_name_before_all_parts_are_there(tmp_path):
    first = Writer(tmp_path, 2)
    first.save(snapshot(1, 0))
    assert first._thread is not None
    first._thread.join(0.15)
    assert first._thread.is_alive() and not list_steps(tmp_path)
    second = Writer(tmp_path, 2, rank=1)
    second.save(snapshot(1, 1))
    first.wait()
    second.wait()
    assert newest(tmp_path).step == 1


def test_a_rank_that_cannot_write_leaves_earlier_checkpoints(tmp_path):
    save(tmp_path, 1)
    first, second = Writer(tmp_path, 2), Writer(tmp_path, 2, rank=1)
    second.save(snapshot(2, 1, tensors={"bad": torch.zeros(1, dtype=torch.complex64)}))
    first.save(snapshot(2, 0))
    with pytest.raises(ValueError, match=r"could not be written .*rank 1"):
        first.wait()
    with pytest.raises(ValueError, match="could not be written"):
        second.wait()
    assert newest(tmp_path).step == 1


def test_a_run_that_ends_does_not_wait_for_a_rank_that_is_gone(tmp_path):
    released = threading.Event()
    with pytest.raises(RuntimeError, match="the other rank is gone"), Writer(tmp_path, 2) as first:
        first.save(snapshot(1, 0, written=released.set))
        raise RuntimeError("the other rank is gone")
    assert released.is_set() and not list_steps(tmp_path) and not list(tmp_path.glob(".partial*"))


def test_a_rank_that_never_comes_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "WAIT_S", 0.05)
    first = Writer(tmp_path, 2)
    first.save(snapshot(1, 0))
    with pytest.raises(ValueError, match=r"rank 1 has not written its part .* one folder for all ranks"):
        first.wait()


def test_what_a_killed_run_left_is_not_taken_for_a_part(tmp_path):
    parts.write_part(tmp_path, 1, 1, 2, snapshot(1, 1).tensors)  # and then all ranks were killed
    with Writer(tmp_path, 2):
        assert not list(tmp_path.glob(".partial*"))


def test_other_ranks_of_a_whole_snapshot_write_nothing(tmp_path):
    with Writer(tmp_path, 2, rank=1) as second:
        second.save(snapshot(1, 1, ranks=1))
    assert not list(tmp_path.iterdir())
    with Writer(tmp_path, 2) as first:
        first.save(snapshot(1, 0, ranks=1))
    state = json.loads((newest(tmp_path).path / "train_state.json").read_text())
    assert "train_state.safetensors" in state["files"]
