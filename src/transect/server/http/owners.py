"""Ownership of requests: an ordinary client sees its own, an operator all of them."""

from __future__ import annotations

import re
from collections import OrderedDict

from .clients import current_client

MOST = 65536
"""Requests whose clients are remembered, newest first."""
_ID = re.compile(r"[0-9a-f]{32}")


class Owners:
    """Remembers the client of each request by its id."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()

    def note(self, request_id: str) -> None:
        """Record the current client as the owner of this request."""
        self._names[request_id] = current_client().name
        if len(self._names) > MOST:
            self._names.popitem(last=False)

    def may_see(self, shown_id: str) -> bool:
        """Return True if a request is the current client's, or that client is an operator.

        Args:
            shown_id: the id that an answer shows; it holds the one that was noted.
        """
        found = _ID.search(shown_id)
        client = current_client()
        return client.operator or (found is not None and self._names.get(found[0]) == client.name)
