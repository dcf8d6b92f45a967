"""A workshop refuses versions whose interpreted kernels fail."""

from __future__ import annotations

import pytest

from transect.learn.grade import workshop


@pytest.mark.parametrize(("triton", "numpy", "fails"), [("3.6.0", "2.4.1", True), ("3.6.0", "2.3.5", False),
                                                        ("3.7.1", "2.5.2", False)])  # fmt: skip
def test_versions_that_cannot_interpret_are_refused(monkeypatch, triton: str, numpy: str, fails: bool) -> None:
    monkeypatch.setattr(workshop, "version", {"triton": triton, "numpy": numpy}.__getitem__)
    if fails:
        with pytest.raises(ValueError, match=r"numpy<2\.4"):
            workshop._check_interpreter()
    else:
        workshop._check_interpreter()
