"""``benchmarks/checks/gpu_tests.py``: what it keeps of a file of tests."""

from pathlib import Path
from textwrap import dedent

import pytest
from effort import quick_first

from benchmarks.checks import gpu_tests

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def kept(file: Path, limit: float, parts: int = 1) -> dict:
    return gpu_tests.run(str(file), limit, parts)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "test_some.py"
    path.write_text(
        dedent("""
        import pytest

        @pytest.fixture
        def broken():
            raise OSError

        @pytest.mark.gpu
        def test_right(): pass

        @pytest.mark.gpu
        def test_wrong(): assert False

        @pytest.mark.gpu
        def test_without_its_fixture(broken): pass

        @pytest.mark.gpu
        def test_skipped(): pytest.skip("for a reason")

        def test_for_a_processor(): assert False
        """)
    )
    return path


@pytest.mark.parametrize("parts", quick_first([1, 2, 3], 1))
def test_results_are_counted_and_failures_named(file: Path, parts: int):
    found = kept(file, 120, parts)
    assert found.pop("seconds") > 0
    assert sorted(found.pop("failed")) == ["test_without_its_fixture", "test_wrong"]
    assert found == {"passed": 1, "skipped": 1}


@pytest.mark.prove
def test_a_part_that_takes_too_long_cuts_the_file_off(file: Path):
    file.write_text("import time, pytest\npytestmark = pytest.mark.gpu\ndef test_a(): pass\n"
                    "def test_b(): time.sleep(60)\n")  # fmt: skip
    assert kept(file, 6, 2) == {"cut_off_after_s": 6}


@pytest.mark.parametrize("parts", quick_first([2, 1], 1))
def test_a_file_that_takes_too_long_says_so(file: Path, parts: int):
    file.write_text("import time\ntime.sleep(60)\n")
    assert kept(file, 1, parts) == {"cut_off_after_s": 1}
