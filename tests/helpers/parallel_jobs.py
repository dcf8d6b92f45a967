"""Jobs that tests have the other rank do: the counterparts of what the test does itself."""

import contextlib

import torch

from transect.bench import collectives as collectives_of_bench
from transect.parallel.layout import Layout
from transect.parallel.mesh import Mesh
from transect.parallel.world import Failure


def collectives(world, given):
    mesh = Mesh(world, Layout(tensor=2))
    group = mesh.tensor
    group.all_reduce(torch.tensor([10.0, 10.0]))
    group.all_gather(torch.arange(10, 13))
    group.reduce_scatter(torch.arange(10, 14))
    group.all_to_all(torch.arange(10, 14))
    got = group.receive(torch.tensor([0]), 0)
    group.send(got + 1, 0).wait()
    world.exchange(given["long"])
    for shown in (lambda: world.agree({"the seed": 2}), lambda: world.exchange(Failure("turn it off", user=True))):
        with contextlib.suppress(ValueError):
            shown()


def fail(world, given):
    raise RuntimeError("on purpose")


def measure_with_other_numbers(world, plan):
    """This rank sends what nobody expects."""
    numbers = collectives_of_bench._numbers
    collectives_of_bench._numbers = lambda *arguments: numbers(*arguments) + 1
    try:
        collectives_of_bench.measure(world, plan)
    finally:
        collectives_of_bench._numbers = numbers
