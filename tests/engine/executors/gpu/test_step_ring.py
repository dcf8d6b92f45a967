"""Turns of the ring on the host and on the device, with steps that break off."""

import pytest
import torch
from gpu_engine import TINY

pytest.importorskip("triton")

from transect.engine.executors.gpu.runner import GPURunner
from transect.engine.executors.gpu.step_ring import RING, StepRing, whole_lines
from transect.engine.scheduling.batch import Draw, ScheduledBatch, ScheduledRow
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.models.decoder import Decoder
from transect.ops.lang.jit import INTERPRETED
from transect.ops.opset import resolve_ops

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
RESULTS = whole_lines(100)


@pytest.mark.parametrize("kernels", [False, True])
def test_inputs_arrive_and_results_come_back_in_turn(kernels):
    arena = torch.zeros(RESULTS + whole_lines(300), dtype=torch.uint8, device=DEVICE)
    ring = StepRing(arena, RESULTS, kernels=kernels)
    stream = torch.cuda.current_stream() if DEVICE.type == "cuda" else None
    found = []
    for number in range(3 * RING):
        ring.memory().memory[:300] = number
        ring.send(300)
        ring.take(300)
        arena[:RESULTS] = arena[RESULTS] + 100
        ring.give()
        found.append(ring.results(ring.ended(), stream))
        if number:
            results, ready = found[number - 1]
            if ready is not None:
                ready.synchronize()
            assert (results == 99 + number).all()


@pytest.mark.parametrize("after", [False, True])
def test_a_step_that_breaks_off_leaves_the_ring_in_step(after, monkeypatch):
    """What follows reads its own inputs, whether the device was done with the step (no memory for its graph) or not."""
    torch.set_num_threads(1)
    model = Decoder(TINY, DEVICE, torch.float32, ops=resolve_ops(DEVICE)).requires_grad_(False)
    model.init_weights(0.3, torch.Generator(DEVICE).manual_seed(0))
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 16}

    def tokens(breaks_off):
        caches = model.new_kv_cache(5, 4, torch.float32)
        for cache in caches:
            cache.zero_()
        runner = GPURunner(model, *caches, **limits, graphs=False, copy_kernels=True)
        output, found = [], []
        for number in range(5):
            if breaks_off and number in (1, 3):
                with monkeypatch.context() as patch:
                    step = runner._step if after else lambda plan, waits: runner._ring.take(plan.layout.nbytes)
                    patch.setattr(runner, "_step", lambda *args, step=step: [step(*args), int("no memory")])
                    with pytest.raises(ValueError, match="no memory"):
                        runner.submit(_batch(number, output))
            found.append(runner.submit(_batch(number, output)).result().tokens[0])
            output.append(found[-1])
        return found

    expected = tokens(False)
    assert len(set(expected)) > 1
    assert tokens(True) == expected


def _batch(number: int, output: list[int]) -> ScheduledBatch:
    """A step of one sequence: its prompt, then one token after another."""
    prompt, params = (7, 3, 5), SamplingParams(temperature=0.0)
    start, count = (len(prompt) + number - 1, 1) if number else (0, len(prompt))
    draw = Draw(0, 0, 0, params, prompt, output)
    return ScheduledBatch(number, (ScheduledRow(0, start, count, prompt, output, [0, 1, 2, 3], (draw,)),))
