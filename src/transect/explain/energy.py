"""Energy of an explained run: processor and GPU, as far as the machine counts them, with CO2e."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

from ..bench.energy import EnergyMeter, Nvml
from ..bench.rapl import Rapl, footprint


class Energies:
    """Measures the energy inside of ``with``.

    Args:
        wanted: False measures nothing.
        grams_per_kwh: CO2e of the grid.

    Raises:
        ValueError: neither processor nor GPU has a counter that can be read.
    """

    def __init__(self, wanted: bool, grams_per_kwh: float) -> None:
        self.grams_per_kwh = grams_per_kwh
        self.facts: dict[str, Any] = {}
        self.lines: list[str] = []
        self._meters: dict[str, EnergyMeter] = {}
        refused = []
        for name, source in (("processor", Rapl), ("GPU", Nvml)) if wanted else ():
            try:
                found: Any = source()
            except ValueError as error:
                refused.append(str(error))
                continue
            devices = tuple(found.devices) if isinstance(found, Rapl) else (0,)
            self._meters[name] = EnergyMeter(found, devices)
        if wanted and not self._meters:
            raise ValueError("; ".join(refused))

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        for meter in self._meters.values():
            self._stack.enter_context(meter)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        for name, meter in self._meters.items():
            if meter.result is None:
                continue
            joules = meter.result.joules
            found = footprint(joules, self.grams_per_kwh)
            self.facts[f"{name}_joules"] = joules
            self.facts[f"{name}_grams_co2e"] = found["grams_co2e"]
            watts = joules / meter.result.seconds
            self.lines.append(
                f"energy of the {name}, whoever used it: {joules:.1f} J ({watts:.1f} W), {found['kwh']:.2e} kWh, "
                f"{found['grams_co2e']:.2e} g CO2e at {self.grams_per_kwh:g} g/kWh"
            )
