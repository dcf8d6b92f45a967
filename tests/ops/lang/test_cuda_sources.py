"""Every CUDA C++ source compiles with nvcc for each target, without spilling more than a few registers.

Of a source that names parts (``parts.cuh``), `make test` compiles the first: all parts instantiate the same templates.
"""

import hashlib
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from effort import proving
from remembered import Remembered

from transect.ops.lang import cuda_build
from transect.ops.lang.cuda_build import compile_source, part_options, sources
from transect.ops.registry import Unavailable
from transect.ops.tools.compile import disassemble, tool

BUILDER = Path(cuda_build.__file__).read_bytes()


@cache
def versions() -> bytes:
    """A key of all that a build depends on beside its source: compiler, headers, and what calls the compiler."""
    headers = b"".join(path.read_bytes() for path in sorted(cuda_build.SOURCES.rglob("*.cuh")))
    return subprocess.check_output([cuda_build.find_nvcc(), "--version"]) + headers + BUILDER


# Hopper's own sources are empty for sm_80, and the others compile for it, and for other targets, as for sm_90: the long
# ones are for `prove` there, and so are those whose includes are compiled with Hopper's sources or `small_matmul.cu`.
LONG = {"small_matmul.cu", "int4_portable.cu", "gguf_rows.cu", "all_reduce.cu"}
BUILDS = [
    pytest.param(source, target, id=f"{source.name}-{target}", marks=[pytest.mark.prove] if costly else [])
    for source in sources()
    for target in cuda_build.CUDA_TARGETS
    for costly in [
        source.name in ("scaled8.cu", "int4_matmul.cu", "gguf_tiles.cu", "int4_tiles.cu")
        or source.name in ("scaled8_hopper_int8.cu", "scaled8_hopper_blocks.cu")
        or ((source.name in LONG or "hopper" in source.name) and target == "sm_80")
        or target not in ("sm_80", "sm_90")
    ]
]

MOST_SPILLED = {"sm_100": 96, "sm_120": 96}
"""Limit of spills in bytes, for targets whose kernels have not been measured; 32 for all others."""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize(("source", "target"), BUILDS)
def test_compiles(source: Path, target: str, tmp_path: Path, remembered: Remembered) -> None:
    options = [] if proving() else part_options(source, 0)

    def compiled() -> tuple[str, int]:
        output = tmp_path / "out.o"  # with the host's half, which may fail alone
        return compile_source(source, target, output, options), output.stat().st_size

    report, size = remembered(compiled, source.read_bytes(), target, versions(), *options)
    assert size > 0
    assert "Used" in report
    most = MOST_SPILLED.get(target, 32)
    assert all(int(spilled) <= most for spilled in re.findall(r"(\d+) bytes spill stores", report)), report
    assert 'extern "C"' in source.read_text()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("name", ["ops/issue_rates.cu", "checks/sanitizer_control.cu"])
def test_what_benchmarks_compile_compiles(name: str, tmp_path: Path, remembered: Remembered) -> None:
    source = Path(__file__).parents[3] / "benchmarks" / name
    report = remembered(
        lambda: compile_source(source, "sm_90", tmp_path / "out.cubin"), source.read_bytes(), "report", versions()
    )
    assert "Used" in report


@pytest.mark.prove
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_every_lane_arrives_where_the_sanitizer_is_to_judge(tmp_path: Path, remembered: Remembered) -> None:
    """The build for the sanitizer compiles, with arrivals in as many places, and is another one."""
    folder = Path(shutil.copytree(cuda_build.SOURCES, tmp_path / "ops", ignore=shutil.ignore_patterns("*.py", "cpu")))
    source = folder / "linear" / "packed" / "int4" / "int4_matmul.cu"

    def compiled() -> tuple[int, str]:
        """How many arrivals there are, and the code's hash."""
        ptx = cuda_build.ptx_of(source, "sm_90")
        arrivals = re.findall(r"^\s*(@%p\d+ )?mbarrier\.arrive\.shared::cta\.b64", ptx, re.MULTILINE)
        return len(arrivals), hashlib.sha256(ptx.encode()).hexdigest()

    ordinary = remembered(compiled, "arrivals", source.read_bytes(), versions())
    source.write_text("#define TRANSECT_EVERY_LANE\n" + source.read_text())
    for_all = remembered(compiled, "arrivals", source.read_bytes(), versions())
    assert ordinary[0] == for_all[0] > 0
    assert ordinary[1] != for_all[1]


@pytest.mark.prove
@pytest.mark.skipif(shutil.which("nvcc") is None or tool("nvdisasm") is None, reason="needs nvcc and nvdisasm")
@pytest.mark.parametrize("name", ["int4_portable.cu", "gguf_rows.cu"])
def test_copies_name_a_descriptor_that_something_writes(name: str, tmp_path: Path, remembered: Remembered) -> None:
    """nvcc 13.0 compiles some copies with a cache hint to one that nothing writes, in an odd register: a GPU that acts
    as an Ada card ends there with an illegal instruction."""
    source, output = cuda_build.source(name), tmp_path / "out.cubin"

    def odd() -> list[str]:
        cuda_build._nvcc(["-gencode=arch=compute_89,code=sm_90", "-cubin", "-o", str(output), str(source)], source, "")
        copies = [line for line in disassemble(output.read_bytes()).splitlines() if "LDGSTS" in line]
        assert copies
        return [line.strip() for line in copies if re.search(r"desc\[UR\d*[13579]\]", line)]

    assert not remembered(odd, source.read_bytes(), "descriptors", versions())


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_an_object_has_the_half_of_the_host(tmp_path: Path) -> None:
    broken = tmp_path / "broken.cu"
    broken.write_text("#ifndef __CUDA_ARCH__\nint f() { return undeclared; }\n#endif\n")
    compile_source(broken, "sm_90", tmp_path / "out.cubin")
    with pytest.raises(RuntimeError, match="undeclared"):
        compile_source(broken, "sm_90", tmp_path / "out.o")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_compiler_message_reaches_the_caller(tmp_path: Path) -> None:
    broken = tmp_path / "broken.cu"
    broken.write_text("__global__ void f() { undeclared = 1; }")
    with pytest.raises(RuntimeError, match="undeclared"):
        compile_source(broken, "sm_90", tmp_path / "out.cubin")


def test_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(cuda_build, "TOOLKIT", str(tmp_path))
    with pytest.raises(Unavailable, match="set CUDA_HOME"):
        compile_source(sources()[0], "sm_90", tmp_path / "out.cubin")


@pytest.mark.parametrize("named", ["CUDA_HOME", "CUDA_PATH", "TOOLKIT"])
def test_a_toolkit_beside_the_path_is_found(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "toolkit" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(variable, str(tmp_path / "toolkit" if variable == named else tmp_path))
    monkeypatch.setattr(cuda_build, "TOOLKIT", str(tmp_path / "toolkit" if named == "TOOLKIT" else tmp_path))
    assert cuda_build.find_nvcc() == str(compiler)
