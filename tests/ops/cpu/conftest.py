"""The C++ kernels on every instruction set that this processor runs."""

import os

import pytest
from effort import proving

from transect.ops.cpu import build
from transect.ops.cpu.library import Library, load
from transect.ops.registry import Unavailable

MARCHES = {"native": (), "x86-64-v3": ("avx2", "fma", "f16c"), "x86-64": ()}
"""Values of ``-march``, with the features that their code needs."""
FLAGS = "TRANSECT_CXXFLAGS"
"""The variable of flags that follow ours."""


@pytest.fixture(scope="package", params=MARCHES)
def libraries(request: pytest.FixtureRequest) -> tuple[Library, Library]:
    """Two teams of two threads of one build: in float32, and asked to round inputs to bfloat16. Builds for older
    processors are optimized less and read headers twice, not for some kinds each, which takes a quarter of the time;
    with ``--prove`` they are built as in use."""
    march = request.param
    if not set(MARCHES[march]) <= set(build._processor().split()):
        pytest.skip(f"this processor cannot run code for {march}")
    with pytest.MonkeyPatch.context() as patch:
        if march != "native" and not proving() and FLAGS not in os.environ:
            patch.setenv(FLAGS, "-O1")
            patch.setattr(build, "TOGETHER", (", ".join(build.TOGETHER),))
        try:
            return load(2, march), load(2, march, bfloat16=True)
        except Unavailable as reason:
            pytest.skip(str(reason))


@pytest.fixture(scope="package")
def library(libraries: tuple[Library, Library]) -> Library:
    return libraries[0]


@pytest.fixture(scope="package")
def rounding_library(libraries: tuple[Library, Library]) -> Library:
    return libraries[1]
