"""Given the step times of a recorded run, the simulated engine decides in every step what the real one decided.

Compared are rows, copies, free blocks and reasons. The runs have prefixes found in the cache, preemption, grammars,
several choices, aborts, adapters and drafts.
"""

import gzip
from pathlib import Path

import pytest
import torch
from recorded_runs import KINDS, decisions, met, recorded, save_models, simulated

from transect.explain.engine.log import load
from transect.explain.engine.replay import replay
from transect.explain.engine.simulate import acceptance_of

LOGS = sorted((Path(__file__).parent / "logs").glob("*.log.gz"))
"""Logs that ``benchmarks/plan/recorded_logs.py`` recorded."""
ALWAYS = {"grammars", "choices", "aborts"}
ALSO = {"adapters": {"preemption", "adapters"}, "drafts": {"drafts"}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


def check(log, kind):
    expected, found = decisions(log), decisions(simulated(log))
    assert len(expected) > 40
    for real, again in zip(expected, found, strict=True):
        assert real == again
    assert ALWAYS | ALSO.get(kind, {"prefixes", "preemption"}) <= met(log)  # all that the run was to meet was met
    if kind == "drafts":
        share = acceptance_of(log)
        assert share is not None and 0.0 < share < 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_simulated_engine_decides_as_the_real_one(models, tmp_path, kind):
    check(recorded(models, tmp_path / "run.log", kind), kind)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_a_simulated_engine_decides_as_one_on_a_gpu(models, tmp_path, kind):
    check(recorded(models, tmp_path / "run.log", kind, "cuda"), kind)


@pytest.mark.parametrize("file", LOGS, ids=lambda file: file.name)
def test_the_logs_of_other_machines_are_decided_again(tmp_path, file):
    copy = tmp_path / "run.log"
    copy.write_bytes(gzip.decompress(file.read_bytes()))
    log = load(copy)
    check(log, file.name.removesuffix(".log.gz").partition("-")[2])
    assert replay(log).difference is None
