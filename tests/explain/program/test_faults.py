"""Planted faults: the right one comes first, and the parts add up."""

import gc

import pytest
import torch
from effort import quick_first
from planted_faults import COPY_ONLY, GPU_NAMES, NAMES, ceilings, explain, healthy, load
from undisturbed import undisturbed

from transect.explain.program.explain import Explain, machine_ceilings

STEADY = ["sleeping", "growing_tensor", "mostly_padding"]
"""They say the same on any machine, and quickly."""


@pytest.fixture(autouse=True)
def same_process():
    """The number of threads is put back afterwards, and the collector leaves alone what other tests have made."""
    before = torch.get_num_threads()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", quick_first(NAMES, STEADY))
def test_the_right_fault_comes_first(name):
    kind = load(name).KIND
    found = undisturbed(lambda: explain(name), lambda found: found.findings and found.findings[0].kind == kind)
    assert found.findings and found.findings[0].kind == kind, str(found)
    assert sum(found.split.parts.values()) == pytest.approx(found.split.wall, rel=1e-6)
    assert found.split.share("unexplained") < 0.05


def test_there_are_enough():
    assert len(NAMES) >= 15 and len({load(name).KIND for name in NAMES}) >= 15


def test_a_healthy_program_gets_no_finding():
    torch.set_num_threads(1)
    healthy()

    def explained():
        with Explain(ceilings(), cores=1) as run:
            healthy()
        return run.result

    def is_healthy(found):
        large = [each for each in found.findings if each.share > 0.05]
        return not large and found.split.share("floor") + found.split.share("inefficiency") > 0.8

    found = undisturbed(explained, is_healthy)
    assert is_healthy(found), str(found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_NAMES)
def test_the_right_fault_comes_first_on_a_gpu(name):
    limits = machine_ceilings()
    torch._C._cuda_clearCublasWorkspaces()  # one in a block of memory keeps the allocator from freeing that
    torch.cuda.empty_cache()
    found = explain(name, limits, "cuda")
    assert found.findings and found.findings[0].kind == load(name, "cuda").KIND, str(found)
    assert found.split.on_gpu == (name not in COPY_ONLY) and found.split.share("unexplained") < 0.05
