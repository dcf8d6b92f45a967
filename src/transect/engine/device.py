"""The device that an engine runs on."""

from __future__ import annotations

import torch

from .config import EngineConfig


def device_for(config: EngineConfig) -> tuple[torch.device, str]:
    """Choose the device for a configuration. Returns the device and the reason.

    Raises:
        ValueError: ``cuda`` was asked for and cannot be used.
    """
    if config.device == "cpu":
        return torch.device("cpu"), "device=cpu"
    reason = None
    if not torch.cuda.is_available():
        reason = "torch sees no CUDA GPU"
    elif config.native:
        reason = "native=True asks for the C++ CPU kernels"
    else:
        try:
            import triton  # noqa: F401
        except ImportError:
            reason = "Triton is not installed: pip install 'transect[gpu]'"
    if reason is None:
        return torch.device("cuda", config.first_device or torch.cuda.current_device()), "a GPU is here"
    if config.device == "cuda":
        raise ValueError(f"device is cuda, but {reason}; give device='cpu' to run on the processor")
    return torch.device("cpu"), reason
