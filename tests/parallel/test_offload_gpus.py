"""Two GPUs whose optimizer states, or also weights, are in host memory take the steps of two that keep
everything."""

import pytest
import torch
from training_runs import tiny_run

from transect.train.loop.follow import JOB, RunArguments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def losses(gpus, tmp_path, **parallel):
    how = {"device": "cuda", "precision": "mixed", "accumulate": 4, "steps": 5, "log_to": []}
    config = tiny_run(tmp_path, run_dir=str(tmp_path / "-".join(map(str, parallel.values()))), **how, parallel=parallel)
    run = RunArguments(config.to_dict())
    gpus.call(JOB, run)
    found = []

    class Listener:
        def step(self, record):
            found.append(record.loss)

    run.trainer(gpus.world).run([Listener()])
    return found


@pytest.mark.parametrize(("zero", "offload"), [(0, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "all")])
def test_offloaded_ranks_take_the_same_steps(gpus, tmp_path, zero, offload):
    kept = losses(gpus, tmp_path, data=2, zero=zero)
    assert losses(gpus, tmp_path, data=2, zero=zero, offload=offload) == pytest.approx(kept, abs=5e-3)
