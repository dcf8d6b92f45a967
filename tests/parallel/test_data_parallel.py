"""Training on two ranks takes the steps of one rank: replicas, shards, checkpoints."""

import pytest
import torch
from training_runs import tiny_run

from transect.train import checkpoint
from transect.train.follow import JOB, Run

torch.set_num_threads(1)
STEPS = 50


def curve(pair, config, found=None):
    """Losses and norms of a run, spread where it asks for ranks; and its last checkpoint."""
    run = Run(config.to_dict(), None if found is None else found.path)
    if config.parallel.data > 1:
        pair.call(JOB, run)
    log = []

    class Listener:
        def step(self, record):
            log.append((record.loss, record.gradient_norm))

        def evaluation(self, record):
            log.append(record.loss)

    path = run.trainer(pair.world if config.parallel.data > 1 else None).run([Listener()])
    return log, checkpoint.newest(path)


def tensors_of(found):
    """Weights and optimizer state by name."""
    from safetensors.torch import load_file

    return {**found.tensors, **load_file(found.path / "model.safetensors")}


def spread(tmp_path, zero, run="spread", **changes):
    return tiny_run(tmp_path, run_dir=str(tmp_path / run), parallel={"data": 2, "zero": zero}, **changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one rank to compare with."""
    tmp_path = tmp_path_factory.mktemp("alone")
    config = tiny_run(tmp_path, steps=STEPS, accumulate=4, eval_every=25, data={"seq_len": 32, "micro_batch": 64})
    return tmp_path, *curve(None, config)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_fifty_steps_are_those_of_one_rank(pair, alone, zero):
    tmp_path, losses, found = alone
    config = spread(
        tmp_path, zero, f"zero{zero}", steps=STEPS, accumulate=4, eval_every=25, data={"seq_len": 32, "micro_batch": 64}
    )
    mine, theirs = curve(pair, config)
    torch.testing.assert_close(
        torch.tensor([x[0] for x in mine]), torch.tensor([x[0] for x in losses]), rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        torch.tensor([x[1] for x in mine]), torch.tensor([x[1] for x in losses]), rtol=1e-3, atol=0
    )
    one, two = tensors_of(found), tensors_of(theirs)
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-5)
