"""Prometheus metrics of one server, in a registry of its own so that several servers can live in one process.

Latencies are seen from the server (what a client waits for, without the network); queue, KV and prefix-cache numbers
are the engine's own, read at the moment of a scrape.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from .drift import NAME as DRIFT_ALARM
from .drift import DriftWatch
from .metric_names import shown

if TYPE_CHECKING:
    from ...engine.scheduling.outputs import RequestTimes, SchedulerStats

FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2.5)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)


class EngineCollector:
    """Converts the last ``SchedulerStats`` to metrics; before any arrive, it reports only that the engine is down."""

    def __init__(self) -> None:
        self.stats: SchedulerStats | None = None
        self.drift = DriftWatch()
        self.alarms: list[Callable[[], Mapping[str, bool]]] = [lambda: {DRIFT_ALARM: self.drift.raised}]
        """Functions that return alarms by name, each True while it is raised."""
        self.up = False

    def take(self, stats: SchedulerStats) -> None:
        """Take the engine's newest numbers."""
        self.stats = stats
        self.drift.look(stats)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of a scrape; called by prometheus-client."""
        yield _gauge("transect_engine_up", "1 while the engine answers, 0 when it is hung or dead", float(self.up))
        alarm = GaugeMetricFamily("transect_alarm", "1 while an alarm is raised", labels=["name"])
        for name, raised in itertools.chain.from_iterable(alarms().items() for alarms in self.alarms):
            alarm.add_metric([name], float(raised))
        yield alarm
        stats = self.stats
        if stats is None:
            return
        yield _gauge("transect_requests_waiting", "Requests in the queue", stats.waiting)
        yield _gauge("transect_sequences_preempted", "Sequences waiting to be recomputed", stats.preempted)
        yield _gauge("transect_sequences_running", "Sequences that hold KV blocks", stats.running)
        yield _gauge("transect_kv_blocks", "KV blocks of the pool", stats.kv_blocks_total)
        yield _gauge("transect_kv_blocks_used", "KV blocks that a running sequence refers to", stats.kv_blocks_used)
        yield _gauge("transect_kv_blocks_cached", "Free KV blocks kept for the prefix cache", stats.kv_blocks_cached)
        text = "Memory of compiled grammars that are kept, in bytes"
        yield _gauge("transect_grammar_cache_bytes", text, stats.grammar_cache_bytes)
        text = "Measured over predicted time of the last steps; far from 1, StepTimeDrift is raised"
        yield _gauge("transect_step_time_ratio", text, self.drift.ratio)
        usage = stats.kv_blocks_used / max(stats.kv_blocks_total, 1)
        yield _gauge("transect_kv_cache_usage_ratio", "Share of the KV pool in use, 0 to 1", usage)
        hit_rate = stats.prefix_hit_tokens / max(stats.prefix_query_tokens, 1)
        yield _gauge("transect_prefix_cache_hit_ratio", "Prompt tokens found in the prefix cache, 0 to 1", hit_rate)
        for name, text, value in (
            (
                "transect_prefix_cache_query_tokens",
                "Prompt tokens looked up in the prefix cache",
                stats.prefix_query_tokens,
            ),
            ("transect_prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache", stats.prefix_hit_tokens),
            ("transect_preemptions", "Sequences put back to be recomputed for want of KV blocks", stats.preemptions),
            ("transect_kv_evictions", "Cached KV blocks whose contents were dropped for new ones", stats.kv_evictions),
            ("transect_engine_steps", "Steps of the engine", stats.steps),
            ("transect_timed_steps", "Steps whose time was measured", stats.timed_steps),
            ("transect_step_seconds", "Time of the timed steps", stats.step_seconds),
            ("transect_predicted_step_seconds", "Time predicted for the timed steps", stats.predicted_step_seconds),
            ("transect_draft_tokens", "Tokens drafted for verification", stats.drafted_tokens),
            ("transect_accepted_tokens", "Drafted tokens that were right", sum(stats.accepted_at.values())),
            ("transect_late_captures", "CUDA graphs captured after the start", stats.late_captures),
            ("transect_late_compilations", "Kernels compiled or loaded after the start", stats.late_compilations),
        ):
            family = CounterMetricFamily(name, text)
            family.add_metric([], value)
            yield family
        text = "Drafted tokens that were right, by their place among the drafts of a sequence"
        family = CounterMetricFamily("transect_accepted_tokens_per_position", text, labels=["position"])
        for position, count in stats.accepted_at.items():
            family.add_metric([position], count)
        yield family


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


class Tally:
    """A counter without labels for events of every token. Only the event loop changes it, so it has no lock."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name, self._text = name, text
        self.value = 0
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of a scrape; called by prometheus-client."""
        family = CounterMetricFamily(self._name, self._text)
        family.add_metric([], self.value)
        yield family


class TokenHistogram:
    """A histogram without labels for events of every token. Only the event loop changes it, so it has no lock."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._text, self._bounds = name, text, tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        """Add ``times`` observations of ``value``."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of a scrape; called by prometheus-client."""
        names = [*(floatToGoString(bound) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class _Shown:
    """A registry's metrics as they are shown; the interface that ``generate_latest`` reads."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry, self._model_name = registry, model_name

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as they are shown."""
        return shown(self._registry.collect(), self._model_name)


class Metrics:
    """The counters and histograms of one server.

    Args:
        model_name: the label of all of them.
    """

    def __init__(self, model_name: str = "") -> None:
        self._model_name = model_name
        registry = CollectorRegistry()
        self.registry = registry
        self.engine = EngineCollector()
        registry.register(self.engine)
        self.prompt_tokens = Counter("transect_prompt_tokens", "Prompt tokens of accepted requests", registry=registry)
        self.generation_tokens = Tally("transect_generation_tokens", "Tokens generated", registry)
        self.finished = Counter(
            "transect_choices_finished", "Choices ended, by finish reason", ["finish_reason"], registry=registry
        )
        self.responses = Counter("transect_http_responses", "HTTP answers", ["route", "status"], registry=registry)
        self.first_token = Histogram(
            "transect_time_to_first_token_seconds", "Arrival to first token", buckets=FIRST_TOKEN_S, registry=registry
        )
        self.between_tokens = TokenHistogram(
            "transect_inter_token_latency_seconds", "From a token of a choice to its next", BETWEEN_TOKENS_S, registry
        )
        self.whole = Histogram(
            "transect_request_latency_seconds", "Arrival to last token", buckets=WHOLE_S, registry=registry
        )

        self.queue_time, self.prefill_time, self.decode_time, self.inference_time = (
            Histogram(f"transect_{name}_time_seconds", text, buckets=WHOLE_S, registry=registry)
            for name, text in (
                ("queue", "Arrival in the engine to the first step of a request"),
                ("prefill", "First step of a request to its first token"),
                ("decode", "First token of a request to its last"),
                ("inference", "First step of a request to its last token"),
            )
        )
        self.time_per_token = Histogram(
            "transect_request_time_per_output_token_seconds",
            "Mean time of a token of a request after its first",
            buckets=BETWEEN_TOKENS_S,
            registry=registry,
        )
        self.choices = Histogram("transect_request_choices", "n of a request", buckets=LENGTHS[:6], registry=registry)
        self.max_tokens = Histogram(
            "transect_request_max_tokens", "max_tokens of a request that has it", buckets=LENGTHS, registry=registry
        )
        self.prompt_length, self.generation_length, self.longest_length = (
            Histogram(f"transect_request_{name}_tokens", text, buckets=LENGTHS, registry=registry)
            for name, text in (
                ("prompt", "Prompt tokens of a request"),
                ("generation", "Tokens generated for a request, all choices together"),
                ("longest_generation", "Tokens of a request's longest choice"),
            )
        )

    def render(self) -> bytes:
        """Write all metrics in Prometheus' text format."""
        return generate_latest(_Shown(self.registry, self._model_name))  # type: ignore[arg-type]


class RequestTimer:
    """Feeds the histograms for one engine request. Times are seconds of one monotonic clock.

    Args:
        metrics: of the server.
        arrival: when the request came.
        prompt_tokens: its length.
        choices, max_tokens: values of the request.
    """

    def __init__(
        self, metrics: Metrics, arrival: float, prompt_tokens: int, choices: int = 1, max_tokens: int | None = None
    ) -> None:
        self._choices, self._max_tokens = choices, max_tokens
        self._running = choices
        self._metrics, self._arrival, self._prompt_tokens = metrics, arrival, prompt_tokens
        self._started = False
        self._first = 0.0
        self._last: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._times: RequestTimes | None = None

    def tokens(self, choice: int, count: int, now: float) -> None:
        """Record ``count`` tokens of ``choice`` that arrived at ``now``; tokens of one step share the time since the
        step before."""
        if not count:
            return
        metrics = self._metrics
        metrics.generation_tokens.value += count
        self._counts[choice] = self._counts.get(choice, 0) + count
        if not self._started:
            self._started = True
            metrics.prompt_tokens.inc(self._prompt_tokens)
            metrics.first_token.observe(now - self._arrival)
            self._first = now
        elif choice in self._last:
            metrics.between_tokens.observe((now - self._last[choice]) / count, count)
        self._last[choice] = now

    def engine_times(self, times: RequestTimes | None) -> None:
        """Keep the engine's times of a choice; the last call is for the choice that ends last."""
        self._times = times if times is not None else self._times

    def choice_finished(self, reason: str) -> None:
        """Count a choice that ended."""
        self._running -= 1
        self._metrics.finished.labels(reason).inc()

    def left(self) -> None:
        """Count the running choices as aborted: their client has disconnected, or their time limit has passed."""
        if self._running:
            self._metrics.finished.labels("abort").inc(self._running)

    def request_finished(self, now: float) -> None:
        """Record the times of a request whose last choice ended."""
        metrics, times = self._metrics, self._times
        metrics.whole.observe(now - self._arrival)
        metrics.prompt_length.observe(self._prompt_tokens)
        metrics.generation_length.observe(sum(self._counts.values()))
        longest = max(self._counts.values(), default=0)
        metrics.longest_length.observe(longest)
        metrics.choices.observe(self._choices)
        if self._max_tokens is not None:
            metrics.max_tokens.observe(self._max_tokens)
        if times is not None and times.first_scheduled is not None and times.first_token is not None:
            metrics.queue_time.observe(times.first_scheduled - times.arrival)
            metrics.prefill_time.observe(times.first_token - times.first_scheduled)
            # The engine does not know when a stop string ended a choice.
            ended = None if times.finished is None else times.finished - times.first_token
            decode = max(self._last.values()) - self._first if ended is None else ended
            metrics.decode_time.observe(decode)
            metrics.inference_time.observe(times.first_token - times.first_scheduled + decode)
            if longest > 1:
                metrics.time_per_token.observe(decode / (longest - 1))
