"""``torch.compile`` with Inductor in its best setting: ``max-autotune``, static shapes; on a CPU with frozen weights,
on a GPU with CUDA graphs."""

from __future__ import annotations

import functools

import torch
import torch._inductor.config as settings

from benchmarks.compilers.operators import Arrays, Work
from benchmarks.peers.peer import Prepared
from benchmarks.peers.torch_eager import Rung, Torch


class Inductor(Torch):
    """Compiled modules of ``torch_eager.py``."""

    def __init__(self, device: str, threads: int, tuning: int) -> None:
        super().__init__(device, threads, tuning)
        settings.freezing = device == "cpu"  # on a GPU inputs at fixed addresses would be folded as weights are
        settings.compile_threads = threads
        settings.cpp.enable_kernel_profile = False

    def prepare(self, work: Work, weights: Arrays, data: list[Arrays]) -> Prepared:
        torch._dynamo.reset()
        rung = Rung(work, self.tensors(weights, work), self.constants(work)).eval()
        compiled = torch.compile(rung, mode="max-autotune", fullgraph=True, dynamic=False)
        own = [self.tensors(each, work) for each in data]
        if self.device == "cuda":  # a graph reads its inputs where they were when it was captured
            for each in own:
                for tensor in each.values():
                    torch._dynamo.mark_static_address(tensor)
        return self.prepared(functools.partial(_begin_step, compiled, self.device == "cuda"), own)


def _begin_step(compiled, graphs, **data):  # type: ignore[no-untyped-def]
    if graphs:
        torch.compiler.cudagraph_mark_step_begin()
    return compiled(**data)


COMPILER = Inductor
