"""Captures of a server: which requests are kept, and the numbers of what was kept and dropped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ...flow.watch.captures import CaptureFiles
from ...flow.watch.report import DRIFT_ALARMS, read_report
from ..http.clients import current_client
from ..http.errors import ApiError
from ..operations import request_log
from ..sender import Sender, current_request
from .recorder import MOST_FEEDBACK, Known, Recorder, RecorderJob
from .redaction import Redaction, rules_in
from .slips import CaptureSlip, RequestContent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from ..operations.metrics import Metrics
    from ..options import ServerOptions

ALARM = "CaptureStopped"
DAY_S = 86400.0


class Captures:
    """Keeps requests and answers of consenting clients.

    Args:
        options: with ``capture_dir``.
        metrics: of the server.
        decode: returns the text of token ids.

    Raises:
        ValueError: the directory or the rules cannot be used.
    """

    def __init__(self, options: ServerOptions, metrics: Metrics, decode: Callable[[list[int]], str]) -> None:
        assert options.capture_dir is not None
        registry = metrics.registry
        self._opt_in, self._rate = options.capture_consent == "opt-in", options.capture_rate
        self._inputs = options.capture_inputs
        files = CaptureFiles(options.capture_dir, options.capture_bytes, options.capture_days * DAY_S)
        records = Counter("transect_captured_records", "Requests and feedback written to captures", registry=registry)
        text = "Requests that were to be captured and are not kept, by reason"
        self._dropped = Counter("transect_capture_dropped", text, ["reason"], registry=registry)
        text = "Requests that are not captured for want of consent"
        self._refused = Counter("transect_capture_without_consent", text, registry=registry)
        text = "Texts replaced in captures, by rule"
        redacted = Counter("transect_capture_redactions", text, ["rule"], registry=registry)
        rules = None if options.capture_rules is None else rules_in(options.capture_rules)
        redaction = Redaction(rules, lambda name, count: redacted.labels(name).inc(count))
        self.recorder = Recorder(
            files, redaction, decode, lambda reason, count: self._dropped.labels(reason).inc(count), records.inc
        )
        registry.register(self)
        metrics.engine.alarms.append(self._alarms)

    def collect(self) -> Iterator[Metric]:
        """Yield the state as metrics; called by prometheus-client."""
        text = "1 while captures are written, 0 while they are stopped by an error"
        yield GaugeMetricFamily("transect_capture_up", text, value=float(not self.recorder.problem))
        try:
            size = self.recorder.files.size()
        except OSError:
            return
        yield GaugeMetricFamily("transect_capture_bytes", "Bytes of all captures", value=size)
        report = read_report(self.recorder.files.folder)
        if report is not None:
            yield from _drift_metrics(report)

    def _alarms(self) -> dict[str, bool]:
        """Return the alarms of captures, and those of the newest report on drift."""
        report = read_report(self.recorder.files.folder) or {"tests": []}
        drifts = {DRIFT_ALARMS[test["name"]]: bool(test["alarm"]) for test in report["tests"]}
        return {ALARM: bool(self.recorder.problem), **drifts}

    def begin(self, answer: str, asked: RequestContent, model: str, release: str) -> CaptureSlip | None:
        """Return a slip for a request; None if it is not to be captured.

        Args:
            answer: id of its answer, 32 hexadecimal digits.
        """
        sender = current_request().sender
        if asked.api == "embeddings" and not self._inputs:
            return None
        if not self._consents(sender):
            self._refused.inc()
            return None
        if int(answer[:8], 16) >= self._rate * 2**32:
            return None
        client = current_client()
        request_log.note(captured=True)
        return CaptureSlip(answer, asked, sender, client.name if client.has_key else "", model, release, time.time())

    def end(self, slip: CaptureSlip, first_token_s: float | None, complete: bool) -> None:
        """Hand a slip on, when its request has ended. Answers that did not end are not kept."""
        if not complete:
            self._dropped.labels("unfinished").inc()
            return
        slip.seconds, slip.first_token_s = time.time() - slip.created, first_token_s
        self.recorder.put(slip)

    def _consents(self, sender: Sender) -> bool:
        return sender.consent is not False if not self._opt_in else sender.consent is True

    async def feedback(self, answer: str, choice: int, given: dict[str, Any]) -> Known:
        """Keep feedback on a captured answer, and return what is known of the answer.

        Raises:
            ApiError: 404 if it is not captured or another client's, 400 for a choice that it does not have or too much
                feedback, 503 if it cannot be written now.
        """
        client = current_client()

        def work() -> Known:
            known = self.recorder.find(answer)
            if known is None or not (client.operator or known.client == (client.name if client.has_key else "")):
                message = (
                    "no captured answer has this id: it was not sampled or had no consent, has left by age or quota, "
                    "was deleted, or belongs to another key"
                )
                raise ApiError(404, message, param="id", code="answer_not_captured")
            if choice >= known.choices:
                message = f"this answer has {known.choices} choices: give a choice below that"
                raise ApiError(400, message, param="choice", code="invalid_value")
            if known.feedback >= MOST_FEEDBACK:
                message = f"this answer has feedback {MOST_FEEDBACK} times already, which is the most"
                raise ApiError(400, message, param="id", code="too_much_feedback")
            record = {"kind": "feedback", "id": answer, "choice": choice, "time": round(time.time(), 3)}
            about = {name: value for name, value in asdict(known).items() if name not in ("choices", "feedback")}
            self.recorder.add(record | about | given)
            return known

        return await self._run(work)

    async def delete(self, user: str, client: str | None) -> int:
        """Delete all records of a user, and return their number. Raises ApiError, 503, if files cannot be changed."""
        return await self._run(lambda: self.recorder.delete(user, client))

    async def _run(self, work: Callable[[], Any]) -> Any:
        """Run work in the recorder's thread, after all slips that came before it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        if not self.recorder.put(RecorderJob(work, lambda *ended: loop.call_soon_threadsafe(settle, *ended))):
            message = "captures are behind: send this again in a moment"
            raise ApiError(503, message, code="captures_busy", headers={"Retry-After": "1"})
        try:
            return await future
        except (OSError, ValueError) as error:
            text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise ApiError(
                503, f"captures cannot be written now ({text}): send this again later", code="captures_stopped"
            ) from None

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self.recorder.close()


def _drift_metrics(report: dict[str, Any]) -> Iterator[Metric]:
    """Yield a report on drift as metrics."""
    p = GaugeMetricFamily("transect_drift_p_value", "p-value of the newest window, by test", labels=["test"])
    statistic = GaugeMetricFamily(
        "transect_drift_statistic", "Statistic of the newest window, by test", labels=["test"]
    )
    for test in report["tests"]:
        p.add_metric([test["name"]], test["p"])
        statistic.add_metric([test["name"]], test["statistic"])
    yield p
    yield statistic
    yield CounterMetricFamily("transect_drift_windows", "Windows that were tested for drift", value=report["windows"])
    text = "Time of the newest report on drift, in seconds since 1970"
    yield GaugeMetricFamily("transect_drift_report_time_seconds", text, value=report["time"])
