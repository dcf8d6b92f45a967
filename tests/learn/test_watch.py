"""Process starts of Triton's compiler are told from those of the program that launches a kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from triton.runtime.jit import JITFunction

from transect.learn.grade.watch import Watch
from transect.learn.registry import get

PROGRAM = "def call(function, *arguments):\n    return function(*arguments)\n"


@pytest.fixture
def watch() -> Watch:
    return Watch("program.py", allows=(), kernel=True, places=(), forbids=())


def _program() -> Callable[..., object]:
    space: dict[str, Callable[..., object]] = {}
    exec(compile(PROGRAM, "program.py", "exec"), space)
    return space["call"]


def test_the_code_of_tritons_launch_is_known(watch: Watch) -> None:
    assert JITFunction.run.__code__ in watch.launchers


def test_a_process_that_the_compiler_starts_is_no_alarm(watch: Watch) -> None:
    call = _program()

    def start() -> None:
        watch._on = True
        watch._audit("subprocess.Popen", ())
        watch._on = False

    def launch(function: Callable[..., object], *arguments: object) -> None:
        function(*arguments)

    call(start)
    assert watch.alarms == ["starts another process"]
    watch.alarms.clear()
    watch.launchers = frozenset({launch.__code__})
    call(launch, start)
    assert not watch.alarms
    call(launch, call, start)  # a hook of the program, called in the launch
    assert watch.alarms == ["starts another process"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["vector_add", "softmax", "int4_product"])
def test_a_kernel_is_right_on_a_gpu(name: str) -> None:
    from transect.learn.grade.grader import grade, source_file
    from transect.learn.grade.workshop import Workshop

    rung = get(name)
    with Workshop("cuda") as shop, source_file(rung) as path:
        verdict = grade(rung, path, shop=shop)
    assert verdict.right, (verdict.reason, verdict.detail, verdict.cheats)
    assert verdict.seconds
