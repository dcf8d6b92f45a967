"""Manifests are made from the fleet file, and each is valid by the schema of its kind."""

import os
import shutil
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from transect.cluster import settings
from transect.cluster.manifests import KEY, manifests

CRD = os.environ.get("TRANSECT_KUBERAY_CRD")
"""File with KubeRay's definition of a RayService: ``ray.io_rayservices.yaml`` of its Helm chart."""
TEXT = f"""
name = "chat"
[engine]
model = "smollm2-135m"
[server]
host = "0.0.0.0"
port = 8000
[replicas]
min = 2
max = 6
cpus = 4
gpus = 1
memory_gb = 24
drain_timeout_s = 90
[links]
host = "0.0.0.0"
address = "chat-router"
key_file = "{KEY}"
"""


def read(text=TEXT):
    import tomllib

    return settings.build(tomllib.loads(text))


def documents(form):
    (text,) = manifests(read(), TEXT, form, "registry.example/transect:1").values()
    return list(yaml.safe_load_all(text))


def test_kubernetes_manifests_are_valid_and_say_what_the_file_says():
    made = documents("kubernetes")
    for each in made:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in made}
    assert by_name["ConfigMap", "chat-fleet"]["data"]["fleet.toml"] == TEXT
    replicas = by_name["Deployment", "chat-replica"]["spec"]
    assert replicas["replicas"] == 2
    assert replicas["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    pod = replicas["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 90 and pod["securityContext"]["runAsNonRoot"]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    scaler = by_name["HorizontalPodAutoscaler", "chat-replica"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 6)
    links = by_name["NetworkPolicy", "chat-router"]["spec"]["ingress"][1]
    assert links["ports"] == [{"port": 8001}] and links["from"]


def test_the_validator_would_notice_a_mistake():
    made = documents("kubernetes")[1]
    made["spec"]["replica"] = made["spec"].pop("replicas")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(made, kubernetes_validate.latest_version(), strict=True)


def test_the_rayservice_has_valid_pods_and_a_valid_application():
    from ray.serve.schema import ServeDeploySchema

    config, service = documents("kuberay")
    kubernetes_validate.validate(config, kubernetes_validate.latest_version(), strict=True)
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    serve = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert serve.applications[0].import_path == "transect.cluster:app"
    cluster = service["spec"]["rayClusterConfig"]
    workers = cluster["workerGroupSpecs"][0]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (2, 6)
    for template in (cluster["headGroupSpec"]["template"], workers["template"]):
        labels = template["metadata"]["labels"]
        spec = {"selector": {"matchLabels": labels}, "template": template}
        pod = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def closed(schema):
    """Return a schema of a custom resource that refuses unknown fields, as ``kubectl apply --validate=strict`` does."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = {name: closed(each) for name, each in schema.items()}
    if "properties" in made and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


@pytest.mark.prove
@pytest.mark.skipif(CRD is None, reason="TRANSECT_KUBERAY_CRD does not name KubeRay's ray.io_rayservices.yaml")
def test_the_rayservice_fits_kuberays_own_schema():
    versions = yaml.safe_load(Path(CRD).read_text())["spec"]["versions"]
    schema = closed(next(each for each in versions if each["name"] == "v1")["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    service = documents("kuberay")[1]
    jsonschema.validate(service, schema)
    service["spec"]["rayClusterConfig"]["workerGroupSpec"] = []
    with pytest.raises(jsonschema.ValidationError, match="workerGroupSpec"):
        jsonschema.validate(service, schema)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({'host = "0.0.0.0"': 'host = "127.0.0.1"'}, 'set host = "0.0.0.0"'),
        ({'address = "chat-router"': ""}, 'set address = "chat-router"'),
        ({f'key_file = "{KEY}"': ""}, f'set key_file = "{KEY}"'),
    ],
)
def test_settings_that_cannot_work_there_are_refused(changed, message):
    text = TEXT
    for old, new in changed.items():
        text = text.replace(old, new)
    with pytest.raises(ValueError, match=message):
        manifests(read(text), text, "kubernetes", "image")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_systemd_accepts_the_units(tmp_path):
    made = manifests(read(), TEXT, "systemd", "")
    assert set(made) == {"chat-router.service", "chat-replica@.service"}
    for name, text in made.items():
        (tmp_path / name.replace("@", "@1")).write_text(text)
    files = [str(tmp_path / name.replace("@", "@1")) for name in made]
    found = subprocess.run(["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True)
    own = [line for line in found.stderr.splitlines() if "chat-" in line]
    assert found.returncode == 0 and not own, found.stderr
    broken = tmp_path / "chat-broken.service"
    broken.write_text(made["chat-router.service"].replace("Restart=always", "Restart=sometimes"))
    found = subprocess.run(["systemd-analyze", "verify", "--man=no", str(broken)], capture_output=True, text=True)
    assert "sometimes" in found.stderr
