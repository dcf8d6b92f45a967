"""Which files a row was measured of, and which rows a new run need not measure."""

from pathlib import Path

import pytest

from transect.ops.lang.cuda import SOURCES
from transect.ops.registry import all_ops, get
from transect.ops.tools import results, sources
from transect.ops.tools.bench import Timing

OPS = {op.name: op for op in all_ops()}


def names(op: str) -> set[str]:
    return {path.name for path in sources.files_of(get(op))}


def test_imports_and_includes_are_followed() -> None:
    assert names("gelu") == {"gelu.py", "gelu.cu"}
    assert {"small_matmul.py", "small_matmul.cu", "few_rows.cuh", "tiles.py"} <= names("small_matmul")
    assert {"add_rms_norm.py", "rms_norm.py", "norms.py"} <= names("add_rms_norm")
    assert {"flash_attention.py", "packed/backward.py", "packed/hopper.py"} <= names("flash_attention")
    for name in OPS:
        assert f"{name}.py" in names(name)
        assert not {"registry.py", "shapes.py", "jit.py"} & names(name)


def copied(op: str, folder: Path) -> Path:
    """The operator's files in another folder."""
    for path in sources.files_of(get(op)):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_the_digest_is_of_the_operator_s_files_and_its_choices(tmp_path: Path) -> None:
    folder = copied("gelu", tmp_path)
    first = sources.digest(get("gelu"), "Some GPU", folder)
    assert len(first) == 12 and first == sources.digest(get("gelu"), "Some GPU", SOURCES)
    (folder / "swiglu.py").write_text("another operator")
    tuned = folder / "tuned" / "some_gpu.json"
    tuned.parent.mkdir()
    tuned.write_text('{"choices": {"swiglu": {"8": {"block": 1024}}}}')
    assert sources.digest(get("gelu"), "Some GPU", folder) == first
    tuned.write_text('{"choices": {"gelu": {"8": {"block": 1024}}}}')
    assert sources.digest(get("gelu"), "Some GPU", folder) != first
    assert sources.digest(get("gelu"), "Other GPU", folder) == first
    (folder / "gelu.cu").write_text("// changed")
    assert sources.digest(get("gelu"), "Other GPU", folder) != first


@pytest.mark.parametrize(
    ("device", "version", "digest", "good"),
    [("a", "1", "x", True), ("b", "1", "x", False), ("a", "2", "x", False), ("a", "1", "y", False)],
)
def test_rows_stay_good_on_the_same_machine_and_sources(
    tmp_path: Path, device: str, version: str, digest: str, good: bool
) -> None:
    def run(device: str, version: str) -> dict:
        return {"device": {"name": device}, "environment": {"packages": {"torch": version}}}

    path = tmp_path / "ops.json"
    rows = [Timing("sum", case, "forward", "triton", False, seconds=1.0) for case in ("one", "two")]
    results.merge(path, run("a", "1"), rows, {"sum": "x"})
    results.merge(path, run("a", "1"), [Timing("dot", "one", "forward", "triton", False)])  # of unknown sources
    found = sources.still_good(results.read(path), run(device, version), {"sum": digest, "dot": "z"})
    assert found == (frozenset({("sum", "one"), ("sum", "two")}) if good else frozenset())
