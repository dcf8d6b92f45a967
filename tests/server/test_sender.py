"""The user, session and cache key of a request."""

from types import SimpleNamespace

from transect.server.openai.protocol import SenderBody
from transect.server.sender import sender_of


def test_affinity_is_the_session_then_the_cache_key_then_the_user():
    body = SenderBody(user="ann", prompt_cache_key="tables")
    assert sender_of({}, body).affinity == "cache:tables"
    assert sender_of({"x-session-id": "s 1"}, body).affinity == "session:s 1"
    assert sender_of({}, SenderBody(user="ann", metadata={"session_id": "7"})).affinity == "session:7"
    assert sender_of({}, SenderBody(user="ann", prompt_cache_key={"no": "text"})).affinity == "user:ann"
    assert sender_of({}, SimpleNamespace()).affinity == "" == sender_of({}).affinity
