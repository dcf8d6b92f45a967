"""A container's share of CPU time counts, not only the cores that it may run on."""

import os

import pytest

from transect.hardware import cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 64 cores, with these control groups: the process's own, and what files hold."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64))
    monkeypatch.setattr(cores, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "cgroup")

    def make(membership, files):
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return make


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "350000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {}, 64),
        ("0::/pod/box\n", {"pod/cpu.max": "300000 100000\n", "pod/box/cpu.max": "max 100000\n"}, 3),
        ("0::/docker/outside\n", {"cpu.max": "800000 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "20000000 100000\n"}, 64),
        (
            "4:memory:/box\n3:cpu,cpuacct:/box\n0::/\n",
            {"cpu,cpuacct/box/cpu.cfs_quota_us": "600000\n", "cpu,cpuacct/box/cpu.cfs_period_us": "100000\n"},
            6,
        ),
        ("1:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
    ],
)
def test_no_more_cores_than_there_is_time_for(machine, membership, files, expected):
    machine(membership, files)
    assert cores.usable_cores() == expected


def test_a_machine_without_control_groups(machine):
    assert cores.usable_cores() == 64


@pytest.fixture
def affinity(monkeypatch):
    """The cores of this process's threads, which change nothing in this machine: that of the caller is the last."""
    found = [{2, 3, 5, 7}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(found[-1]))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, asked: found.append(set(asked)))
    monkeypatch.setattr(cores, "_quotas", lambda: [])
    for name in ("_all", "_kept", "_left"):
        monkeypatch.setattr(cores, name, ())
    return found


def test_an_engine_leaves_its_last_core_to_other_threads(affinity):
    assert cores.leave_core(3) == [7]
    assert affinity[-1] == {2, 3, 5} and cores.own_cores() == {2, 3, 5, 7} and cores.usable_cores() == 4
    assert cores.helper_cores() == 1 and cores.niceness(5) == cores.POLITEST
    cores.step_aside()
    assert affinity[-1] == {7}


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_cores_are_not_divided_if_threads_would_lack_some_or_leave_several(affinity, threads):
    assert cores.leave_core(threads) == []
    assert cores.helper_cores() == 4 and cores.niceness(5) == 5
    cores.step_aside()
    with cores.undivided():
        assert len(affinity) == 1


def test_few_cores_and_quotas_and_systems_that_forbid_it_are_left_alone(affinity, monkeypatch):
    affinity[0] = {0, 1, 2}
    assert cores.leave_core(2) == []
    affinity[0] = {0, 1, 2, 3}
    monkeypatch.setattr(cores, "_quotas", lambda: [3.5, 3.0])
    assert cores.leave_core(3) == []
    monkeypatch.setattr(cores, "_quotas", lambda: [])

    def forbidden(process, asked):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    assert cores.leave_core(3) == []


def test_a_server_gives_its_children_all_cores(affinity):
    cores.confine([])
    assert len(affinity) == 1
    cores.confine([7])
    assert affinity[-1] == {7}
    with cores.undivided():
        assert affinity[-1] == {2, 3, 5, 7}
    assert affinity[-1] == {7}
    cores.confine([])  # the next engine needs them all
    assert affinity[-1] == {2, 3, 5, 7}
