"""Clients, identified by API key or address, their permissions, and their requests.

A client with a key is known by the key's name. Without keys a client is an address; what a proxy says of addresses
counts if the operator trusts that proxy (``ServerOptions.trusted_proxies``). Of an IPv6 address the first 64 bits
count: one client has all the others.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections import OrderedDict
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from starlette.types import Scope

from .errors import ApiError

MOST_NAME = 64
"""Characters of a key's name."""
MOST_OWNED = 65536
"""Requests whose clients are remembered, newest first."""
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Client:
    """A sender of requests.

    Attributes:
        name: of the key, or an address. It is shown in metrics and logs.
        operator: may change the server's state, and see the requests of others.
        weight: share of the engine's work beside others that want it; 2 gets twice as much as 1.
        requests_per_minute, tokens_per_minute: limits; None for none. Tokens are those of prompts and answers.
        parallel: requests at the same time; None for no limit.
        has_key: false for an address.

    Raises:
        ValueError: a value is out of range; the message begins with its name.
    """

    name: str
    operator: bool = False
    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    parallel: int | None = None
    has_key: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isprintable() or not 0 < len(self.name) <= MOST_NAME:
            raise ValueError(f"name must be a text of 1 to {MOST_NAME} printable characters, got {self.name!r}")
        weight = self.weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.01 <= weight <= 1000:
            raise ValueError(f"weight must be a number from 0.01 to 1000, got {weight!r}")
        for name in ("requests_per_minute", "tokens_per_minute", "parallel"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key and the client that it stands for."""

    key: str
    client: Client

    def __repr__(self) -> str:
        """Show the client's name without the key, because settings are printed."""
        return f"ApiKey({self.client.name!r})"


NOBODY = Client("unknown", has_key=False)
_client: ContextVar[Client] = ContextVar("transect_client", default=NOBODY)


def current_client() -> Client:
    """Return the client whose request this task handles."""
    return _client.get()


def check_operator() -> None:
    """Raise ApiError, 403, if the request that this task handles is not an operator's."""
    if not current_client().operator:
        message = "this is for the operator of the server: send the key of --admin-api-key"
        raise ApiError(403, message, code="operator_key_needed")


class Clients:
    """Identifies clients by their requests' headers.

    Args:
        keys: of ordinary clients. Without any, everybody may ask.
        operators: of operators. Without any keys at all, every client is an operator.
    """

    def __init__(self, keys: Iterable[ApiKey], operators: Iterable[str] = ()) -> None:
        self._known = {_digest(each.key.encode()): each.client for each in keys}
        self._closed = bool(self._known)
        for key in operators:
            self._known[_digest(key.encode())] = Client("operator", operator=True)
        self._all_operators = not self._known

    def of(self, scope: Scope) -> Client | None:
        """Return the client of a request, and make it the current client of this task; None if a known key is required
        and missing."""
        headers = dict(scope["headers"])
        given = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")
        scheme, _, key = given.partition(b" ")
        # Digests are compared, so the time that it takes tells nothing about keys.
        client = self._known.get(_digest(key.strip())) if scheme.lower() == b"bearer" else None
        if client is None and not self._closed:
            client = Client(address_of(scope), operator=self._all_operators, has_key=False)
        _client.set(client or NOBODY)
        return client


def address_of(scope: Scope) -> str:
    """Return the address of a request's client, or ``local`` for a client without one."""
    host = (scope.get("client") or ("",))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "local"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)


def addresses_of(proxies: Iterable[str]) -> list[str]:
    """List the networks of trusted proxies in all forms in which their addresses appear: a socket for both kinds of
    addresses shows an IPv4 address as an IPv6 one."""
    found: list[str] = []
    for text in proxies:
        network = ipaddress.ip_network(text, strict=False)
        found.append(str(network))
        if network.version == 4:
            found.append(f"::ffff:{network.network_address}/{96 + network.prefixlen}")
    return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Owners:
    """Remembers the client of each request by its id: an ordinary client sees its own, an operator all of them."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()

    def note(self, request_id: str) -> None:
        """Record the current client as the owner of this request."""
        self._names[request_id] = current_client().name
        if len(self._names) > MOST_OWNED:
            self._names.popitem(last=False)

    def may_see(self, shown_id: str) -> bool:
        """Return True if a request is the current client's, or that client is an operator.

        Args:
            shown_id: the id that an answer shows; it holds the one that was noted.
        """
        found = _ID.search(shown_id)
        client = current_client()
        return client.operator or (found is not None and self._names.get(found[0]) == client.name)


def keys_in(path: Path) -> list[ApiKey]:
    """Read the API keys in a file, one a line: the key alone, or a JSON object with ``key``, ``name`` and limits.

    Raises:
        ValueError: it cannot be read, holds none, or a line is at fault; the message has its number.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--api-key-file {path} cannot be read ({error}): give a text file with one key a line"
        ) from None
    found: list[ApiKey] = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line:
            continue
        try:
            found.append(_key_of(line, f"key-{number}"))
        except ValueError as error:
            raise ValueError(f"--api-key-file {path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"--api-key-file {path} holds no key: write one a line, or leave the option out")
    names = [each.client.name for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None and len({each.client for each in found if each.client.name == twice}) > 1:
        raise ValueError(f"--api-key-file {path} gives the name {twice!r} to keys with different limits")
    return found


def _key_of(line: str, name: str) -> ApiKey:
    if not line.startswith("{"):
        return ApiKey(line, Client(name))
    try:
        value: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise ValueError(f"it begins like a JSON object but is not one ({error})") from None
    key = value.pop("key", None)
    if not isinstance(key, str) or not key:
        raise ValueError('it must have the key: {"key": "...", "name": "..."}')
    known = [each.name for each in fields(Client) if each.name not in ("operator", "has_key")]
    unknown = next((each for each in value if each not in known), None)
    if unknown is not None:
        raise ValueError(f"there is no field {unknown[:40]!r}; there are key, {', '.join(known)}")
    return ApiKey(key, Client(**{"name": name, **value}))
