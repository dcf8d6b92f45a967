"""Measure the energy of a GPU in joules, from NVML (the library that comes with NVIDIA's driver).

From Volta on, NVML counts energy itself. Where a device has no such counter, a thread samples its power and integrates
it. The counter moves in steps of some tens of milliseconds, so measure for seconds. It counts the energy of the whole
board, for all processes.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

SAMPLE_S = 0.05
NO_LIBRARY = "energy cannot be measured: NVML is not on this machine (libnvidia-ml.so.1, part of NVIDIA's driver)"
_NOT_SUPPORTED = 3
_MULTIPROCESSORS = 1


class PowerSource(Protocol):
    """The part of NVML that is used here."""

    def energy_joules(self, device: int) -> float | None:
        """Return a counter that only rises; None if the device has none."""
        ...

    def watts(self, device: int) -> float:
        """Return the present power in watts."""
        ...


class Nvml:
    """NVML by ctypes. Devices are numbered as ``nvidia-smi`` numbers them.

    Raises:
        ValueError: there is no NVML or no such device; the message says so.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            raise ValueError(NO_LIBRARY) from None
        self._call("nvmlInit_v2")

    def energy_joules(self, device: int) -> float | None:
        """Return the joules since the driver was loaded; None if the device has no counter."""
        counter = ctypes.c_ulonglong()
        code = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle(device), ctypes.byref(counter))
        if code == _NOT_SUPPORTED:
            return None
        self._check("nvmlDeviceGetTotalEnergyConsumption", code)
        return counter.value * 1e-3

    def megahertz(self, device: int) -> int:
        """Return the present clock of the multiprocessors."""
        found = ctypes.c_uint()
        self._call("nvmlDeviceGetClockInfo", self._handle(device), _MULTIPROCESSORS, ctypes.byref(found))
        return found.value

    def watts(self, device: int) -> float:
        """Return the power of the whole board in watts."""
        milliwatts = ctypes.c_uint()
        self._call("nvmlDeviceGetPowerUsage", self._handle(device), ctypes.byref(milliwatts))
        return milliwatts.value * 1e-3

    def _handle(self, device: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(device), ctypes.byref(handle))
        return handle

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    @staticmethod
    def _check(name: str, code: int) -> None:
        if code:
            raise ValueError(
                f"energy cannot be measured: {name} gave error {code}; check `nvidia-smi` and the GPU's number"
            )


@dataclass(frozen=True, slots=True)
class Energy:
    """``joules`` in ``seconds``; ``method`` is ``counter`` or ``sampled power``."""

    joules: float
    seconds: float
    method: str

    def per_token(self, input_tokens: int, output_tokens: int) -> dict[str, Any]:
        """Return joules per token and watts, for a report."""
        return {
            "joules": self.joules,
            "watts": self.joules / self.seconds,
            "joules_per_output_token": self.joules / max(1, output_tokens),
            "joules_per_token": self.joules / max(1, input_tokens + output_tokens),
            "method": self.method,
        }


class EnergyMeter:
    """Measures from ``__enter__`` to ``__exit__``; then ``result`` is set.

    Args:
        source: ``Nvml()``.
        devices: numbers of the GPUs; their energies are added.
        sample_s: between samples of power, for a device without a counter.
    """

    def __init__(self, source: PowerSource, devices: Sequence[int] = (0,), *, sample_s: float = SAMPLE_S) -> None:
        self._source, self._devices, self._sample_s = source, tuple(devices), sample_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._sampled = 0.0
        self.result: Energy | None = None

    def __enter__(self) -> Self:
        self._before = self._counters()
        self._start = self._end = time.perf_counter()
        if self._before is None:
            self._stop.clear()
            self._sampled = 0.0
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end = time.perf_counter()
        seconds = self._end - self._start
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            self.result = Energy(self._sampled, seconds, "sampled power")
            return
        after = self._counters()
        assert after is not None and self._before is not None
        self.result = Energy(after - self._before, seconds, "counter")

    def _counters(self) -> float | None:
        """Return the sum of all devices' counters; None if any device has none."""
        total = 0.0
        for device in self._devices:
            joules = self._source.energy_joules(device)
            if joules is None:
                return None
            total += joules
        return total

    def _sample(self) -> None:
        """Integrate the power by trapezoids between samples, from the start to the end, however late this thread is."""
        watts, then = self._watts(), self._start
        while True:
            stopped = self._stop.wait(self._sample_s)
            power, now = self._watts(), self._end if stopped else time.perf_counter()
            self._sampled += (watts + power) / 2 * (now - then)
            watts, then = power, now
            if stopped:
                return

    def _watts(self) -> float:
        return sum(self._source.watts(device) for device in self._devices)
