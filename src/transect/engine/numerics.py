"""A fingerprint of everything that an engine's bits depend on, by which replicas recognize that they give the same
answers.

Two engines with equal fingerprints compute the same logits from the same tokens, if ``exact`` holds for both: then no
result depends on what else is in the batch or how a prompt was cut into chunks, and an answer begun in one continues in
the other to the bit. Where it does not hold (kernels are chosen by the shape of a step), a continued answer is as good
as the first, and its tokens may be others.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..checkpoints.resolve import ModelSource
from ..version import __version__
from .config import EngineConfig

if TYPE_CHECKING:
    import torch

    from ..models.decoder import Decoder

SAMPLES, SAMPLE_BYTES, READ_WHOLE = 256, 4096, 2**24
"""Number and size of the samples of a large weight file, and the size up to which a file is read whole: reading a large
one would take as long as loading it."""
SIZED = ("dtype", "quantization", "kv_cache_dtype", "block_size", "tensor_parallel_size", "pipeline_parallel_size")
"""Settings that choose formats, the tiles of attention, and the order of sums over ranks."""


class Numerics(msgspec.Struct, frozen=True):
    """Everything that an engine's bits depend on.

    Attributes:
        parts: by name; the digest of the weights among them.
        exact: logits of a token depend on the tokens before it alone.
    """

    parts: dict[str, str]
    exact: bool

    @property
    def fingerprint(self) -> str:
        """``parts`` as 16 hexadecimal digits."""
        return blake2b(msgspec.json.encode(sorted(self.parts.items())), digest_size=8).hexdigest()

    def promises(self, other: Numerics) -> bool:
        """Return True if an answer begun with ``other`` continues here with identical bits."""
        return self.exact and other.exact and self.parts == other.parts

    def differences(self, other: Numerics) -> list[str]:
        """List the names of the parts that differ, sorted."""
        return sorted(name for name in {*self.parts, *other.parts} if self.parts.get(name) != other.parts.get(name))


UNKNOWN = Numerics({}, False)
"""Numerics of an engine that promises nothing."""


def numerics_of(config: EngineConfig, source: ModelSource, device: torch.device, kernels: str, exact: bool) -> Numerics:
    """Compute the fingerprint of an engine.

    Args:
        kernels: which of several implementations run.
        exact: see ``Numerics``.
    """
    import torch  # not at the top: the caller's process reads fingerprints without it

    from ..ops import tuning

    parts: dict[str, Any] = {name: getattr(config, name) for name in SIZED}
    parts |= {"weights": weights_digest(config, source), "kernels": kernels}
    parts |= {"transect": __version__, "torch": torch.__version__, "expert_parallel": config.enable_expert_parallel}
    if device.type == "cuda":
        parts |= {"device": tuning.device_name(device), "switches": dataclasses.asdict(config.gpu)}
        parts |= {"cuda": torch.version.cuda, "deterministic": config.deterministic}
    else:
        parts |= {"device": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"}
    return Numerics({name: str(value) for name, value in parts.items()}, exact)


def is_batch_invariant(model: Decoder) -> bool:
    """Return True if a model on a CPU gives a token the same logits in any batch: its layers run in the C++ kernels, or
    its operators and products are batch-invariant."""
    from ..models.native import NativeStack

    if isinstance(model.stack, NativeStack):
        return True
    return all(model.ops.is_batch_invariant(name) for name, _ in model.ops.chosen) and all(
        getattr(module, "batch_invariant", True) for module in model.modules()
    )


def weights_digest(config: EngineConfig, source: ModelSource) -> str:
    """Compute a digest of the weights: sizes of their files, and samples of their contents; of random weights, the
    seed."""
    digest = blake2b(repr(source.config).encode(), digest_size=16)
    if config.load_format == "dummy" or source.kind == "shape":
        digest.update(f"random {config.seed or 0}".encode())
        return digest.hexdigest()
    files = source.gguf_files if source.kind == "gguf" else sorted(source.path.glob("*.safetensors"))
    adapter = [] if source.adapter is None else sorted(source.adapter.path.glob("adapter_*"))
    _update(digest, (*files, *adapter))
    return digest.hexdigest()


def _update(digest: Any, files: Iterable[Path]) -> None:
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for at in range(0, size, SAMPLE_BYTES if size <= READ_WHOLE else size // SAMPLES):
                file.seek(at)
                digest.update(file.read(SAMPLE_BYTES))
