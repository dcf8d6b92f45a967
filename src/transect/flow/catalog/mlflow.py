"""Versions that are in MLflow's registry too: with tags for their lineage, and an alias for the current one.

Files stay in the directory from which servers load them; MLflow's version points there. The alias ``current`` decides:
a version that gets it in MLflow is promoted here as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .models import FlowModel
from .versions import CURRENT, REJECTED, ModelVersion, VersionCatalog

TAG = "transect."
LONGEST_TAG = 4900
"""Characters of a tag's value; MLflow refuses more than 5,000."""


class MlflowCatalog(VersionCatalog):
    """The versions in a directory and in MLflow.

    Args:
        path: as of ``VersionCatalog``.
        address: of the registry: ``http://HOST:5000``, ``sqlite:///FILE`` or a directory.

    Raises:
        ValueError: MLflow is not installed, or cannot be reached there.
    """

    def __init__(self, path: Path, address: str) -> None:
        super().__init__(path)
        self._address = address
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise ValueError(
                f'register.mlflow = "{address}" needs mlflow: pip install \'transect[track]\', or set it to ""'
            ) from None
        self._client: Any = self._try(lambda: MlflowClient(tracking_uri=address, registry_uri=address))

    def add(self, model: str, weights: FlowModel, folder: Path, lineage: Mapping[str, Any]) -> ModelVersion:
        """Register a model in both places. Raises ValueError as ``VersionCatalog.add``, or if MLflow refuses."""
        added = super().add(model, weights, folder, lineage)
        if self._number(added) is None:
            tags = {
                f"{TAG}{name}": (value if isinstance(value, str) else json.dumps(value, default=str))[:LONGEST_TAG]
                for name, value in added.lineage.items()
            }
            if not self._try(lambda: self._client.search_registered_models(f"name = '{model}'")):
                self._try(lambda: self._client.create_registered_model(model))
            source = str((self.path / added.name).resolve())
            self._try(lambda: self._client.create_model_version(model, source=source, tags=tags))
        return added

    def promote(self, version: ModelVersion, reason: str) -> None:
        """Make a version the current one, in both places."""
        super().promote(version, reason)
        self._mark(version, CURRENT, reason)
        number = self._number(version)
        self._try(lambda: self._client.set_registered_model_alias(version.lineage["model"], CURRENT, number))

    def reject(self, version: ModelVersion, reason: str) -> None:
        """Note in both places that a version was rolled back."""
        super().reject(version, reason)
        self._mark(version, REJECTED, reason)

    def _current_name(self, model: str) -> str:
        aliases: dict[str, str] = {}
        for found in self._try(lambda: self._client.search_registered_models(f"name = '{model}'")):
            aliases = dict(found.aliases)
        if CURRENT not in aliases:
            return ""
        found = self._try(lambda: self._client.get_model_version(model, aliases[CURRENT]))
        name = found.tags.get(f"{TAG}version", "")
        if not name:
            raise ValueError(
                f"version {aliases[CURRENT]} of {model} in MLflow was not registered by a flow: move the alias "
                f"{CURRENT} to one that was"
            )
        return str(name)

    def _number(self, version: ModelVersion) -> str | None:
        """Return MLflow's number of a version; None if it is not registered there."""
        model = version.lineage["model"]
        for found in self._try(lambda: self._client.search_model_versions(f"name = '{model}'")):
            if found.tags.get(f"{TAG}version") == version.name:
                return str(found.version)
        return None

    def _mark(self, version: ModelVersion, state: str, reason: str) -> None:
        model, number = version.lineage["model"], self._number(version)
        for key, value in (("state", state), ("reason", reason[:LONGEST_TAG])):
            self._try(lambda key=key, value=value: self._client.set_model_version_tag(model, number, TAG + key, value))

    def _try(self, ask: Any) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            return ask()
        except MlflowException as error:
            raise ValueError(
                f"MLflow at {self._address} refuses: {error}. Correct register.mlflow or MLFLOW_TRACKING_URI"
            ) from error
