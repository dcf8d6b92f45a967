"""Peers that several operators race: a function of torch's, compiled by ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` with ``torch.compile`` for each shape separately; nothing is compiled before the first call.

    Raises (when called):
        torch._dynamo.exc.Unsupported: the function does not compile as a whole.
    """

    @cache
    def made() -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, dynamic=False)

    return lambda **inputs: made()(**inputs)
