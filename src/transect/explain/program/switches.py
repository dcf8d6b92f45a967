"""Changes that switch a costly call or setting of a script off while it runs; each is a context manager.

They answer findings about anomaly detection, the garbage collector, the allocator's cache, and eager attention.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .changes import Running


@contextmanager
def without_anomaly_detection() -> Iterator[Running]:
    """Ignore requests for autograd's anomaly detection."""
    mode, plain = torch.autograd.anomaly_mode, torch.is_anomaly_enabled()

    def ignore(*args: Any, **kwargs: Any) -> None: ...

    with _replaced((mode.set_detect_anomaly, "__init__", ignore), (mode.set_detect_anomaly, "__exit__", ignore),
                   (mode.detect_anomaly, "__init__", ignore), (mode.detect_anomaly, "__enter__", ignore),
                   (mode.detect_anomaly, "__exit__", ignore)):  # fmt: skip
        torch.set_anomaly_enabled(False)
        try:
            yield Running()
        finally:
            torch.set_anomaly_enabled(plain)


@contextmanager
def without_collection() -> Iterator[Running]:
    """Ignore calls of the garbage collector, and collect only after the script."""
    on = gc.isenabled()
    gc.disable()
    try:
        with _replaced((gc, "collect", lambda *args, **kwargs: 0)):
            yield Running()
    finally:
        if on:
            gc.enable()


@contextmanager
def kept_cache() -> Iterator[Running]:
    """Ignore requests to give memory of the GPU back to the driver."""
    with _replaced((torch.cuda, "empty_cache", lambda: None)):
        yield Running()


@contextmanager
def fused_attention() -> Iterator[Running]:
    """Build models of transformers with ``attn_implementation="sdpa"``."""
    import transformers  # the script's own library: the finding comes from its frames

    kind = transformers.PreTrainedModel
    plain = kind.__init__

    @functools.wraps(plain)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        config._attn_implementation = "sdpa"
        plain(self, config, *args, **kwargs)

    with _replaced((kind, "__init__", init)):
        yield Running()


@contextmanager
def _replaced(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes inside the block."""
    with contextlib.ExitStack() as undo:
        for owner, name, value in attributes:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


SWITCHES = {
    "no anomaly detection": without_anomaly_detection,
    "no collection": without_collection,
    "no empty_cache": kept_cache,
    "fused attention": fused_attention,
}
"""Changes by the names in ``Finding.apply``."""
