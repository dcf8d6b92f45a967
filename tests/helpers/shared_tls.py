"""One TLS context for all HTTP clients of a test process, and time limits that a busy machine keeps.

For each client httpx reads all certificates of the system again, which takes 30 ms. It does so for plain HTTP too. And
it gives up after 5 s of silence unless a limit is given.
"""

from __future__ import annotations

import functools
import sys

PATIENCE_S = 200.0


def install() -> bool:
    """Let clients with the same settings share their context, and wait longer, if httpx has been imported and has the
    function."""
    transports = sys.modules.get("httpx._transports.default")
    make = getattr(transports, "create_ssl_context", None)
    if make is None or hasattr(make, "cache_info"):
        return make is not None
    transports.create_ssl_context = functools.cache(make)  # type: ignore[union-attr]
    limit = getattr(sys.modules.get("httpx._config"), "DEFAULT_TIMEOUT_CONFIG", None)
    if limit is not None:
        limit.connect = limit.read = limit.write = limit.pool = PATIENCE_S
    return True
