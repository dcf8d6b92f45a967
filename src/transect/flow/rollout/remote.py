"""A server by HTTP: it loads adapters, splits a released name among versions, and counts what each version does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

COUNTERS = {
    "transect_version_requests_total": "requests",
    "transect_version_errors_total": "errors",
    "transect_version_answers_total": "answers",
    "transect_version_refusals_total": "refusals",
    "transect_version_formed_answers_total": "formed",
    "transect_version_schema_failures_total": "malformed",
    "transect_version_feedback_score_total": "liked",
    "transect_version_feedback_scores_total": "judged",
    "transect_version_time_to_first_token_seconds_count": "timed",
}
"""Names of counters in ``Counts``."""
TIMES = "transect_version_time_to_first_token_seconds_bucket"
FAST = "within "
"""Beginning of the names of counts by time to the first token: ``within 0.5``."""

Counts = dict[str, float]
"""Counts of a version by name, since its server started."""


class ServerUnreachable(ValueError):
    """The server does not answer; it may do so later."""


class RemoteServer:
    """A server that releases versions.

    Args:
        address: such as ``http://127.0.0.1:8000``.
        key: the operator's key; empty for none.
        setting: prefix of settings in messages.

    Every method raises ServerUnreachable if the server does not answer, and ValueError if it refuses.
    """

    def __init__(self, address: str, key: str = "", timeout_s: float = 60.0, setting: str = "release") -> None:
        self.address, self._setting = address.rstrip("/"), setting
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        secure = self.address.startswith("https")  # certificates take a while to load
        self._client = httpx.Client(
            base_url=self.address, headers=headers, timeout=timeout_s, trust_env=False, verify=secure
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def base(self) -> str:
        """Return the name of the model itself, below all adapters."""
        models = self._ask("GET", "/v1/models")["data"]
        return str(next(each["id"] for each in models if not each.get("parent")))

    def load(self, name: str, folder: Path) -> None:
        """Serve an adapter under a name; requests that run keep the files that they began with."""
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        self._ask("POST", "/v1/load_lora_adapter", body)

    def weights(self, name: str) -> dict[str, float]:
        """Return the share of each version of a release; empty if there is none of this name."""
        found = self._ask("GET", f"/v1/releases/{name}", missing=True)
        return {} if found is None else {each["model"]: each["share"] for each in found["versions"]}

    def release(self, name: str, weights: Mapping[str, float]) -> None:
        """Split a name among versions by weights."""
        body = {"versions": [{"model": model, "weight": weight} for model, weight in weights.items()]}
        self._ask("PUT", f"/v1/releases/{name}", body)

    def counts(self, name: str) -> dict[str, Counts]:
        """Return the counts of each version of a release."""
        found: dict[str, Counts] = defaultdict(dict)
        for family in text_string_to_metric_families(self._send("GET", "/metrics").text):
            for sample in family.samples:
                if sample.labels.get("release") != name:
                    continue
                version = found[sample.labels["version"]]
                if sample.name in COUNTERS:
                    version[COUNTERS[sample.name]] = sample.value
                elif sample.name == TIMES:
                    version[f"{FAST}{float(sample.labels['le']):g}"] = sample.value
        return dict(found)

    def _ask(self, method: str, path: str, body: Any = None, missing: bool = False) -> Any:
        response = self._send(method, path, body, missing)
        return None if response.status_code == 404 else response.json()

    def _send(self, method: str, path: str, body: Any = None, missing: bool = False) -> httpx.Response:
        try:
            response = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ServerUnreachable(
                f"the server at {self.address} does not answer ({type(error).__name__}): start it, or correct "
                f"{self._setting}.server, and run the flow again; it continues here"
            ) from None
        if response.status_code == 404 and missing:
            return response
        if response.status_code in (401, 403) and "adapter_directory" not in response.text:
            raise ValueError(
                f"the server at {self.address} asks for the operator's key ({response.status_code}): put it into the "
                f"environment variable that {self._setting}.key_variable names"
            )
        if response.status_code in (502, 503, 504):
            raise ServerUnreachable(f"the server at {self.address} is not ready ({response.status_code}): wait for it")
        if response.is_error:
            raise ValueError(f"the server at {self.address} refuses {method} {path}: {_message(response)}")
        return response


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.text[:200]}"
