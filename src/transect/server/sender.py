"""The request that a task handles: the person behind it, as far as it names one, and the model that it has chosen.

Headers come before fields of the body. ``X-User-Id`` or the fields ``safety_identifier``, ``user`` and
``metadata.user_id`` name the user; ``X-Session-Id`` or ``metadata.session_id`` the session. ``prompt_cache_key`` names
requests that should share a cache.
``X-Transect-Capture: no`` (or ``yes``), the field ``store`` and the header ``Sec-GPC: 1`` speak of captures; one no
outweighs any yes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..search.methods.registry import SearchMethod

MOST_ID = 256
"""Characters of an id of a user or session; of longer ones the beginning counts."""
MOST_FIRST = 4096
"""Characters of a conversation's beginning that tell it from others."""
NO, YES = ("no", "false", "0", "off"), ("yes", "true", "1", "on")


@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of a request.

    Attributes:
        user: id of the user; empty if the request names none.
        session: id of the session or conversation; empty if the request names none.
        beginning: the conversation up to its first message of the user; empty for other requests.
        consent: the request's own word on captures; None if it says nothing.
        cache_key: name of requests that should share a cache; empty if the request gives none.
    """

    user: str = ""
    session: str = ""
    beginning: str = ""
    consent: bool | None = None
    cache_key: str = ""

    @property
    def key(self) -> str:
        """Text that all requests of this user, session or conversation share; empty if there is none."""
        for kind, value in (("user", self.user), ("session", self.session), ("conversation", self.beginning)):
            if value:
                return f"{kind}:{value}"
        return ""

    @property
    def affinity(self) -> str:
        """Text that all requests share which one of several engines should get; empty if there is none."""
        for kind, value in (("session", self.session), ("cache", self.cache_key), ("user", self.user)):
            if value:
                return f"{kind}:{value}"
        return ""


@dataclass(frozen=True, slots=True)
class CurrentRequest:
    """The request that a task handles.

    Attributes:
        sender: see ``sender_of``.
        adapter: name of the chosen adapter; empty for the base.
        version: ``releases.VersionSeries`` of the chosen version; None if the request names no release.
        method: search method, if a prefix of the model's name asks for one.
    """

    sender: Sender = Sender()
    adapter: str = ""
    version: Any = None
    method: SearchMethod | None = None


_UNKNOWN = CurrentRequest()
_current: ContextVar[CurrentRequest] = ContextVar("transect_request", default=_UNKNOWN)


def current_request() -> CurrentRequest:
    """Return the request that this task handles."""
    return _current.get()


def begin_request() -> None:
    """Let this task handle a new request, of which nothing is known yet."""
    _current.set(_UNKNOWN)


def note_request(**changes: Any) -> None:
    """Set attributes of the ``CurrentRequest`` of this task."""
    _current.set(replace(_current.get(), **changes))


def sender_of(headers: Mapping[str, str], body: Any = None, beginning: str = "") -> Sender:
    """Read the sender of a request.

    Args:
        headers: of the request, found without regard to case.
        body: its checked body, if it has one.
        beginning: of the conversation that the request continues; if empty, the body's own.
    """
    metadata = getattr(body, "metadata", None)
    metadata = metadata if isinstance(metadata, dict) else {}
    user = headers.get("x-user-id"), *(getattr(body, name, None) for name in ("safety_identifier", "user"))
    return Sender(
        _first(*user, metadata.get("user_id")),
        _first(headers.get("x-session-id"), metadata.get("session_id")),
        beginning or beginning_of(body),
        _consent(headers, getattr(body, "store", None)),
        _first(getattr(body, "prompt_cache_key", None)),
    )


def _first(*values: Any) -> str:
    return next((str(value)[:MOST_ID] for value in values if isinstance(value, str | int) and value != ""), "")


def _consent(headers: Mapping[str, str], store: Any) -> bool | None:
    word = headers.get("x-transect-capture", "").strip().lower()
    if word in NO or store is False or headers.get("sec-gpc", "").strip() == "1":
        return False
    return True if word in YES or store is True else None


def beginning_of(body: Any) -> str:
    """Return the texts of a conversation up to its first message of the user, cut to ``MOST_FIRST`` characters."""
    found = [_text(getattr(body, name, None)) for name in ("instructions", "system")]
    messages = getattr(body, "messages", None)
    if messages is None:
        messages = getattr(body, "input", None) if hasattr(body, "instructions") else None
    if isinstance(messages, str):
        found.append(messages)
    elif isinstance(messages, list):
        for message in messages:
            get = message.get if isinstance(message, dict) else lambda name, each=message: getattr(each, name, None)
            found.append(_text(get("content")))
            if get("role") == "user" or sum(map(len, found)) > MOST_FIRST:
                break
    return "\n".join(filter(None, found))[:MOST_FIRST]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") if isinstance(part, dict) else getattr(part, "text", None) for part in parts)
    return "".join(text for text in texts if isinstance(text, str))
