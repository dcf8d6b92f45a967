"""Versions of models: numbers, lineage, states and what is said of damaged files; the same in MLflow's registry."""

import json
import shutil

import numpy as np
import pytest
from killed_flows import MODEL
from safetensors.numpy import save_file

from transect.flow.catalog.mlflow import MlflowCatalog
from transect.flow.catalog.models import model_of, newest_model
from transect.flow.catalog.versions import VersionCatalog


def save_adapter(folder, base, value: float = 0.0):
    folder.mkdir(parents=True, exist_ok=True)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: np.full((2, 16), value, np.float32)}, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "train_state.json").write_text("{}")
    return folder


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    save_file({"a": np.zeros(4, np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture(params=["files", "mlflow"])
def catalog(request, tmp_path, monkeypatch):
    if request.param == "files":
        return VersionCatalog(tmp_path / "registry")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return MlflowCatalog(tmp_path / "registry", f"file://{tmp_path / 'mlflow'}")


def add(catalog, base, folder, value: float = 0.0, made_from: str = "x"):
    adapter = save_adapter(folder, base, value)
    return catalog.add(
        "units",
        model_of(str(adapter)),
        adapter,
        {"made_from": made_from, "start": "", "against": "", "data": {"version": "d1"}},
    )


def test_versions_count_up_and_equal_ones_are_one(catalog, base, tmp_path) -> None:
    first = add(catalog, base, tmp_path / "a")
    again = add(catalog, base, tmp_path / "a")
    second = add(catalog, base, tmp_path / "b", value=1.0)
    other_origin = add(catalog, base, tmp_path / "b", value=1.0, made_from="y")
    assert [each.name for each in (first, again, second, other_origin)] == [
        "units-v1",
        "units-v1",
        "units-v2",
        "units-v3",
    ]
    assert [each.name for each in catalog.versions("units")] == ["units-v1", "units-v2", "units-v3"]
    assert first.state == "candidate" and first.lineage["data"] == {"version": "d1"}
    assert first.model.digest != second.model.digest
    assert not (catalog.path / "units-v1" / "train_state.json").exists()
    shutil.rmtree(tmp_path / "a")
    assert catalog.version("units-v1").model.digest == first.model.digest  # its files are its own


def test_states_have_reasons_and_a_rejected_version_gives_way(catalog, base, tmp_path) -> None:
    first, second = (add(catalog, base, tmp_path / str(value), value) for value in (0.0, 1.0))
    assert catalog.current("units") is None
    catalog.promote(first, "the gate")
    catalog.promote(first, "again")
    catalog.promote(second, "better")
    assert catalog.current("units").name == second.name
    assert catalog.version(first.name).state == "former"
    found = catalog.version(second.name)
    assert (found.state, found.reason, found.replaced) == ("current", "better", first.name)
    catalog.reject(found, "slow")
    assert catalog.current("units").name == first.name
    assert catalog.version(second.name).state == "rejected"
    catalog.promote(catalog.version(second.name), "fast again")
    third = add(catalog, base, tmp_path / "c", 3.0)
    catalog.reject(third, "refuses")
    catalog.reject(catalog.version(third.name), "twice")
    assert (catalog.version(third.name).state, catalog.version(third.name).reason) == ("rejected", "refuses")
    assert catalog.current("units").name == second.name


def test_a_missing_current_version_is_named(catalog, base, tmp_path) -> None:
    catalog.promote(add(catalog, base, tmp_path / "a"), "good")
    shutil.rmtree(catalog.path / "units-v1")
    with pytest.raises(ValueError, match=r"units-v1, the current version of units, is missing: restore it"):
        catalog.current("units")


def test_the_alias_in_mlflow_decides(base, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    catalog = MlflowCatalog(tmp_path / "registry", f"file://{tmp_path / 'mlflow'}")
    first, second = (add(catalog, base, tmp_path / str(value), value) for value in (0.0, 1.0))
    catalog.promote(second, "better")
    client = catalog._client
    version = client.get_model_version_by_alias("units", "current")
    assert version.tags["transect.version"] == "units-v2" and version.tags["transect.reason"] == "better"
    assert json.loads(version.tags["transect.data"]) == {"version": "d1"}
    client.set_registered_model_alias("units", "current", "1")
    assert catalog.current("units").name == first.name
    with pytest.raises(ValueError, match=r"MLflow at .* refuses: .*register.mlflow"):
        MlflowCatalog(tmp_path / "registry", "nonsense://x").current("units")


def test_a_disk_that_refuses_leaves_no_half_version(base, tmp_path, monkeypatch) -> None:
    catalog = VersionCatalog(tmp_path / "registry")
    adapter = save_adapter(tmp_path / "a", base)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("transect.flow.catalog.versions._link", full)
        with pytest.raises(ValueError, match=r"cannot write .*units-v1 \(No space left on device\)"):
            catalog.add("units", model_of(str(adapter)), adapter, {})
    assert catalog.versions("units") == []
    assert catalog.add("units", model_of(str(adapter)), adapter, {}).name == "units-v1"


def test_models_are_told_apart_by_their_weights(base, tmp_path) -> None:
    adapter = save_adapter(tmp_path / "a", base)
    moved = tmp_path / "elsewhere"
    shutil.copytree(base, moved)
    assert model_of(str(base)).digest == model_of(str(moved)).digest
    assert model_of(str(adapter), base=str(moved)).digest == model_of(str(adapter)).digest
    save_file({"a": np.ones(4, np.float32)}, moved / "model.safetensors")
    assert model_of(str(adapter), base=str(moved)).digest != model_of(str(adapter)).digest
    with pytest.raises(ValueError, match="has no checkpoint"):
        newest_model(tmp_path)
