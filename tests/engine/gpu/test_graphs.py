"""Captures of CUDA graphs: what must not happen in their midst."""

import gc

import pytest
import torch

from transect.engine.gpu.graphs import GraphCache, without_collector


class Cycle:
    """Goes only when the collector comes."""

    def __init__(self, held: object = None) -> None:
        self.held, self.me = held, self


def test_the_collector_is_off_within_and_as_before_afterwards():
    assert gc.isenabled()
    with without_collector():
        assert not gc.isenabled()
        with without_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), without_collector():
        raise KeyError
    assert gc.isenabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_an_engine_that_is_gone_does_not_end_a_capture():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.ones(1 << 20, device="cuda")
        gone = GraphCache(stream)
        for key in range(4):
            gone.run(key, lambda: x * 2)

        def work() -> torch.Tensor:
            litter = [Cycle() for _ in range(2000)]  # each may be the one with which the collector comes
            assert litter
            return x + 1

        graphs = GraphCache(stream)
        graphs.run("warm", work)
        thresholds = gc.get_threshold()
        Cycle((gone, torch.empty(1 << 26, device="cuda")))
        del gone
        gc.set_threshold(10, 1, 1)
        try:
            graphs._capture("captured", work)
        finally:
            gc.set_threshold(*thresholds)
        x.fill_(5)
        result = graphs.run("captured", work)
        assert bool((result == 6).all())
