"""Remembered launches are those that Triton would have made: another kind of argument is another look-up."""

from types import SimpleNamespace

import pytest
import torch

from transect.ops.lang.launches import Launches, remember


class Function:
    """Stands for a ``triton.JITFunction``: each look-up gives a kernel of its own, and each launch is noted."""

    def __init__(self):
        self.pre_run_hooks = []
        self.params = [SimpleNamespace(name=name, default=default) for name, default in PARAMETERS]
        self.launched = []
        self.slow = 0
        self.params_of_slow = []

    def run(self, *args, grid, warmup, **kwargs):
        self.slow += 1
        kernel = f"kernel {self.slow}"

        def launch(x, y, z, stream, function, metadata, given, entered, left, *values):
            assert (given, entered, left) == (None, None, None)
            self.launched.append((kernel, (x, y, z), stream, function, metadata, values))

        if warmup:
            return None
        values = [*args, *(kwargs.get(each.name, each.default) for each in self.params[len(args) :])]
        sizes = (*grid, 1, 1)[:3] if isinstance(grid, tuple) else grid({})
        self.launched.append((kernel, sizes, 5, 77, "packed", tuple(values)))
        return SimpleNamespace(run=launch, function=77, packed_metadata="packed")


PARAMETERS = (("x", None), ("n", None), ("eps", 1e-5), ("BLOCK", 128))


@pytest.fixture
def both():
    """A function, its launches, and the settings and the driver of its Triton."""
    chain = SimpleNamespace
    runtime = SimpleNamespace(launch_enter_hook=chain(calls=[]), launch_exit_hook=chain(calls=[]), jit_cache_hook=None)
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 5)
    triton = SimpleNamespace(
        knobs=SimpleNamespace(runtime=runtime),
        runtime=SimpleNamespace(driver=SimpleNamespace(active=active)),
        __version__="3.6.0",
        JITFunction=Function,
    )
    function = Function()
    return function, Launches(function, triton), triton


def test_the_second_launch_is_the_first_with_other_pointers(both):
    function, launches, _ = both
    x, y = torch.zeros(8), torch.ones(8)
    launches(x, 3, grid=(4,), warmup=False, BLOCK=64)
    launches(y, 3, grid=(4,), warmup=False, BLOCK=64)
    (kernel, *first, values), (same, *second, others) = function.launched
    assert function.slow == launches.remembered == 1 and kernel == same and first == second
    assert values[1:] == others[1:] == (3, 1e-5, 64) and values[0] is x and others[0] is y
    launches(x, n=3, grid=(4, 2), warmup=False, BLOCK=64)  # by name is a kind of its own, with its own order
    launches(x, n=3, grid=(4, 3), warmup=False, BLOCK=64)
    assert function.launched[-1][1] == (4, 3, 1) and function.launched[-1][5][1:] == (3, 1e-5, 64)
    assert launches.remembered == 2


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(8, dtype=torch.float16)},
        {"x": torch.zeros(9)[1:]},  # begins elsewhere
        {"x": None},
        {"n": 4},
        {"n": 1.0},
        {"n": True},
        {"n": "1"},
        {"BLOCK": 64},
        {"num_warps": 8},
    ],
)
def test_another_kind_is_looked_up(both, other):
    function, launches, _ = both
    given = {"x": torch.zeros(8), "n": 1, "BLOCK": 128}
    launches(**given, grid=(1,), warmup=False)
    launches(**(given | other), grid=(1,), warmup=False)
    assert function.slow == 2 and not launches.remembered
    launches(**given, grid=(1,), warmup=False)
    assert function.slow == 2 and function.launched[-1][0] == "kernel 1"


def test_another_device_is_looked_up(both):
    function, launches, triton = both
    launches(torch.zeros(8), 1, grid=(1,), warmup=False)
    triton.runtime.driver.active.get_current_device = lambda: 1
    launches(torch.zeros(8), 1, grid=(1,), warmup=False)
    assert function.slow == 2


def test_whatever_watches_or_is_unknown_goes_tritons_way(both):
    function, launches, triton = both
    x = torch.zeros(8)
    launches(x, 1, grid=(1,), warmup=False)
    settings = triton.knobs.runtime
    launches(x, 1, grid=(1,), warmup=True)
    launches(x, 1, grid=lambda values: (1, 1, 1), warmup=False)
    launches(x, object(), grid=(1,), warmup=False)
    for chain in (settings.launch_enter_hook, settings.launch_exit_hook):
        chain.calls.append(print)
        launches(x, 1, grid=(1,), warmup=False)
        chain.calls.clear()
    settings.jit_cache_hook = print  # somebody collects kernels
    launches(x, 1, grid=(1,), warmup=False)
    settings.jit_cache_hook = None
    function.pre_run_hooks.append(print)
    launches(x, 1, grid=(1,), warmup=False)
    assert function.slow == 8 and not launches.remembered
    function.pre_run_hooks.clear()
    launches(x, 1, grid=(1,), warmup=False)
    assert function.slow == 8 and launches.remembered == 1


def test_kinds_are_bounded(both, monkeypatch):
    _, launches, _ = both
    monkeypatch.setattr("transect.ops.lang.launches.MOST_KINDS", 3)
    for number in range(10):
        launches(torch.zeros(8), number, grid=(1,), warmup=False)
    assert len(launches._kinds) <= 3


def test_other_versions_of_triton_keep_their_own_way(both):
    function, _, triton = both
    assert isinstance(remember(function, triton).run, Launches)
    other = Function()
    triton.__version__ = "3.7.0"
    assert not isinstance(remember(other, triton).run, Launches)
