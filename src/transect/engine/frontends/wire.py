"""The messages between ``AsyncEngine`` and the engine process: msgpack, one message per frame, in order."""

from __future__ import annotations

from typing import Any

import msgspec

from ..numerics import Numerics
from ..scheduling.outputs import EngineOutput, SchedulerStats
from ..scheduling.snapshot import SchedulerSnapshot


class Submit(msgspec.Struct, tag="submit"):
    """Queue a request; answered by ``Outputs`` in time, or by ``Refused``."""

    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    """The fields of ``SamplingParams``, validated again on arrival."""
    number: int = 0
    """Number of the submit, counted by the sender from 1."""
    priority: int = 0
    pooling: str | None = None
    client: str = ""
    weight: float = 1.0
    output_token_ids: tuple[tuple[int, ...] | None, ...] | None = None
    """See ``Request``; None for a request from its beginning."""
    given: bool = False
    """See ``Request``."""
    arrival: float | None = None
    """Arrival at the first engine, on the machine's monotonic clock; None if the request arrives now."""
    adapter: str = ""
    """Content id of its adapter; empty for none."""
    adapter_path: str = ""
    """Directory of the adapter, from which it is read unless it is in memory."""


class Abort(msgspec.Struct, tag="abort"):
    """End a request, or one choice of it. Unknown ids are ignored: it may have just ended."""

    request_id: str
    choice: int | None = None


class StatsQuery(msgspec.Struct, tag="stats?"):
    """Answered by one ``Stats`` before the next step begins."""


class Look(msgspec.Struct, tag="look"):
    """Answered by one ``Looked`` before the next step begins, after all records of the decision log so far.

    ``requests``: the snapshot describes all unfinished requests too.
    """

    requests: bool = False


class ResetPrefixCache(msgspec.Struct, tag="reset"):
    """Forget the KV of finished prompts; not answered."""


class LoadAdapter(msgspec.Struct, tag="load"):
    """Read an adapter from a directory and keep it; answered by ``AdapterLoaded``."""

    id: str
    path: str


class ForgetAdapter(msgspec.Struct, tag="forget"):
    """Let go of an adapter in memory, unless a request has it; not answered."""

    id: str


class NewCaller(msgspec.Struct, tag="caller"):
    """Drop all requests, and count submits from 1 again: another process takes over as the caller. Answered by one
    ``Ready``; what is sent before that belongs to the caller before."""


class Shutdown(msgspec.Struct, tag="shutdown"):
    """End the process; requests still running are dropped."""


ToEngine = Submit | Abort | StatsQuery | Look | ResetPrefixCache | LoadAdapter | ForgetAdapter | NewCaller | Shutdown


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded and the engine takes requests."""

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: list[int]
    kv_tokens: int
    """Tokens that the KV cache can hold in all."""
    kernels: str
    """Running kernels and the reason for them."""
    load_seconds: float
    numerics: Numerics
    """Fingerprint of everything that its bits depend on."""
    cores_left: list[int] = []
    """Cores that the engine keeps from its threads, for the server's; see ``hardware/cores.py``."""


class Failed(msgspec.Struct, tag="failed"):
    """The engine could not start, or has failed; the process exits after this message.

    ``user_error``: the message says what to change in the configuration.
    """

    message: str
    user_error: bool


class Refused(msgspec.Struct, tag="refused"):
    """A ``Submit`` that was not accepted. ``queue_full`` has (requests waiting, seconds to wait, True for a limit of
    the client's own) if the same request may be accepted later."""

    request_id: str
    message: str
    queue_full: tuple[int, float, bool] | None = None


class Taken(msgspec.Struct, tag="taken"):
    """``number`` of the newest ``Submit`` that has been read, sent before any output of that request.

    Later submissions are still in the socket, and only their sender counts them.
    """

    number: int


class Outputs(msgspec.Struct, tag="outputs"):
    """Outputs of one step."""

    outputs: list[EngineOutput]
    decisions: bytes = b""
    """Records of the decision log since the last message of this kind."""


class Stats(msgspec.Struct, tag="stats"):
    """Answer to ``StatsQuery``."""

    stats: SchedulerStats


class Looked(msgspec.Struct, tag="looked"):
    """Answer to ``Look``."""

    snapshot: SchedulerSnapshot


class AdapterLoaded(msgspec.Struct, tag="loaded"):
    """Answer to ``LoadAdapter``; ``error`` says what is wrong with the adapter, and is empty if nothing is."""

    id: str
    error: str = ""


class Alive(msgspec.Struct, tag="alive"):
    """Sent between steps, at least every ``HEARTBEAT_S``, so that silence means a hung step."""


FromEngine = Ready | Failed | Refused | Taken | Outputs | Stats | Looked | AdapterLoaded | Alive

HEARTBEAT_S = 0.5
CONFIG_LENGTH_BYTES = 8
"""Bytes of the length prefix before the configuration on the engine process's standard input."""

_encode = msgspec.msgpack.Encoder().encode


def encode(message: ToEngine | FromEngine) -> bytes:
    """Encode a message as bytes.

    Raises:
        ValueError: a caller's value cannot be sent: a whole number beyond 64 bits, or one that is nested too deeply.
    """
    try:
        return _encode(message)
    except OverflowError:
        raise ValueError("a whole number of the request has more than 64 bits: give a smaller one") from None
    except RecursionError:
        raise ValueError("a value of the request is nested too deeply: give one with fewer levels") from None


decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
