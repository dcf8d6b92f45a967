"""Compare the predicted step times of a run on several devices with the measured ones."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..costs.machine import Machine
    from ..costs.training import TrainingStep
    from ..train.loop.samples import SampleRecord
    from ..train.loop.trainer import EvalRecord, StepRecord, Trainer

WARM_UP = 2
"""Steps at the start that are not counted."""
CPU_LINK, CPU_LATENCY = 2e9, 1e-3
"""Bandwidth (bytes/s) and latency (s) assumed for gloo over a host's loopback."""


class RunPace:
    """Records the step times of a run."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.peak = 0

    def step(self, record: StepRecord) -> None:
        """Keep a step."""
        self.seconds.append(record.seconds)
        self.peak = record.peak_bytes

    def evaluation(self, record: EvalRecord) -> None:
        """Ignore an evaluation."""

    def sample(self, record: SampleRecord) -> None:
        """Ignore a sample."""

    @property
    def median(self) -> float | None:
        """Median seconds of a step; None before there are enough steps."""
        counted = self.seconds[WARM_UP:]
        return statistics.median(counted) if counted else None


def compared(trainer: Trainer, pace: RunPace) -> str | None:
    """Compare predicted with measured step times of a run on several ranks or with host offload; None for other
    runs."""
    parallel = trainer.config.parallel
    if (parallel.layout.size == 1 and parallel.offload == "none") or pace.median is None:
        return None
    from ..costs.units import gib

    expected = prediction(trainer.config, trainer.trainable.source.config, trainer.device, trainer.memory)
    off = expected.seconds / pace.median - 1
    found = f"predicted {expected}; measured {1e3 * pace.median:.1f} ms, the prediction is {off:+.0%} off"
    if pace.peak:
        peak = trainer.memory.estimate.peak
        found += f"; memory of a rank predicted {gib(peak)}, measured {gib(pace.peak)}"
    return found


def prediction(config: Any, model: Any, device: Any, fitted: Any = None) -> TrainingStep:
    """Predict the step of a configuration on this machine; ``fitted``: the trainer's choices."""
    from dataclasses import replace

    from ..costs.training import predict
    from ..train.loop.memory import plan_of, spread_of

    plan = plan_of(config, model, device)
    if fitted is not None:
        plan = replace(plan, checkpointing=fitted.checkpointing, whole=fitted.whole)
    return predict(model, plan, spread_of(config, device), machine_here(device.type, config.parallel.layout.size))


def machine_here(kind: str, ranks: int) -> Machine:
    """Describe this machine: its measured ceilings, and the links of the preset with its name."""
    from dataclasses import replace

    from ..costs.machine import Machine, Shares
    from ..costs.presets import detected
    from ..hardware.device import detect
    from ..ops.cpu.ceilings import device_measurement

    device = detect(kind)
    ceilings = device_measurement(device).ceilings
    if kind == "cpu":  # the ranks share its cores and its memory
        rates = {dtype: rate / ranks for dtype, rate in ceilings.flops_per_second.items()}
        shared = replace(
            ceilings,
            flops_per_second=rates,
            copy_bytes_per_second=ceilings.copy_bytes_per_second / ranks,
            host_to_device_bytes_per_second=ceilings.copy_bytes_per_second / ranks,
        )
        return Machine(
            ceilings=shared, memory_bytes=device.memory_bytes, link_bytes_per_second=CPU_LINK, latency=CPU_LATENCY,
            host_memory_bytes_per_second=ceilings.copy_bytes_per_second, shares=Shares(link=1.0, hidden=1.0),
        )  # fmt: skip
    if (preset := detected(device.name)) is not None:
        return Machine.of(preset, ceilings)
    return Machine(
        ceilings=ceilings, memory_bytes=device.memory_bytes,
        link_bytes_per_second=ceilings.host_to_device_bytes_per_second or CPU_LINK,
    )  # fmt: skip
