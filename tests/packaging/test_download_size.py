"""What make announces before it downloads."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / ".ci"))

import download_size  # noqa: E402
from download_size import CPU_TORCH, REST, TORCH, TRITON, cpu_build, sentence  # noqa: E402


@pytest.fixture(autouse=True)
def linux(monkeypatch):
    monkeypatch.setattr(download_size.sys, "platform", "linux")
    monkeypatch.setattr(download_size.platform, "machine", lambda: "x86_64")


@pytest.fixture
def folder(tmp_path):
    """A folder of wheels with a CPU build of torch for this Python."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    (tmp_path / f"torch-2.13.0+cpu-{python}-{python}-manylinux_2_28_x86_64.whl").touch()
    return str(tmp_path)


def test_published_torch_comes_with_cuda(monkeypatch):
    gigabytes = TORCH["x86_64"] + REST["run"]
    assert (
        sentence("run", "") == f"up to {gigabytes:.1f} GB will be downloaded, most of it torch and its CUDA libraries"
    )
    assert sentence("test", "").startswith(f"up to {TORCH['x86_64'] + REST['test']:.1f} GB")
    monkeypatch.setattr(download_size.platform, "machine", lambda: "aarch64")
    assert sentence("run", "").startswith(f"up to {TORCH['aarch64'] + REST['run']:.1f} GB")


def test_a_cpu_build_is_far_smaller(folder, tmp_path_factory):
    settings = f":env:.find-links='{folder}'\nglobal.cert='/etc/ssl'"
    assert cpu_build(settings) == folder
    small = f"up to {REST['run']:.2f} GB will be downloaded, with a build of torch without CUDA"
    assert sentence("run", settings).startswith(small)
    index = "global.extra-index-url='https://x.org/simple https://download.pytorch.org/whl/cpu/'"
    assert sentence("run", index).startswith(f"up to {REST['run'] + CPU_TORCH:.2f} GB")
    assert cpu_build(f"global.find-links='{tmp_path_factory.mktemp('empty')}'") == ""


def test_what_is_there_does_not_come_again():
    more = REST["test"] - REST["run"]
    assert sentence("test", "", "2.13.0") == f"up to {more:.2f} GB will be downloaded; torch 2.13.0 is there already"
    assert sentence("test", "", "2.13.0+cpu").startswith(f"up to {more + TRITON:.2f} GB")


def test_make_says_it_before_it_installs():
    """What ``make demo`` and ``make test`` would do in a new folder."""

    def plan(target):
        return subprocess.run(
            ["make", "-n", target, "VENV=nowhere"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout

    demo = plan("demo")
    assert demo.index("download_size.py run nowhere") < demo.index("pip install")
    assert "[test" not in demo and "download_size.py test" not in demo
    assert "pip install" in demo and "-e ." in demo
    test = plan("test")
    assert test.index("download_size.py test nowhere") < test.index("'.[test,lint]'")
