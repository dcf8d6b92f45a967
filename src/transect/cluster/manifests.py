"""Manifests of a fleet: for Kubernetes (plain), for KubeRay, and units for systemd. All of them are made from the fleet
file, so that ports, sizes and times are written once."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .settings import FleetSettings

FORMS = ("kubernetes", "kuberay", "systemd")
"""Kinds of manifests."""
FILE, KEY, READY = "/etc/transect/fleet.toml", "/etc/transect-key/key", "/tmp/transect-linked"
"""Paths in containers: the fleet file, the key, and the file that exists while a replica is linked."""
USER = 10001
EXTRA_S = 15
"""Seconds between the end of the drain and SIGKILL."""


def manifests(settings: FleetSettings, text: str, form: str, image: str) -> dict[str, str]:
    """Return the files of a form, by name.

    Args:
        settings: of the fleet.
        text: the fleet file itself.
        form: one of ``FORMS``.
        image: container image with Transect, and with Ray for ``kuberay``.

    Raises:
        ValueError: the settings do not fit the form; the message says what to change.
    """
    if form not in FORMS:
        raise ValueError(f"there is no form {form!r}: give one of {', '.join(FORMS)}")
    if form == "systemd":
        return units(settings)
    if "127.0.0.1" in (settings.server.host, settings.links.host) or not settings.server.port:
        raise ValueError(
            'other pods have to reach the router: set host = "0.0.0.0" in [server] and [links], and a port in [server]'
        )
    if settings.links.key_file != KEY:
        raise ValueError(f'the key comes from a secret: set key_file = "{KEY}" in [links]')
    if form == "kubernetes" and settings.links.address != _router(settings):
        raise ValueError(f'replicas find the router by its service: set address = "{_router(settings)}" in [links]')
    made = (
        kubernetes(settings, text, image)
        if form == "kubernetes"
        else [*_config(settings, text), kuberay(settings, image)]
    )
    return {f"{settings.name}.yaml": "---\n".join(yaml.safe_dump(each, sort_keys=False) for each in made)}


def _router(settings: FleetSettings) -> str:
    return f"{settings.name}-router"


def _labels(settings: FleetSettings, part: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "transect", "app.kubernetes.io/instance": settings.name, "transect/part": part}


def _about(settings: FleetSettings, part: str, name: str | None = None) -> dict[str, Any]:
    return {"name": name or f"{settings.name}-{part}", "labels": _labels(settings, part)}


def _config(settings: FleetSettings, text: str) -> list[dict[str, Any]]:
    about = _about(settings, "config", f"{settings.name}-fleet")
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {"fleet.toml": text}}]


def _resources(settings: FleetSettings) -> dict[str, Any]:
    own = settings.replicas
    wanted: dict[str, Any] = {"cpu": f"{own.cpus:g}"}
    if own.memory_gb is not None:
        wanted["memory"] = f"{own.memory_gb:g}G"
    limits = {"nvidia.com/gpu": f"{settings.gpus:g}"} if settings.gpus else {}
    return {"requests": wanted, **({"limits": limits} if limits else {})}


def _pod(settings: FleetSettings, part: str, container: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Build the template of a pod: no rights, no token, and the fleet file and key as read-only files."""
    safe = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    mounts = [
        {"name": "fleet", "mountPath": str(Path(FILE).parent), "readOnly": True},
        {"name": "key", "mountPath": str(Path(KEY).parent), "readOnly": True},
        {"name": "cache", "mountPath": "/cache"},
    ]
    environment = [{"name": "TRANSECT_CACHE", "value": "/cache"}]
    return {
        "metadata": {"labels": _labels(settings, part)},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # variables named TRANSECT_... would look like settings
            "terminationGracePeriodSeconds": int(seconds) + EXTRA_S,
            "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER},
            "containers": [
                {"name": part, **container, "env": environment, "volumeMounts": mounts, "securityContext": safe}
            ],
            "volumes": [
                {"name": "fleet", "configMap": {"name": f"{settings.name}-fleet"}},
                {"name": "key", "secret": {"secretName": f"{settings.name}-key", "defaultMode": 0o440}},
                {"name": "cache", "emptyDir": {}},
            ],
        },
    }


