"""Released names: a name in ``model`` that stands for versions (the model or adapters of this server) with weights.

A request with a user, a session or a conversation always gets the same version, by a hash of them; one without is drawn
by weight. The choice is weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted distributed hash tables",
2005): each version has a score of the key, and the highest wins. If a version's weight grows, users come to it and none
moves between the others, so a canary that is widened keeps its users.

Answers name the version: in their field ``model``, and in the header ``X-Transect-ReleasedVersion`` beside
``X-Transect-Release``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily

from ..flow.watch.refusals import is_refusal
from .capture.slips import RequestContent, fits_form, form_of, split_answer
from .http.errors import ApiError, nearest
from .operations import request_log
from .operations.metrics import BETWEEN_TOKENS_S, FIRST_TOKEN_S

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from ..text.outputs import RequestOutput

MOST_VERSIONS = 16
MOST_RELEASES = 256
MOST_NAME = 256


@dataclass(frozen=True, slots=True)
class ReleasedVersion:
    """A version of a release: a served model or adapter, and its weight relative to the others."""

    model: str
    weight: float


def choose_version(versions: Sequence[ReleasedVersion], key: str) -> ReleasedVersion:
    """Choose a version for a key: always the same one, and each for its share of keys.

    Raises:
        ValueError: no version has a positive weight.
    """
    able = [version for version in versions if version.weight > 0]
    if not able:
        raise ValueError("no version of the release has a positive weight: give one to at least one of them")

    def score(version: ReleasedVersion) -> float:
        digest = hashlib.blake2b(f"{version.model}\0{key}".encode(errors="replace"), digest_size=8).digest()
        uniform = (int.from_bytes(digest, "big") + 0.5) / 2**64
        return -version.weight / math.log(uniform)

    return max(able, key=score)


@dataclass(frozen=True, slots=True)
class Release:
    """A released name with its versions.

    Attributes:
        changed: seconds since 1970.
    """

    name: str
    versions: tuple[ReleasedVersion, ...]
    changed: float = field(default_factory=time.time)


class Releases:
    """The releases of a server.

    Args:
        registry: of metrics.
        served: returns the names of versions that exist.
        file: JSON file with releases by name, which changes are written to; None for no file.

    Raises:
        ValueError: the file cannot be used.
    """

    def __init__(self, registry: CollectorRegistry, served: Callable[[], Iterable[str]], file: str | None) -> None:
        self._served = served
        self._file = None if file is None else Path(file)
        self._releases: dict[str, Release] = {}
        self._series: dict[tuple[str, str], VersionSeries] = {}
        labels = ["release", "version"]

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"transect_version_{name}", text, [*labels, *more], registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"transect_version_{name}", text, labels, buckets=buckets, registry=registry)

        self._metrics = {
            "requests": counter("requests", "Requests of a release, by the version that was chosen"),
            "errors": counter("errors", "Requests of a version that failed in the server"),
            "answers": counter("answers", "Complete answers of a version"),
            "refusals": counter("refusals", "Answers of a version that refuse, by their first words"),
            "formed": counter("formed_answers", "Complete answers of a version for which a form was requested"),
            "failures": counter("schema_failures", "Answers of a version without the requested form"),
            "feedback": counter("feedback", "Feedback on answers of a version, by verdict", "verdict"),
            "score": counter("feedback_score", "Sum of the feedback's scores, each from 0 to 1"),
            "scored": counter("feedback_scores", "Feedback with a score or a thumb"),
            "first_token": histogram(
                "time_to_first_token_seconds", "Arrival to first token of a version", FIRST_TOKEN_S
            ),
            "between": histogram(
                "inter_token_latency_seconds", "Mean time between tokens of an answer of a version", BETWEEN_TOKENS_S
            ),
        }
        registry.register(self)

    def start(self) -> None:
        """Read the file of releases, if it exists. Raises ValueError."""
        if self._file is None or not self._file.exists():
            return
        for name, versions in releases_in(self._file).items():
            try:
                self._put(name, versions)
            except ApiError as error:
                raise ValueError(f"--releases {self._file}, release {name!r}: {error.message}") from None

    def collect(self) -> Iterator[Metric]:
        """Yield weights and running requests as metrics; called by prometheus-client."""
        labels = ["release", "version"]
        share = GaugeMetricFamily("transect_version_share", "Share of a release's keys, 0 to 1", labels=labels)
        running = GaugeMetricFamily("transect_version_running", "Running requests of a version", labels=labels)
        for release in list(self._releases.values()):
            total = sum(version.weight for version in release.versions)
            for version in release.versions:
                share.add_metric([release.name, version.model], version.weight / total)
        for (name, model), series in list(self._series.items()):
            running.add_metric([name, model], series.running)
        yield share
        yield running

    def names(self) -> list[str]:
        """List the released names."""
        return list(self._releases)

    def choose(self, name: str, key: str) -> VersionSeries | None:
        """Choose the version for a request; None if the name is not released.

        Args:
            key: of the sender; if empty, the version is drawn.
        """
        release = self._releases.get(name)
        if release is None:
            return None
        version = choose_version(release.versions, f"{name}\0{key or os.urandom(16).hex()}")
        request_log.note(release=name, version=version.model)
        return self.series(name, version.model)

    def series(self, name: str, model: str) -> VersionSeries:
        """Return the metrics of a version of a release."""
        series = self._series.get((name, model))
        if series is None:
            series = self._series[name, model] = VersionSeries(name, model, self._metrics)
        return series

    def using(self, model: str) -> list[str]:
        """List the releases that have this version."""
        return [each.name for each in self._releases.values() if any(v.model == model for v in each.versions)]

    def state(self, name: str) -> dict[str, Any]:
        """Return a release as JSON data: versions with weights, shares and running requests, and versions that were
        taken out while requests ran.

        Raises:
            ApiError: 404 if there is none of this name.
        """
        release = self._releases.get(name)
        if release is None:
            hint = nearest(name[:100], self._releases)
            raise ApiError(404, f"there is no release {name[:100]!r}{hint}", param="name", code="release_not_found")
        total = sum(version.weight for version in release.versions)
        shown = [
            {
                "model": version.model,
                "weight": version.weight,
                "share": version.weight / total,
                "running": self.series(name, version.model).running,
            }
            for version in release.versions
        ]
        return {
            "object": "release",
            "name": name,
            "changed": round(release.changed, 3),
            "versions": shown,
            "draining": self._draining(name, {version.model for version in release.versions}),
        }

    def put(self, name: str, versions: Sequence[ReleasedVersion]) -> dict[str, Any]:
        """Release a name, or change its versions, and return its description. Running requests keep their version.

        Raises:
            ApiError: 400 for versions that are not served, or values out of range; 409 if the name is a model's.
        """
        before = dict(self._releases)
        self._put(name, versions)
        self._save(before)
        return self.state(name)

    def delete(self, name: str) -> list[dict[str, Any]]:
        """Take a name back, and return its versions with running requests. Raises ApiError, 404."""
        self.state(name)
        before = dict(self._releases)
        del self._releases[name]
        self._save(before)
        return self._draining(name, set())

    def _put(self, name: str, versions: Sequence[ReleasedVersion]) -> None:
        served = list(self._served())
        if name in served:
            message = f"{name[:100]!r} is the name of a served model: release under another name"
            raise ApiError(409, message, param="name", code="name_in_use")
        if not name or len(name) > MOST_NAME or not name.isprintable():
            raise ApiError(400, f"a release's name has 1 to {MOST_NAME} printable characters", param="name")
        if name not in self._releases and len(self._releases) >= MOST_RELEASES:
            raise ApiError(400, f"there are {MOST_RELEASES} releases, which is the most: delete one", param="name")
        if not 0 < len(versions) <= MOST_VERSIONS:
            message = f"versions must hold 1 to {MOST_VERSIONS} versions, got {len(versions)}"
            raise ApiError(400, message, param="versions", code="invalid_value")
        models = [version.model for version in versions]
        for version in versions:
            if version.model not in served:
                hint = nearest(version.model[:100], served) or f"; this server has {', '.join(map(repr, served))}"
                message = f"the version {version.model[:100]!r} is not served{hint}"
                raise ApiError(400, message, param="versions", code="version_not_served")
            if models.count(version.model) > 1:
                message = f"versions names {version.model!r} twice: add the weights up"
                raise ApiError(400, message, param="versions", code="invalid_value")
            if not (math.isfinite(version.weight) and 0 <= version.weight <= 1e9):
                message = f"weight must be a number from 0 to 1e9, got {version.weight}"
                raise ApiError(400, message, param="versions", code="invalid_value")
        if not any(version.weight > 0 for version in versions):
            message = "all weights are 0: give one version a positive weight"
            raise ApiError(400, message, param="versions", code="invalid_value")
        self._releases[name] = Release(name, tuple(versions))

    def _draining(self, name: str, current: set[str]) -> list[dict[str, Any]]:
        old = [(model, each) for (of, model), each in self._series.items() if of == name and model not in current]
        return [{"model": model, "running": each.running} for model, each in old if each.running]

    def _save(self, before: Mapping[str, Release]) -> None:
        """Write the file; a release that cannot be written is not changed. Raises ApiError, 500."""
        if self._file is None:
            return
        data = {
            each.name: {"versions": [{"model": v.model, "weight": v.weight} for v in each.versions]}
            for each in self._releases.values()
        }
        fresh = self._file.with_name(self._file.name + ".new")
        try:
            fresh.write_text(json.dumps(data, indent=1) + "\n")
            fresh.replace(self._file)
        except OSError as error:
            self._releases = dict(before)
            message = f"the file of --releases cannot be written ({error.strerror}), and the release is as before"
            raise ApiError(500, message, code="releases_not_saved") from None


class VersionSeries:
    """The metrics of a version of a release.

    Attributes:
        running: requests that run now.
    """

    def __init__(self, release: str, model: str, metrics: Mapping[str, Any]) -> None:
        self.release, self.model, self.running = release, model, 0
        self._feedback = metrics["feedback"]
        self._metrics = {name: metric.labels(release, model) for name, metric in metrics.items() if name != "feedback"}

    def begin(self) -> None:
        """Count a request that begins."""
        self.running += 1
        self._metrics["requests"].inc()

    def end(self, failed: bool) -> None:
        """Count a request that has ended."""
        self.running -= 1
        if failed:
            self._metrics["errors"].inc()

    def timed(self, first_token_s: float | None, last_token_s: float, tokens: float) -> None:
        """Take the times of a request since its arrival, and its number of tokens."""
        if first_token_s is not None:
            self._metrics["first_token"].observe(first_token_s)
            if tokens > 1:
                self._metrics["between"].observe((last_token_s - first_token_s) / (tokens - 1))

    def answered(self, asked: RequestContent, result: RequestOutput) -> None:
        """Count refusals among complete answers, and answers without their form."""
        form = form_of(asked.params)
        for output in result.outputs:
            _, text, calls = split_answer(output, asked.reader)
            self._metrics["answers"].inc()
            self._metrics["refusals"].inc(is_refusal(text))
            if form:
                self._metrics["formed"].inc()
                self._metrics["failures"].inc(not fits_form(form, text, bool(calls), output.finish_reason))

    def judged(self, verdict: str, score: float | None) -> None:
        """Count feedback; ``score`` from 0 to 1, or None."""
        self._feedback.labels(self.release, self.model, verdict).inc()
        if score is not None:
            self._metrics["score"].inc(score)
            self._metrics["scored"].inc()


def releases_in(path: Path) -> dict[str, list[ReleasedVersion]]:
    """Read a file of releases: ``{"NAME": {"versions": [{"model": ..., "weight": ...}]}}``.

    Raises:
        ValueError: it cannot be read, or has another form.
    """
    form = '{"NAME": {"versions": [{"model": "...", "weight": 1}]}}'
    try:
        data = json.loads(path.read_text())
        return {
            name: [ReleasedVersion(str(each["model"]), float(each.get("weight", 1.0))) for each in release["versions"]]
            for name, release in data.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--releases {path} cannot be read ({error}): give JSON such as {form}") from None
