"""One TLS context for all HTTP clients of a test process.

For each client httpx reads all certificates of the system again, which takes 30 ms. It does so for plain HTTP too.
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
