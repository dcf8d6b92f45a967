"""Masks of grammars on their way to the device."""

from contextlib import nullcontext

import torch

from transect.engine.executors.gpu.mask_table import MaskTable


class Fake:
    """A stream or an event that writes down what it is asked."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def synchronize(self):
        self.log.append(f"host waits for {self.name}")

    def record(self, stream):
        self.log.append(f"{stream.name} records {self.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, stream):
        self.log.append(f"{self.name} waits for {stream.name}")


def test_masks_of_a_step_wait_until_the_draws_before_are_done_with_theirs(monkeypatch):
    """Steps of a pipeline are handed over before the draws of those before them have begun."""
    log, made = [], []

    def fill(constraints, words):
        log.append(f"masks {len(made)}")
        made.append(words)
        words[:] = len(made)
        return [None] * len(constraints)

    table = MaskTable(64, 4, torch.device("cpu"), fill, steps=2)
    table._stream, table._used = Fake("copies", log), Fake("draws done", log)
    table._copied = [Fake(f"copied {turn}", log) for turn in range(2)]
    steps = Fake("steps", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: steps)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for _ in range(3):
        assert table.send([object()] * 2) == [None, None]
        table.used()
    copied = ["copies waits for draws done", "copies records copied 0", "steps waits for copies"]
    after = ["steps records draws done"]
    assert log[:2] == ["host waits for copied 0", "masks 0"]
    assert log[2:7] == ["copies waits for steps", *copied, *after]
    assert log[7:9] == ["host waits for copied 1", "masks 1"]
    assert log[13:15] == ["host waits for copied 0", "masks 2"]
    assert made[1].tolist() == [[2, 2]] * 2, "what is on its way is not written over"
    assert made[0].tolist() == [[3, 3]] * 2 and table.words.tolist() == [[3, 3]] * 2 + [[0, 0]] * 2
