"""Runs on several ranks, and what is compared of them."""

import torch
from effort import proving
from safetensors.torch import load_file

from transect.train.loop import checkpoint
from transect.train.loop.follow import JOB, RunArguments

STEPS = 50 if proving() else 8
"""So many are compared with those of one rank."""


def curve(pair, config, found=None, each=None):
    """Losses and norms of a run, spread where it asks for ranks; and its last checkpoint. ``each`` gets the records of
    its steps."""
    run = RunArguments(config.to_dict(), None if found is None else found.path)
    spread = config.parallel.layout.size > 1
    if spread:
        pair.call(JOB, run)
    log = []

    class Listener:
        def step(self, record):
            log.append((record.loss, record.gradient_norm))
            if each is not None:
                each.append(record)

        def evaluation(self, record):
            log.append((record.loss, 0.0))

    path = run.trainer(pair.world if spread else None).run([Listener()])
    return log, checkpoint.newest(path)


def tensors_of(found):
    """Weights and optimizer state by name."""
    return {**found.tensors, **load_file(found.path / "model.safetensors")}


def same_runs(one, two):
    """Two results of ``curve`` agree: losses, norms, weights, the optimizer's state."""
    same_curves(one[0], two[0])
    here, there = tensors_of(one[1]), tensors_of(two[1])
    assert here.keys() == there.keys()
    for name in here:
        torch.testing.assert_close(here[name], there[name], rtol=1e-3, atol=1e-5)


def same_curves(mine, theirs):
    """Losses and norms agree."""
    assert len(mine) == len(theirs)
    for column, tolerance in ((0, {"rtol": 0, "atol": 1e-5}), (1, {"rtol": 1e-3, "atol": 1e-6})):
        ours, ones = (torch.tensor([record[column] for record in log]) for log in (mine, theirs))
        torch.testing.assert_close(ours, ones, **tolerance)
