"""``Machine``: ceilings of some devices and of the links between them, and the shares of both that training reaches."""

from __future__ import annotations

from dataclasses import dataclass, field

from .ceilings import Ceilings
from .presets import Preset


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the ceilings that training reaches; the rest are launches, tails of kernels and waits.

    The first three are from full training of Llama-3.2-1B and LoRA of Llama-3.1-8B on one H200, 2 x 4096 tokens a step:
    with them both steps are predicted within 5%. Those of links are from two H200s without NVLink multicast: a sum of
    128 MiB, and what the same training took longer there with data parallelism and with ZeRO 3. Kernels that expect
    every multiprocessor wait for those that NCCL has; copy engines take none, and what is left is memory and power.

    Attributes:
        products: of the rate of large matrix products.
        attention: of the same, by attention.
        bytes: of the copy bandwidth, by norms, activations and the optimizer.
        link: of the published bandwidth of links between devices.
        hidden: the time by which a collective slows the work beside it, as a share of the collective's time alone.
            copied: the same, for a collective that copy engines carry.
    """

    products: float = 0.88
    attention: float = 0.55
    bytes: float = 0.85
    link: float = 0.64
    hidden: float = 1.4
    copied: float = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Equal devices and their connections.

    Attributes:
        ceilings: of one device. memory_bytes: of one device.
        link_bytes_per_second: between devices of one host, one direction; 0 if they have no links.
        network_bytes_per_second: between hosts, for each device.
        host_memory_bytes_per_second: of the memory of a host, which its devices share.
        per_host: devices of a host.
        latency: seconds that any collective takes at least.
    """

    ceilings: Ceilings
    memory_bytes: int
    link_bytes_per_second: float
    network_bytes_per_second: float = 50e9
    host_memory_bytes_per_second: float = 200e9
    per_host: int = 8
    latency: float = 20e-6
    shares: Shares = field(default_factory=Shares)

    @classmethod
    def of(
        cls, preset: Preset, ceilings: Ceilings | None = None, *, matmul: float = 0.75, copy: float = 0.89
    ) -> Machine:
        """Make a machine of a data sheet. ``ceilings``: measured ones; without them, the sheet's, times the shares that
        an H200 reaches (``presets.py``)."""
        return cls(
            ceilings=ceilings or preset.ceilings(copy, matmul),
            memory_bytes=preset.memory_bytes,
            link_bytes_per_second=preset.peer_bytes_per_second or preset.host_bytes_per_second,
        )

    def bandwidth(self, span: int) -> float:
        """Return the bytes per second of each rank in a collective between ranks within ``span`` neighbours."""
        if span <= self.per_host:
            return self.link_bytes_per_second * self.shares.link
        return min(self.link_bytes_per_second, self.network_bytes_per_second) * self.shares.link

    @property
    def copies(self) -> float:
        """Bytes per second that kernels bound by memory reach."""
        return self.ceilings.copy_bytes_per_second * self.shares.bytes

    @property
    def host_link(self) -> float:
        """Bytes per second between device and host, the slower direction.

        Raises:
            ValueError: it is not known.
        """
        found = self.ceilings.host_to_device_bytes_per_second, self.ceilings.device_to_host_bytes_per_second
        known = [each for each in found if each]
        if not known:
            raise ValueError(
                f"the link between {self.ceilings.device} and its host is not known: take a preset of a GPU"
            )
        return min(known)