def kubernetes(settings: FleetSettings, text: str, image: str) -> list[dict[str, Any]]:
    """Build plain manifests: one router, replicas that dial in, and who may connect to whom."""
    http, links = settings.server.port, settings.links.port
    health = {"path": f"{settings.server.root_path}/health", "port": "http"}
    probe = {"httpGet": {**health, "scheme": "HTTP" if settings.server.ssl_certfile is None else "HTTPS"}}
    router = {
        "image": image,
        "command": ["transect", "cluster", "router", FILE],
        "ports": [{"name": "http", "containerPort": http}, {"name": "links", "containerPort": links}],
        "readinessProbe": {**probe, "periodSeconds": 2, "failureThreshold": 1},
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}},
    }
    replica = {
        "image": image,
        "command": ["transect", "cluster", "replica", FILE, "--ready-file", READY],
        "readinessProbe": {"exec": {"command": ["test", "-e", READY]}, "periodSeconds": 2},
        "resources": _resources(settings),
    }

    def deployment(
        part: str, count: int, container: Mapping[str, Any], seconds: float, strategy: Any
    ) -> dict[str, Any]:
        spec = {
            "replicas": count,
            "selector": {"matchLabels": _labels(settings, part)},
            "strategy": strategy,
            "template": _pod(settings, part, container, seconds),
        }
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": _about(settings, part), "spec": spec}

    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}  # new before old
    ports = [
        {"name": "http", "port": http, "targetPort": "http"},
        {"name": "links", "port": links, "targetPort": "links"},
    ]
    service = {"selector": _labels(settings, "router"), "ports": ports, "publishNotReadyAddresses": True}
    own = {"matchLabels": _labels(settings, "replica")}
    rules = [{"ports": [{"port": http}]}, {"ports": [{"port": links}], "from": [{"podSelector": own}]}]
    closed = {"podSelector": own, "policyTypes": ["Ingress"], "ingress": []}
    opened = {"podSelector": {"matchLabels": _labels(settings, "router")}, "policyTypes": ["Ingress"], "ingress": rules}
    network = "networking.k8s.io/v1"
    drain = settings.replicas.drain_timeout_s
    keep = {"maxUnavailable": 1, "selector": own}
    return [
        *_config(settings, text),
        deployment("router", 1, router, settings.server.grace_s, {"type": "Recreate"}),
        deployment("replica", settings.replicas.min, replica, drain, rolling),
        {"apiVersion": "v1", "kind": "Service", "metadata": _about(settings, "router"), "spec": service},
        {"apiVersion": network, "kind": "NetworkPolicy", "metadata": _about(settings, "router"), "spec": opened},
        {"apiVersion": network, "kind": "NetworkPolicy", "metadata": _about(settings, "replica"), "spec": closed},
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": _about(settings, "replica"),
            "spec": keep,
        },
        *([_autoscaler(settings)] if settings.replicas.most > settings.replicas.min else []),
    ]


def _autoscaler(settings: FleetSettings) -> dict[str, Any]:
    """Build an autoscaler that follows the router's decisions; an adapter such as prometheus-adapter passes them on."""
    own = settings.replicas
    metric = {"name": "transect_fleet_wanted_replicas", "selector": {"matchLabels": {"fleet": settings.name}}}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"{settings.name}-replica"},
        "minReplicas": own.min,
        "maxReplicas": own.most,
        "metrics": [
            {
                "type": "External",
                "external": {"metric": metric, "target": {"type": "AverageValue", "averageValue": "1"}},
            }
        ],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},  # the router's policy has its own patience
    }
    kind = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler"}
    return {**kind, "metadata": _about(settings, "replica"), "spec": spec}


def kuberay(settings: FleetSettings, image: str) -> dict[str, Any]:
    """Build a ``RayService`` of KubeRay, whose application is that of ``serve run transect.cluster:app``."""
    arguments = {"file": FILE, "name": settings.name, "listen": "true"}
    serve = {
        "proxy_location": "Disabled",
        "applications": [
            {"name": settings.name, "route_prefix": "/", "import_path": "transect.cluster:app", "args": arguments}
        ],
    }
    own = settings.replicas
    head = _pod(settings, "head", {"image": image, "resources": {"requests": {"cpu": "1", "memory": "4Gi"}}}, 30)
    http = {"name": "http", "containerPort": settings.server.port}
    head["spec"]["containers"][0]["ports"] = [http, {"name": "links", "containerPort": settings.links.port}]
    worker = _pod(settings, "worker", {"image": image, "resources": _resources(settings)}, own.drain_timeout_s)
    groups = {
        "groupName": "replicas",
        "replicas": own.min,
        "minReplicas": own.min,
        "maxReplicas": own.most,
        "rayStartParams": {},
        "template": worker,
    }
    cluster = {
        "enableInTreeAutoscaling": own.most > own.min,
        "headGroupSpec": {"rayStartParams": {"dashboard-host": "0.0.0.0"}, "template": head},
        "workerGroupSpecs": [groups],
    }
    spec = {"serveConfigV2": yaml.safe_dump(serve, sort_keys=False), "rayClusterConfig": cluster}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": _about(settings, "service", settings.name),
        "spec": spec,
    }


def units(settings: FleetSettings) -> dict[str, str]:
    """Build systemd units: the router, and a template of replicas (``systemctl enable NAME-replica@1``)."""
    name = settings.name
    command = f"{shlex.quote(sys.executable)} -m transect cluster"
    file = f"/etc/transect/{name}.toml"
    state = f"transect-{name}"

    def unit(part: str, about: str, arguments: str, seconds: float) -> str:
        lines = (
            "[Unit]",
            f"Description=Transect fleet {name}: {about}",
            "After=network-online.target",
            "Wants=network-online.target",
            "",
            "[Service]",
            f"ExecStart={command} {part} {file}{arguments}",
            "Restart=always",
            "RestartSec=1",
            f"TimeoutStopSec={int(seconds) + EXTRA_S}",
            "KillMode=mixed",
            "DynamicUser=yes",
            f"StateDirectory={state}",
            f"Environment=TRANSECT_CACHE=%S/{state}",
            "NoNewPrivileges=yes",
            "ProtectSystem=strict",
            "ProtectHome=read-only",
            "PrivateTmp=yes",
            "",
            "[Install]",
            "WantedBy=multi-user.target",
        )
        return "\n".join(lines) + "\n"

    return {
        f"{name}-router.service": unit("router", "the router", "", settings.server.grace_s),
        f"{name}-replica@.service": unit("replica", "replica %i", " --name %H-%i", settings.replicas.drain_timeout_s),
    }
