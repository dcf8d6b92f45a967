"""A socket's folder: short enough, private, and a clear sentence where there is none."""

import socket

import pytest

from transect.engine.frontends.socket_folder import LONGEST_PATH, NAME, make_socket_folder


def test_a_long_place_is_passed_over(tmp_path):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    folder = make_socket_folder([str(long), "/tmp"])
    try:
        assert str(folder).startswith("/tmp/transect-") and folder.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(folder / NAME))
        (folder / NAME).unlink()
    finally:
        folder.rmdir()


def test_the_bound_is_the_system_s():
    with socket.socket(socket.AF_UNIX) as server, pytest.raises(OSError, match="too long"):
        server.bind("/tmp/".ljust(LONGEST_PATH + 1, "x"))


def test_no_place_is_one_clear_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"no folder for the engine's socket \(.*may have 107; .*set TMPDIR"):
        make_socket_folder([str(tmp_path / ("x" * 90)), str(tmp_path / "missing")])
