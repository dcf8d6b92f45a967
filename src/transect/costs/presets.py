"""Data sheets of devices, for planning with machines that you do not have. Nothing here is measured.

A preset is one file in ``devices/``; its name is the name of the preset: the card as sold. ``preset`` also reads a file
of the same form from any other place. Peaks are those of dense matrix products (no sparsity) with float32 sums.
Bandwidth is that of the memory, or of one direction of a link. Memory is the total that the driver lists: an "80 GB"
card has 79.6 GiB, not 80e9 bytes.

No program reaches these figures: on an H200 a copy gets about 89% of 4.8 TB/s, and a large product about 75% of 989
TFLOP/s. ``Preset.ceilings`` takes such shares. By default they are 1, and a floor is then a bound from the data sheet.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import msgspec

from .ceilings import Ceilings
from .units import parse_bytes

FOLDER = Path(__file__).parent / "devices"

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One device as its maker describes it.

    Attributes:
        name: name in commands: the card as sold, in small letters with dashes.
        device: full name.
        memory_bytes: capacity, as the driver lists it.
        bytes_per_second: bandwidth of its memory.
        flops_per_second: dense matrix products, by dtype name.
        host_bytes_per_second: one direction of the link to the host; 0 for a processor.
        peer_bytes_per_second: one direction, all links to other devices together; 0 if it has none.
        units: multiprocessors, or cores.
        watts: most power of the board; 0 if not known.
        source: origin of the figures.
        also: other names for commands.
        detected: names that the driver gives this device.
    """

    name: str
    device: str
    memory_bytes: int
    bytes_per_second: Positive
    flops_per_second: Mapping[str, Positive]
    host_bytes_per_second: NotNegative
    peer_bytes_per_second: NotNegative
    units: Annotated[int, msgspec.Meta(gt=0)]
    source: str
    watts: NotNegative = 0
    also: tuple[str, ...] = ()
    detected: tuple[str, ...] = ()

    @property
    def processor(self) -> bool:
        """True for a CPU: no link leads from the host to it."""
        return not self.host_bytes_per_second

    def ceilings(self, bandwidth_share: float = 1.0, matmul_share: float = 1.0) -> Ceilings:
        """Return the ceilings to plan with: each peak times the share of it that programs reach.

        Raises:
            ValueError: a share is not above 0 and at most 1.
        """
        if not (0 < bandwidth_share <= 1 and 0 < matmul_share <= 1):
            raise ValueError(f"shares must be above 0 and at most 1, not {bandwidth_share} and {matmul_share}")
        memory = self.bytes_per_second * bandwidth_share
        link = self.host_bytes_per_second * bandwidth_share or None
        return Ceilings(
            self.device,
            memory,
            memory,
            {dtype: rate * matmul_share for dtype, rate in self.flops_per_second.items()},
            host_to_device_bytes_per_second=link,
            device_to_host_bytes_per_second=link,
            memory_bytes=self.memory_bytes,
        )


def read_preset(file: Path) -> Preset:
    """Read the preset of one file; the name of the file is its name.

    Raises:
        ValueError: the file cannot be read, or a figure is missing, unknown or no number; the message names it.
    """
    try:
        found = tomllib.loads(file.read_text())
        memory = parse_bytes(str(found.pop("memory", "")))
        if unknown := sorted(set(found) - {field.name for field in fields(Preset)}):
            raise ValueError(f"unknown {', '.join(unknown)}; {FOLDER.name}/h200.toml shows what a preset has")
        return msgspec.convert({**found, "name": file.stem, "memory_bytes": memory}, Preset)
    except (OSError, ValueError) as error:  # of TOML, of its encoding and of msgspec too
        raise ValueError(f"cannot read the preset {file}: {error}") from error


PRESETS: Mapping[str, Preset] = {file.stem: read_preset(file) for file in sorted(FOLDER.glob("*.toml"))}


def preset(name: str) -> Preset:
    """Find a device by the name of its preset, by another name that its file lists, or by the beginning of one name.

    The beginning ends at a dash: an H20 is not an H200. Letters may be capitals, and spaces stand for dashes. A
    ``name`` that ends in ``.toml`` is a file in the form of those in ``devices/``.

    Raises:
        ValueError: no device has this name, or the names of several begin with it.
    """
    if name.endswith(".toml"):
        return read_preset(Path(name))
    wanted = name.strip().lower().replace(" ", "-").replace("_", "-")
    for each in PRESETS.values():
        if wanted in (each.name, *each.also):
            return each
    found = [each for each in PRESETS if f"{each}-".startswith(f"{wanted}-")]
    if len(found) != 1:
        what = f"{name!r} is the beginning of {', '.join(found)}" if found else f"no preset {name!r}"
        raise ValueError(f"{what}; there are: {', '.join(PRESETS)}, or a file NAME.toml like theirs")
    return PRESETS[found[0]]


def detected(name: str) -> Preset | None:
    """Find the preset of the device that its driver calls ``name``; None if there is none."""
    return next((each for each in PRESETS.values() if name in each.detected), None)
