"""Matrices that come in tiles: the steps of a run that has whole layers, in less memory."""

import pytest
import torch
from allocated import shape_of, watched
from parallel_runs import curve, same_runs
from training_runs import tiny_run

from transect.train.loop.follow import RunArguments
from transect.train.loop.trainer import Trainer

torch.set_num_threads(1)


@pytest.mark.parametrize(
    "parallel",
    [{"data": 2, "zero": 3}, {"offload": "all"}, {"data": 2, "zero": 3, "offload": "all", "offload_path": "disk"}],
    ids=["two ranks", "host", "two ranks, disk"],
)
def test_steps_are_those_of_whole_layers(pair, tmp_path, parallel):
    """Three tiles do not come out even; with ``full`` each is brought three times."""
    if "offload_path" in parallel:
        parallel = parallel | {"offload_path": str(tmp_path / "disk")}
    how = {"steps": 3, "accumulate": 4, "checkpointing": "full"}
    how["data"] = {"seq_len": 32, "micro_batch": 64}
    one = curve(None, tiny_run(tmp_path, **how))
    parallel = parallel | {"tiles": 3}
    same_runs(one, curve(pair, tiny_run(tmp_path, run_dir=str(tmp_path / "tiles"), parallel=parallel, **how)))


def test_less_memory_is_needed_and_predicted(tmp_path):
    """A layer of 3.5 MB; 64 tokens."""
    model, peaks = shape_of(tmp_path), {}
    for tiles in (1, 8):
        config = tiny_run(
            tmp_path, model=model, load_format="dummy", steps=2, threads=1, checkpointing="full",
            data={"seq_len": 64, "micro_batch": 64}, run_dir=str(tmp_path / f"tiles{tiles}"),
            parallel={"offload": "all", "offload_path": str(tmp_path / "disk"), "tiles": tiles},
        )  # fmt: skip
        made = RunArguments(config.to_dict()).trainer(None)
        measured = watched(made)
        made.run()
        phases = made.memory.estimate.phases
        peaks[tiles] = max(p.bytes for p in phases if p.name not in ("checkpoint", "cutting")), measured[0]
    assert peaks[8][0] == pytest.approx(peaks[8][1], rel=0.10)
    assert max(peaks[8]) < 0.4 * min(peaks[1]), peaks


def test_what_cannot_be_tiled_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"set parallel\.zero to 3 or parallel\.offload"):
        Trainer(tiny_run(tmp_path, parallel={"tiles": 2}))
