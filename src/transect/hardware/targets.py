"""Compilation targets: the limits and abilities of each kind of GPU, without torch. Kernels are chosen and cut by them.

A target is a compute capability of NVIDIA's (``sm_89``) or an architecture of AMD's (``gfx942``). A GPU can act as an
older one (``--target sm_89``, ``GPUOptions.target``, ``TRANSECT_TARGET`` in the environment): kernels are then chosen,
cut and compiled as for that one, so the kernels of a card can be measured without the card.

Source: NVIDIA, CUDA programming guide, table of technical specifications by compute capability; AMD, CDNA 3
instruction set architecture.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

KIB = 1024
SETTING = "TRANSECT_TARGET"
"""Environment variable with the target that this machine's GPU acts as; processes inherit it."""


@dataclass(frozen=True, slots=True)
class KernelTarget:
    """A kind of GPU, as its compiler sees it. Sizes are of one multiprocessor, unless said.

    Attributes:
        name: in commands and in ``Implementation.targets``.
        cards: examples of cards.
        block_bytes: most shared memory of a block.
        shared_bytes: shared memory.
        reserved_bytes: part of ``shared_bytes`` that each block takes in addition.
        warps: most warps at once.
        blocks: most blocks at once.
        registers: registers of 32 bits.
        register_step: registers are allocated to a warp in multiples of this.
        lanes: threads of a warp.
        capability: NVIDIA's compute capability; (0, 0) of others.
    """

    name: str
    cards: str
    block_bytes: int
    shared_bytes: int
    warps: int
    blocks: int
    capability: tuple[int, int] = (0, 0)
    reserved_bytes: int = KIB
    registers: int = 64 * KIB
    register_step: int = 256
    lanes: int = 32

    @property
    def nvidia(self) -> bool:
        return self.capability > (0, 0)

    @property
    def hopper(self) -> bool:
        """True if the kernels for Hopper alone run (``wgmma``, and sources for ``sm_90a``)."""
        return self.capability == (9, 0)

    @property
    def bulk_copies(self) -> bool:
        """True if tensor descriptors are copied by hardware (TMA), and blocks have room for the tiles made for that."""
        return self.capability >= (9, 0) and self.large_blocks

    @property
    def single_warps(self) -> bool:
        """True if NVIDIA's tensor cores multiply for single warps alone (mma.sync), not for groups of four."""
        return self.nvidia and not self.bulk_copies

    @property
    def dependent_launch(self) -> bool:
        """True if a kernel can be launched while the previous one still runs."""
        return self.capability >= (9, 0)

    @property
    def fp8_products(self) -> bool:
        """True if tensor cores multiply fp8 (e4m3)."""
        return self.capability >= (8, 9)

    @property
    def large_blocks(self) -> bool:
        """True if a block gets 163 KiB of shared memory or more, as in a data centre's cards since Ampere."""
        return self.block_bytes >= 163 * KIB

    def stages(self, wanted: int, stage_bytes: int) -> int:
        """Return the number of a Triton loop's stages, at most ``wanted`` and at least 2, whose tiles fit into a block:
        a loop that copies asynchronously keeps one stage less than it has (measured with Triton 3.7)."""
        most = self.block_bytes // stage_bytes + 1
        return max(2, min(wanted, most)) if self.nvidia else min(wanted, 2)


def _nvidia(name: str, cards: str, block: int, warps: int, blocks: int) -> KernelTarget:
    number = int(name[3:])
    return KernelTarget(name, cards, block * KIB, (block + 1) * KIB, warps, blocks, divmod(number, 10))


_KNOWN = (
    _nvidia("sm_80", "A100, A30", 163, 64, 32),
    _nvidia("sm_86", "RTX 30, A10, A40, RTX A6000", 99, 48, 16),
    _nvidia("sm_89", "RTX 40, L4, L40S", 99, 48, 24),
    _nvidia("sm_90", "H100, H200, GH200", 227, 64, 32),
    _nvidia("sm_100", "B200, GB200", 227, 64, 32),
    _nvidia("sm_120", "RTX 50, RTX PRO Blackwell", 99, 48, 24),
    # Four SIMD units, each with 512 registers of 64 lanes and at most 8 waves.
    KernelTarget("gfx942", "MI300X", 64 * KIB, 64 * KIB, 32, 32, (0, 0), 0, 4 * 512 * 64, 8 * 64, 64),
)
TARGETS: Mapping[str, KernelTarget] = {target.name: target for target in _KNOWN}
"""The targets that the tests compile for."""
NVIDIA_TARGETS = tuple(name for name, target in TARGETS.items() if target.nvidia)
OLDER_TARGETS = tuple(name for name in NVIDIA_TARGETS if TARGETS[name].capability < (9, 0))
"""Targets that a newer card can act as."""
BULK_TARGETS = tuple(name for name, target in TARGETS.items() if target.bulk_copies)
PLAIN_TARGETS = tuple(name for name, target in TARGETS.items() if not target.bulk_copies)
"""Targets of the portable tilings."""
FP8_TARGETS = tuple(name for name, target in TARGETS.items() if target.fp8_products)
RELATIVES = {"sm_103": "sm_100", "sm_121": "sm_120"}
"""Targets with the limits of another one; kernels for that one compile for them too."""
PROCESSOR = KernelTarget("cpu", "", 0, 0, 0, 0)
"""Target of a CPU: no known limits, no special kernels."""


@cache
def target_named(name: str) -> KernelTarget:
    """Return the target called ``name``.

    Raises:
        ValueError: there is none.
    """
    if name in RELATIVES:
        number = int(name[3:])
        return replace(TARGETS[RELATIVES[name]], name=name, capability=divmod(number, 10))
    if name not in TARGETS:
        raise ValueError(f"no target {name!r}; there are: {', '.join((*TARGETS, *RELATIVES))}")
    return TARGETS[name]


def compiled_as(name: str) -> str:
    """Return the target of the tests that stands for ``name``: ``sm_120`` for ``sm_121``, most others for
    themselves."""
    return RELATIVES.get(name, name)


def acted_target() -> KernelTarget | None:
    """Return the target that this process's GPU acts as; None if it is used as it is.

    Raises:
        ValueError: the environment names an unknown target.
    """
    name = os.environ.get(SETTING, "")
    return target_named(name) if name else None


def act_as(name: str) -> None:
    """Have this process, and processes that it starts, use its GPU as one of target ``name``. Call it before kernels
    are chosen.

    Raises:
        ValueError: an unknown target, or one that no newer card can act as; or this process acts as another one.
    """
    if name not in OLDER_TARGETS:
        raise ValueError(f"a GPU can act as {', '.join(OLDER_TARGETS)}, not as {name}")
    before = os.environ.get(SETTING)
    if before and before != name:
        raise ValueError(f"this process acts as {before} already: start another one for {name}")
    os.environ[SETTING] = name
