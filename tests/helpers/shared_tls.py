"""One TLS context for all HTTP clients of a test process.

httpx reads the certificates of the system anew for each client, also for plain HTTP, which takes 30 ms of a processor.
"""

from __future__ import annotations

import functools
import sys


def install() -> bool:
    """Let clients with the same settings share their context, if httpx has been imported and has the function."""
    transports = sys.modules.get("httpx._transports.default")
    make = getattr(transports, "create_ssl_context", None)
    if make is None or hasattr(make, "cache_info"):
        return make is not None
    transports.create_ssl_context = functools.cache(make)  # type: ignore[union-attr]
    return True
