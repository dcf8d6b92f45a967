"""A profile: measurements of one server (``transect plan calibrate``), by which loads on it are simulated.

It holds the limits of the scheduler, step times fitted on one synthetic sweep, and the seconds that requests and tokens
spend outside of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from ..costs.fitting import FittedSteps
from ..costs.floors import ALONE, Rates
from ..costs.presets import Preset, detected
from ..costs.serving import IDEAL, ServingSteps
from ..costs.steps import StepLoad
from ..costs.storage import Storage
from ..costs.warmth import Slowdown
from ..engine.scheduling.batch import ScheduledBatch
from ..engine.scheduling.decisions import Header
from ..engine.scheduling.scheduler_config import SchedulerConfig
from ..explain.engine.work import padding_of
from ..spec.layouts.ranks import RankLayout
from ..spec.model import ModelConfig
from .fleet import EngineModel

FORMAT = 1


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A measured server. Times are seconds.

    Attributes:
        header: of the decision log of the sweep: scheduler, model, formats, device.
        bytes_per_second, flops_per_second: rates of the floors; 0 if not known.
        steps: ``FittedSteps`` as plain values.
        errors: relative errors of step times, of a fit on the first half of the sweep on the second.
        intake: from sending a request until an idle engine has it. outlet: from a token until the client has it.
        measured: numbers of steps and requests, and seconds of the sweep. environment: machine and versions.
        outlets, jitter: see ``EngineModel``. warming: ``Slowdown`` as plain values, empty if there is none.
        learned: see ``EngineModel``; empty if steps are not sized by time.
    """

    format: int
    model: str
    header: dict[str, Any]
    bytes_per_second: float
    flops_per_second: float
    steps: dict[str, Any]
    errors: dict[str, float]
    intake: float
    outlet: float
    measured: dict[str, float]
    environment: dict[str, Any]
    outlets: list[tuple[float, float]] = []
    jitter: list[tuple[float, list[float]]] = []
    warming: dict[str, float] = {}
    learned: dict[str, Any] = {}

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a profile.

        Raises:
            ValueError: the file cannot be read, or is none.
        """
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise ValueError(f"{path} is not a profile ({error}): make one with `transect plan calibrate`") from None
        if found.format != FORMAT:
            raise ValueError(f"{path} has format {found.format}, not {FORMAT}: calibrate again")
        return found

    def write(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @property
    def times(self) -> MeasuredSteps:
        """Step times of the server."""
        known, header = self.steps, msgspec.convert(self.header, Header)
        knots = tuple(known["decode_knots"]), tuple(known["mixed_knots"])
        fitted = FittedSteps(*knots, tuple(known["coefficients"]), known["host_seconds"])
        return MeasuredSteps(fitted, Loads(header, self.bytes_per_second, self.flops_per_second))

    @property
    def engine(self) -> EngineModel:
        """Server as a simulation uses it, with a queue without limits: a search for the highest rate overloads it."""
        header, times = msgspec.convert(self.header, Header), self.times
        endless = {"max_queue": None, "max_queue_bytes": None, "max_queue_wait": None}
        limits = SchedulerConfig(**header.scheduler | endless | {"seed": 0})
        return EngineModel(
            scheduler=limits, seconds=times, by_load=times.seconds, lag=header.lag, host=times.fitted.host,
            intake=self.intake, outlet=self.outlet, outlets=tuple(self.outlets),
            jitter=tuple((rows, tuple(deviations)) for rows, deviations in self.jitter),
            warming=Slowdown(**self.warming) if self.warming else None, learned=self.learned or None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Fitted step times with the work that they are functions of."""

    fitted: FittedSteps
    loads: Loads

    def __call__(self, batch: ScheduledBatch) -> float:
        return self.fitted.seconds(self.loads.of([(row.start, row.num_tokens) for row in batch.rows]))

    def seconds(self, load: StepLoad) -> float:
        """Predict the time of a step, without the host's."""
        return self.fitted.seconds(self.loads.completed(load))

    def parts(self, load: StepLoad) -> dict[str, float]:
        """Split the time of a step into its floor, if that is known, and the rest."""
        whole, floor = self.seconds(load), self.loads.completed(load).floor
        return {"floor": min(floor, whole), "above the floor": max(0.0, whole - floor), "host": self.fitted.host}


@dataclass(frozen=True, slots=True)
class MeasuredChoice:
    """One measured server, used like a ``CardChoice``."""

    profile: Profile
    steps: MeasuredSteps
    engine: EngineModel
    card: Preset
    layout: RankLayout = ALONE
    cache: str = "as measured"

    @classmethod
    def of(cls, profile: Profile) -> MeasuredChoice:
        """Build the choice of a profile; the device is named as its driver does, or as its preset."""
        device = profile.header["device"]
        name = str(device.get("name", "a device"))
        card = detected(name) or Preset(
            name=name, device=name, memory_bytes=0, bytes_per_second=profile.bytes_per_second or 1.0,
            flops_per_second={}, host_bytes_per_second=0, peer_bytes_per_second=0, units=1, source="measured",
        )  # fmt: skip
        return cls(profile, profile.times, profile.engine, card)

    @property
    def cards(self) -> int:
        """Devices of one engine."""
        return 1

    @property
    def weights(self) -> str:
        """Format of the weights."""
        return f"{self.profile.header['storage'].get('linear', 0):g} bits"

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.engine.scheduler.num_blocks * self.engine.scheduler.block_size

    @property
    def how(self) -> str:
        """Formats in words."""
        return f"measured, {self.weights} a weight"

    def __str__(self) -> str:
        return f"1 x {self.card.name}, {self.how}"


class Loads:
    """The work of steps with padding and floors, from the header of a decision log; floors are 0 without rates."""

    def __init__(self, header: Header, bytes_per_second: float, flops_per_second: float) -> None:
        self._padding = padding_of(header)
        self._floors: ServingSteps | None = None
        if header.model and bytes_per_second and flops_per_second:
            model = ModelConfig(**_known(ModelConfig, header.model))
            storage = Storage(**_known(Storage, header.storage))
            self._floors = ServingSteps(model, Rates(bytes_per_second, flops_per_second), IDEAL, storage)

    def of(self, rows: Sequence[tuple[int, int]]) -> StepLoad:
        """Count the work of rows of (first position, tokens)."""
        load = StepLoad.of(rows)
        if self._padding is not None and load.chunks:
            longest = max(start + count for start, count in rows)
            load = load._replace(padded=self._padding.tokens(load.tokens, load.rows, load.chunks, longest))
        return self.completed(load)

    def completed(self, load: StepLoad) -> StepLoad:
        """Add the padding of a step that only decodes, and the floor."""
        if self._padding is not None and not load.chunks:
            load = load._replace(padded=self._padding.decodes(load.rows))
        return load if self._floors is None else load._replace(floor=self._floors.seconds(load))


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``kind`` among ``values``, with lists converted to tuples."""
    names = {field.name for field in fields(kind)}
    return {name: _tuples(value) for name, value in values.items() if name in names}


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
