"""Show where the time of a run went, and what to change.

* ``program/``: any PyTorch program.
* ``engine/``: a server, from its decision log.
* ``backward/``: a backward pass.
* ``energy``: joules, kWh and CO2e of a run.
* ``roofline``: limits of a device for a model, an operator, a trace. ``roofline_svg``: the picture.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .program.explain import Explain

__all__ = ["Explain"]


def __getattr__(name: str) -> Any:
    """Import ``Explain`` on first use, so that other users do not import torch."""
    if name == "Explain":
        from .program.explain import Explain

        return Explain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
