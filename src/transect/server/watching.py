"""One request as captures and releases see it: it begins, gets answers, and ends."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .capture.slips import CaptureSlip, RequestContent
from .http.errors import ApiError
from .sender import current_request
from .serving import Serving

if TYPE_CHECKING:
    from ..text.outputs import RequestOutput
    from .releases import VersionSeries


class RequestWatch:
    """Counts a request for its version, and hands it to the captures. As a context it begins and ends the request.

    Args:
        serving: has the captures.
        answer: id of the answer, without the API's prefix.
        prompts: complete results of the request.
        part: the request is a part of a larger one, which is watched itself.
    """

    def __init__(self, serving: Serving, answer: str, prompts: int, part: bool = False) -> None:
        self._serving, self._answer, self._left = serving, answer, prompts
        self._version: VersionSeries | None = None if part else current_request().version
        self._content: RequestContent | None = None
        self._slip: CaptureSlip | None = None
        self._running = self._failed = False
        self._began = time.monotonic()

    def describe(self, content: RequestContent) -> None:
        """Describe the request; one that is not described is counted, and neither captured nor read."""
        self._content = content
        if self._serving.captures is not None:
            release = "" if self._version is None else self._version.release
            self._slip = self._serving.captures.begin(self._answer, content, self._serving.model_name, release)

    def begin(self) -> None:
        """Count the request."""
        self._running = True
        if self._version is not None:
            self._version.begin()

    def adapted(self, content: str) -> None:
        """Note the content id of the adapter that the request runs with."""
        if self._slip is not None:
            self._slip.adapter = content

    def answered(self, place: int, result: RequestOutput) -> None:
        """Take the complete answers to the prompt of this place."""
        self._left -= 1
        if self._slip is not None:
            self._slip.take(place, result)
        if self._version is not None and self._content is not None:
            self._version.answered(self._content, result)

    def failed(self, error: ApiError) -> None:
        """Note an error; one of the server counts as the version's, a full queue does not."""
        self._failed = error.status_code >= 500 and error.code != "queue_full"

    def end(self, first_token_s: float | None = None, tokens: float = 0) -> None:
        """End the request. May be called repeatedly.

        Args:
            first_token_s: time to the first token; None without one.
            tokens: of an answer, in the mean.
        """
        if not self._running:
            return
        self._running = False
        if self._slip is not None and self._serving.captures is not None:
            self._serving.captures.end(self._slip, first_token_s, not self._left)
        if self._version is not None:
            self._version.timed(first_token_s, time.monotonic() - self._began, tokens)
            self._version.end(self._failed)

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, ApiError):
            self.failed(error)
        self.end()
