"""Measure the energy of a CPU in joules, from RAPL: the counters of Linux under ``/sys/class/powercap``.

A counter belongs to one package (socket), counts microjoules of all processes, and begins again at 0 after
``max_energy_range_uj``. It is one of the sources of ``energy.EnergyMeter``; devices are packages.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/class/powercap")
NO_COUNTER = (
    "energy cannot be measured: this machine shows no RAPL counter (/sys/class/powercap/intel-rapl:*), or only to root"
)


class Rapl:
    """The packages of this machine.

    Args:
        root: folder of the counters.

    Raises:
        ValueError: there are none, or they may not be read.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._packages = sorted(path for path in root.glob("intel-rapl:*") if path.name.count(":") == 1)
        try:
            self._last = [self._read(index) for index in range(len(self._packages))]
        except OSError:
            raise ValueError(NO_COUNTER) from None
        if not self._packages:
            raise ValueError(NO_COUNTER)
        self._turns = [0] * len(self._packages)

    @property
    def devices(self) -> range:
        """The numbers of the packages."""
        return range(len(self._packages))

    def energy_joules(self, device: int) -> float:
        """Return the joules since a fixed time; it only rises if it is read at least once in each turn of the
        counter."""
        now = self._read(device)
        if now < self._last[device]:
            self._turns[device] += int((self._packages[device] / "max_energy_range_uj").read_text())
        self._last[device] = now
        return (self._turns[device] + now) * 1e-6

    def watts(self, device: int) -> float:
        """Raise NotImplementedError: RAPL counts energy, so power is never sampled."""
        raise NotImplementedError("RAPL has counters")

    def _read(self, device: int) -> int:
        return int((self._packages[device] / "energy_uj").read_text())


def footprint(joules: float, grams_per_kwh: float) -> dict[str, float]:
    """Convert joules to kWh, and to grams of CO2e on a grid with ``grams_per_kwh``.

    Raises:
        ValueError: a negative figure of the grid.
    """
    if grams_per_kwh < 0:
        raise ValueError(f"grams of CO2e per kWh must be at least 0, got {grams_per_kwh}")
    kwh = joules / 3.6e6
    return {"kwh": kwh, "grams_co2e": kwh * grams_per_kwh}
