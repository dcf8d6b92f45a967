"""Published figures of machines, for planning with machines that you do not have. Nothing here is measured.

Peaks are those of dense matrix products (no sparsity) with float32 sums. Bandwidth is that of the memory, or of one
direction of a link. No program reaches them: on an H200 a copy gets about 89% of 4.8 TB/s, and a large product about
75% of 989 TFLOP/s. ``Preset.ceilings`` takes such shares. By default they are 1, and a floor is then a bound from the
data sheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .ceilings import Ceilings

GB = 10**9
TERA = 10**12


@dataclass(frozen=True, slots=True)
class Preset:
    """One machine as its maker describes it.

    Attributes:
        name: what commands call it.
        device: full name.
        memory_bytes: capacity.
        bytes_per_second: bandwidth of its memory.
        flops_per_second: dense matrix products, by dtype name.
        host_bytes_per_second: one direction of the link to the host; 0 for a processor.
        peer_bytes_per_second: one direction, all links to other devices together; 0 where there are none.
        units: multiprocessors, or cores.
        source: where the figures are from.
    """

    name: str
    device: str
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: Mapping[str, float]
    host_bytes_per_second: float
    peer_bytes_per_second: float
    units: int
    source: str

    def ceilings(self, bandwidth_share: float = 1.0, matmul_share: float = 1.0) -> Ceilings:
        """The ceilings to plan with: each peak times the share of it that programs reach.

        Raises:
            ValueError: a share that is not above 0 and at most 1.
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


def _tensor(fp32: float, tf32: float, half: float, fp8: float | None = None) -> dict[str, float]:
    rates = {"float32": fp32, "tf32": tf32, "bfloat16": half, "float16": half}
    if fp8 is not None:
        rates["float8_e4m3fn"] = fp8
    return {dtype: rate * TERA for dtype, rate in rates.items()}


_HOPPER = _tensor(67, 494.7, 989.4, 1978.9)

PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "a100-80gb", "NVIDIA A100-SXM4-80GB", 80 * GB, 2039e9, _tensor(19.5, 156, 312), 32e9, 300e9, 108,
            "NVIDIA A100 Tensor Core GPU data sheet (SXM 80GB); link PCIe 4.0 x16",
        ),
        Preset(
            "h100-sxm", "NVIDIA H100 SXM5 80GB", 80 * GB, 3350e9, _HOPPER, 64e9, 450e9, 132,
            "NVIDIA H100 Tensor Core GPU data sheet (SXM; half of the figures with sparsity); link PCIe 5.0 x16",
        ),
        Preset(
            "h200", "NVIDIA H200 SXM 141GB", 141 * GB, 4800e9, _HOPPER, 64e9, 450e9, 132,
            "NVIDIA H200 Tensor Core GPU data sheet (SXM; half of the figures with sparsity); link PCIe 5.0 x16",
        ),
        Preset(
            "b200", "NVIDIA B200 SXM 180GB", 180 * GB, 8000e9, _tensor(75, 1125, 2250, 4500), 64e9, 900e9, 148,
            "NVIDIA HGX B200 data sheet (an eighth of the board; half of the figures with sparsity); link PCIe 5.0 x16",
        ),
        Preset(
            "l4", "NVIDIA L4", 24 * GB, 300e9, _tensor(30.3, 60, 121, 242.5), 32e9, 0.0, 58,
            "NVIDIA L4 Tensor Core GPU data sheet (half of the figures with sparsity); link PCIe 4.0 x16",
        ),
        Preset(
            "rtx-4090", "NVIDIA GeForce RTX 4090", 24 * GB, 1008e9, _tensor(82.6, 82.6, 165.2, 330.3), 32e9, 0.0, 128,
            "NVIDIA Ada GPU architecture whitepaper, appendix A (dense, FP32 accumulate); link PCIe 4.0 x16",
        ),
        Preset(
            "mi300x", "AMD Instinct MI300X", 192 * GB, 5300e9, _tensor(163.4, 653.7, 1307.4, 2614.9), 64e9, 448e9, 304,
            "AMD Instinct MI300X data sheet (dense); fp8 there is e4m3fnuz; 7 Infinity Fabric links; PCIe 5.0 x16",
        ),
        Preset(
            "epyc-9654", "AMD EPYC 9654, 96 cores, 12 channels of DDR5-4800", 384 * GB, 12 * 8 * 4800e6,
            {"float32": 96 * 2.4e9 * 2 * 16}, 0.0, 0.0, 96,
            "arithmetic: AMD's 2.4 GHz base clock, a 512-bit FMA a cycle and core (Zen 4); 12 channels of 8 bytes",
        ),
        Preset(
            "xeon-8480", "Intel Xeon Platinum 8480+, 56 cores, 8 channels of DDR5-4800", 256 * GB, 8 * 8 * 4800e6,
            {"float32": 56 * 2.0e9 * 2 * 2 * 16}, 0.0, 0.0, 56,
            "arithmetic: Intel's 2.0 GHz base clock, 2 FMA units on 16 floats; its matrix unit (AMX) is not counted",
        ),
        Preset(
            "ryzen-7950x", "AMD Ryzen 9 7950X, 16 cores, two channels of DDR5-5200", 64 * GB, 2 * 8 * 5200e6,
            {"float32": 16 * 4.5e9 * 2 * 16}, 0.0, 0.0, 16,
            "arithmetic: AMD's 4.5 GHz base clock, a 512-bit FMA a cycle and core (Zen 4); 2 channels of 8 bytes",
        ),
        Preset(
            "cpu-8-cores", "8 cores with AVX2 at 4 GHz, two channels of DDR5-5600", 32 * GB, 2 * 8 * 5600e6,
            {"float32": 8 * 4e9 * 2 * 8 * 2}, 0.0, 0.0, 8,
            "arithmetic: 2 channels of 8 bytes at 5600 MT/s; 8 cores of 2 FMA units on 8 floats at 4 GHz",
        ),
    )
}  # fmt: skip


def preset(name: str) -> Preset:
    """The machine called ``name``, or the one whose name begins with these parts, in small or capital letters.

    Parts are whole: an H20 is no H200.

    Raises:
        ValueError: there is none of that name, or several begin so.
    """
    wanted = name.lower()
    found = [each for each in PRESETS if f"{each}-".startswith(f"{wanted}-")]
    if len(found) != 1:
        what = f"{name!r} is the beginning of {', '.join(found)}" if found else f"no preset {name!r}"
        raise ValueError(f"{what}; there are: {', '.join(PRESETS)}")
    return PRESETS[found[0]]
