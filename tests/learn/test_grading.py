"""Parts of the grader: comparing, messages, texts with holes, verdicts."""

from __future__ import annotations

import math
import socket

import pytest
import torch

from transect.learn.grade import wire
from transect.learn.grade.compare import difference
from transect.learn.grade.session import not_plain
from transect.learn.grade.verdict import Verdict
from transect.learn.grade.watch import module_allowed
from transect.learn.texts import excerpt, with_hole


@pytest.mark.parametrize(
    ("got", "want", "words"),
    [
        (torch.ones(3), torch.ones(3), ""),
        (torch.ones(3) + 1e-7, torch.ones(3), ""),
        (torch.ones(3), torch.ones(4), "shape"),
        (torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1.0, 2.0, 3.0]), "at [2]: 9 instead of 3"),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), "NaN or infinite"),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.inf]), ""),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2 places"),
        (1.0 + 1e-9, 1.0, ""),
        (True, 1.0, "a number is expected"),
        ([1, 2], [1, 2, 3], "2 entries instead of 3"),
        (None, [1], "NoneType"),
        ({"a": 1}, {"a": 2}, "a is 1 instead of 2"),
        (1, True, "instead of True"),
        (torch.zeros(2), torch.zeros(2), ""),
        (torch.full((2,), 0.1), torch.zeros(2), "off by"),
    ],
)
def test_differences_are_told_in_a_sentence(got, want, words: str) -> None:
    found = difference(got, want, 1e-5)
    assert (words in found) if words else not found


def test_messages_carry_tensors_with_their_strides() -> None:
    a, b = socket.socketpair()
    with a, b:
        values = [
            torch.arange(12.0).view(3, 4).T,
            torch.zeros(0, 3),
            torch.tensor(7),
            torch.ones(2, 6)[:, ::2].bfloat16(),
            b"x",
        ]
        wire.send(a, {"values": values})
        got = wire.receive(b)["values"]
        assert got[0].stride() == (1, 4)
        for sent, came in zip(values[:-1], got[:-1], strict=True):
            assert torch.equal(sent, came) and sent.dtype == came.dtype
        with pytest.raises(TypeError, match="cannot be sent"):
            wire.send(a, object())
        a.sendall(b"\x03" + b"\0" * 7 + b"\xc1\xc1\xc1")
        with pytest.raises(ValueError, match="cannot be read"):
            wire.receive(b)
        a.close()
        with pytest.raises(wire.Ended):
            wire.receive(b)


def test_results_may_be_plain_values_only() -> None:
    class Late(list):
        pass

    assert not not_plain([1, {"a": torch.ones(2)}, (None, b"", 1.5)])
    assert "function" in not_plain([1, lambda: 3])
    assert "Late" in not_plain(torch.ones(2).as_subclass(type("Late", (torch.Tensor,), {})))


def test_a_rung_may_import_what_it_allows_and_the_packages_above() -> None:
    allows = ("transect.engine.scheduling",)
    assert all(
        module_allowed(name, allows) for name in ("transect", "transect.engine", "transect.engine.scheduling.batch")
    )
    assert not module_allowed("transect.ops", allows) and not module_allowed("transect.engine.build", allows)


def test_a_hole_keeps_signatures_and_docstrings() -> None:
    text = 'class A:\n    def f(self, x):\n        """Say x."""\n        return x\n\n\ndef g():\n    return 1\n'
    made = with_hole(text, ("A.f", "g"))
    assert '"""Say x."""' in made and "return x" not in made and "return 1" not in made
    space: dict = {}
    exec(compile(made, "made", "exec"), space)
    with pytest.raises(NotImplementedError, match=r"A\.f is not written yet"):
        space["A"]().f(1)
    assert "@triton.jit" in excerpt("ops/first/sum.py", "_partial_kernel")
    with pytest.raises(ValueError, match="has no"):
        excerpt("ops/first/sum.py", "nothing")


def test_a_verdict_says_what_happened() -> None:
    right = Verdict("line", True, passed=["a"], seconds=1e-3, floor_seconds=5e-4, reference_seconds=2e-3, count=10,
                    reference_count=5, counted="steps", bound="bytes")  # fmt: skip
    text = "\n".join(right.lines())
    assert "50.0% of the floor" in text and "2.00 times" in text and "the shipped solution 2 ms" in text
    assert "try next: fewer passes" in text
    spilled = {"kernel": "k", "target": "sm_90", "registers": 255, "spilled_bytes": 8, "loads": {"4": 2}}
    assert "spills" in Verdict("line", True, kernels=[spilled]).try_next()
    assert "takes 25% of your time" in Verdict("line", True, seconds=4.0, reference_seconds=1.0).try_next()
    assert not Verdict("line", True, seconds=1.0, floor_seconds=0.9, bound="bytes").try_next()
    assert "not graded" in Verdict("line", False, cheats=["opens a socket"]).lines()[0]
    assert Verdict("line", False, "why", "where", passed=["a"]).lines() == [
        "not right yet: why",
        "  where",
        "solved: a",
    ]
