"""A source in parts becomes one library in which each kernel's launch is compiled once."""

import ctypes
import errno
import fcntl
import os
import shutil
import subprocess
import threading
from types import SimpleNamespace

import pytest
from effort import quick_first

from transect.ops.lang import cuda, cuda_build
from transect.ops.registry import Unavailable

SOURCE = f"""
#include "{cuda_build.SOURCES}/lang/parts.cuh"

#define TRANSECT_PARTS 3

template <int N>
__attribute__((noinline)) int start(int x) {{
  return 100 * N + x;
}}

// Arguments of more than one line.
extern "C" int transect_try(const void* nothing, int n,
                            long long x) {{
  if (nothing) return -1;
  if (n == 1) return TRANSECT_HERE(start<1>((int)x));
  if (n == 2) return TRANSECT_HERE(start<2>((int)x));
  if (n == 3) return TRANSECT_HERE(start<3>((int)x));
  if (n == 4) return TRANSECT_HERE(start<4>((int)x));
  return -1;
}}
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize(("cores", "parts"), quick_first([(3, 1), (16, 3), (4, 2), (1, 1)], 2))
def test_as_many_parts_as_there_are_cores_for(cores, parts, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    source, output = tmp_path / "source.cu", tmp_path / "source.so"
    source.write_text(SOURCE)
    cuda_build.compile_library(source, "sm_90", output)
    launch = ctypes.CDLL(str(output)).transect_try
    launch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong]
    assert [launch(None, n, 7) for n in range(6)] == [-1, 107, 207, 307, 407, -1]
    assert launch(1, 2, 7) == -1
    symbols = subprocess.run(["nm", "-C", str(output)], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len([line for line in symbols if "int start<" in line]) == 4
    assert len([line for line in symbols if " transect_try_" in line]) == (parts if parts > 1 else 0)


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """Makes an nvcc that ends with a code, and a GPU to build for."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda, "_target", lambda: "sm_90")

    def make(code):
        script = tmp_path / "nvcc"
        script.write_text(f"#!/bin/sh\necho 'nvcc fatal   : Unsupported gpu architecture' >&2\nexit {code}\n")
        script.chmod(0o755)

    return make


def test_an_nvcc_too_old_for_the_gpu_is_as_none(nvcc):
    """Said when an engine chooses its operators: in its first step nothing else could run instead."""
    nvcc(1)
    with pytest.raises(Unavailable, match=r"12\.1 or later.*sm_90.*Unsupported gpu architecture"):
        cuda.bind("small_matmul", "transect_small_matmul", "p")
    with pytest.raises(Unavailable):
        cuda_build.build("small_matmul", "sm_90")


def test_a_cache_that_cannot_be_written_is_as_no_nvcc(nvcc, tmp_path):
    nvcc(0)
    (tmp_path / "cache").touch()  # not a folder
    with pytest.raises(Unavailable, match="set TRANSECT_CACHE"):
        cuda.bind("small_matmul", "transect_small_matmul", "p")


def test_a_file_system_without_locks_is_as_no_nvcc(nvcc, monkeypatch):
    """Some clusters' home folders."""

    def flock(file, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    nvcc(0)
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(Unavailable, match=r"not implemented.*set TRANSECT_CACHE"):
        cuda_build.build("small_matmul", "sm_90")


def test_nothing_is_asked_of_nvcc_where_the_library_is(nvcc):
    nvcc(1)
    library = cuda_build.library_path("small_matmul", "sm_90")
    library.parent.mkdir(parents=True)
    library.touch()
    cuda.bind("small_matmul", "transect_small_matmul", "p")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_a_host_compiler_too_new_for_nvcc_is_as_no_nvcc(tmp_path, monkeypatch):
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-Xcompiler -U__GNUC__ -Xcompiler -D__GNUC__=99")
    with pytest.raises(Unavailable, match="unsupported GNU version"):
        cuda_build.check("sm_90")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_an_nvcc_too_new_for_the_driver_is_as_none(tmp_path, monkeypatch):
    """What it builds would fail when first launched."""
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda_build, "_driver", lambda: 9)
    with pytest.raises(Unavailable, match="newer than the GPU driver, of CUDA 9"):
        cuda_build.check("sm_90")


def test_the_driver_is_asked_for_its_version(monkeypatch):
    def version(pointer):
        pointer._obj.value = 12040

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=version))
    assert cuda_build._driver() == 12


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_this_nvcc(tmp_path, monkeypatch):
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path))
    for target in cuda_build.CUDA_TARGETS:
        cuda_build.check(target)
    with pytest.raises(Unavailable, match="sm_20"):
        cuda_build.check("sm_20")


def test_each_kind_of_gpu_has_its_own_library(monkeypatch, tmp_path):
    """In one process, even if the launcher is first called when another GPU is the current one."""
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda, "check", lambda target: None)
    monkeypatch.setattr(cuda, "build", lambda name, target: f"{name} for {target}")
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(start=lambda: path))
    launchers = []
    for target in ("sm_80", "sm_90"):
        monkeypatch.setattr(cuda, "_target", lambda target=target: target)
        launchers.append(cuda.bind("sum", "start", ""))
    try:
        assert [launch() for launch in launchers] == ["sum for sm_80", "sum for sm_90"]
    finally:
        cuda._load.cache_clear()


def test_what_is_skipped_is_built_in_the_background(monkeypatch, tmp_path):
    """Once for all launchers of a source. What goes wrong is raised by the first launch."""
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda, "check", lambda target: None)
    monkeypatch.setattr(cuda, "_target", lambda: "sm_90")
    asked, begun = [], threading.Event()

    def build(name, target):
        asked.append((name, threading.current_thread() is threading.main_thread()))
        begun.set()
        raise RuntimeError("it does not compile")

    monkeypatch.setattr(cuda, "build", build)
    first, second = (cuda.bind("sum", symbol, "") for symbol in ("start", "end"))
    try:
        with cuda.skipped():
            assert first() == second() == first() == 0
        assert begun.wait(200) and asked == [("sum", False)]
        with pytest.raises(RuntimeError, match="does not compile"):
            first()
        assert asked[1:] == [("sum", True)]
    finally:
        cuda._begin.cache_clear()
        cuda._load.cache_clear()


def test_a_launcher_is_of_the_gpu_that_is_current_when_it_is_asked_for(monkeypatch):
    called = []
    monkeypatch.setattr(cuda, "build", lambda name, target: target)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(start=lambda *arguments: called.append(path)))
    monkeypatch.setattr(cuda.torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    try:
        for target in ("sm_80", "sm_90", "sm_80"):
            monkeypatch.setattr(cuda, "_target", lambda target=target: target)
            cuda.launcher("sum", "start")(1, 2.0)
        assert called == ["sm_80", "sm_90", "sm_80"]
    finally:
        cuda._load.cache_clear()
        cuda._launcher.cache_clear()
