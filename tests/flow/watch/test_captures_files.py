"""The files of captures: quota, age, deletion, permissions, and writes that fail."""

import json
import multiprocessing
import resource
import stat
import threading

import pytest

from transect.flow.watch import captures


def line(number, user="", size=100):
    record = {"kind": "request", "id": f"{number:032x}", "user": user, "text": "x" * size}
    return json.dumps(record).encode()


def numbers(folder):
    return [int(record["id"], 16) for record in captures.read(folder)]


class Clock:
    now = 1_700_000_000.0

    def __call__(self):
        return self.now


def files_in(folder, **options):
    return captures.CaptureFiles(folder / "captures", **{"reserve_bytes": 0, "clock": Clock()} | options)


def test_the_oldest_leave_first_when_the_quota_is_reached(tmp_path):
    files = files_in(tmp_path, quota_bytes=20_000)
    for number in range(500):
        files.append([line(number)])
        assert files.size() <= 20_000
    left = numbers(files.folder)
    assert left == list(range(left[0], 500)) and len(left) > 90
    assert len(captures.segments(files.folder)) > 10


def test_records_leave_by_age(tmp_path):
    clock = Clock()
    files = files_in(tmp_path, age_s=1600.0, clock=clock)
    for number in range(32):
        files.append([line(number)])
        clock.now += 100.0
    assert numbers(files.folder) == list(range(16, 32))  # the last was written 100 s ago
    clock.now += 1600.0
    files.expire()
    assert numbers(files.folder) == []


def test_deleting_a_user_leaves_all_others_and_works_beside_a_writer(tmp_path):
    files = files_in(tmp_path, quota_bytes=200_000)
    ann, bob = files.user_hash("ann"), files.user_hash("bob")
    assert ann != bob and captures.user_hash(files.folder, "ann") == ann
    assert captures.user_hash(captures.private_folder(tmp_path / "other"), "ann") != ann  # each directory has its key
    for number in range(200):
        files.append([line(number, (ann, bob)[number % 2])])
    writer = threading.Thread(target=lambda: [files.append([line(200 + each, bob)]) for each in range(100)])
    writer.start()
    assert captures.delete_user(files.folder, "ann") == 100
    writer.join()
    assert numbers(files.folder) == [*range(1, 200, 2), *range(200, 300)]
    assert captures.delete_user(files.folder, "ann") == 0
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.folder.iterdir()} == {0o600}


def test_deletion_may_be_limited_to_a_client(tmp_path):
    files = files_in(tmp_path)
    ann = files.user_hash("ann")
    for number, client in enumerate(("one", "two")):
        files.append([json.dumps({"id": f"{number:032x}", "user": ann, "client": client}).encode()])
    assert captures.delete_user(files.folder, "ann", "one") == 1 and numbers(files.folder) == [1]


def write_until_full(folder, limit, ended):
    """In a process of its own, because the limit is the process's: no file may be longer."""
    files = captures.CaptureFiles(folder, reserve_bytes=0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    written = 0
    try:
        while True:
            files.append([line(written), line(written + 1)])
            written += 2
    except OSError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        files.append([line(written), line(written + 1)])
        ended.send((written, error.errno))


def test_a_write_that_fails_in_the_middle_leaves_no_half_record(tmp_path):
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=write_until_full, args=(tmp_path / "captures", 10_000, there))
    process.start()
    assert here.poll(60)
    written, _ = here.recv()
    process.join()
    assert written > 40
    for path in captures.segments(tmp_path / "captures"):
        assert all(captures.parsed(each) is not None for each in path.read_bytes().splitlines())
    assert numbers(tmp_path / "captures") == list(range(written + 2))


def test_a_disk_keeps_a_reserve(tmp_path):
    files = files_in(tmp_path, reserve_bytes=2**60)
    with pytest.raises(OSError, match="MiB are free"):
        files.append([line(1)])
    assert numbers(files.folder) == []


def test_lines_that_were_cut_off_are_passed_over(tmp_path):
    files = files_in(tmp_path)
    path, *_ = files.append([line(1)])
    with path.open("ab") as file:
        file.write(b'{"kind": "req\n')
        file.write(line(2) + b"\n" + b'{"id": "' + b"0" * 30)
    assert numbers(files.folder) == [1, 2]


def test_directories_that_cannot_hold_captures_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="another directory"):
        captures.private_folder(tmp_path / "file")
    with pytest.raises(ValueError, match="--capture-dir"):
        list(captures.read(tmp_path / "none"))
