"""Collectives: bandwidths by their definitions, sizes, and results that are looked at. Rows of real ranks are in
``tests/parallel/test_collectives.py``."""

import pytest
from commands import run_here

from transect.bench.collectives import Sweep, bus_factor, sizes_between


def test_bandwidths_are_those_of_nccl_tests():
    assert [bus_factor("all_reduce", n) for n in (2, 4)] == [1.0, 1.5]
    assert [bus_factor(name, 4) for name in ("all_gather", "reduce_scatter", "all_to_all")] == [0.75] * 3
    assert bus_factor("send_recv", 8) == 1.0


def test_sizes():
    assert sizes_between(8, 1024, 8) == (8, 64, 512, 1024)  # the largest that is asked for is measured
    with pytest.raises(ValueError, match="cannot be listed"):
        sizes_between(64, 8, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["all_recude"], "there is no collective 'all_recude'"),
        (["--dtype", "int3"], "dtype must be one of float32"),
        (["--max-bytes", "4"], "cannot be listed"),
        (["--device", "tpu"], "--device must be auto, cpu or cuda"),
        (["all_reduce_ours", "--device", "cpu"], "all_reduce_ours is between GPUs"),
        (["--device", "cuda", "--ranks", "99"], "99 ranks from GPU 0 on need 99 GPUs"),
    ],
)
def test_what_cannot_be_measured_is_said_before_ranks_start(options, words):
    done = run_here("bench", "collectives", *options)
    assert done.returncode == 2 and words in done.stderr


def test_plans_know_their_collectives():
    assert Sweep(("all_reduce",), (8,)).dtype == "float32"
