"""A workshop refuses versions whose interpreted kernels fail."""

from __future__ import annotations

import pytest

from transect.learn.grade import workshop
from transect.learn.registry import get


@pytest.mark.parametrize(("triton", "numpy", "fails"), [("3.6.0", "2.4.1", True), ("3.6.0", "2.3.5", False),
                                                        ("3.7.1", "2.5.2", False)])  # fmt: skip
def test_versions_that_cannot_interpret_are_refused(monkeypatch, triton: str, numpy: str, fails: bool) -> None:
    monkeypatch.setattr(workshop, "version", {"triton": triton, "numpy": numpy}.__getitem__)
    if fails:
        with pytest.raises(ValueError, match=r"numpy<2\.4"):
            workshop._check_interpreter()
    else:
        workshop._check_interpreter()


def test_what_a_rung_lacks_is_named_before_it_is_graded(monkeypatch) -> None:
    """A student without Triton or a compiler has made no mistake."""
    monkeypatch.setattr(workshop, "find_spec", lambda name: None)
    monkeypatch.setattr(workshop.shutil, "which", lambda name: None)
    assert "pip install '.[learn]'" in workshop.lacking(get("vector_add"))
    assert "install g++" in workshop.lacking(get("python_to_cpp"))
    assert not workshop.lacking(get("line"))
