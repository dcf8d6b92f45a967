"""A fleet: replicas of an engine on any machines behind one router, which loses no byte when one of them dies.

* ``settings``: the fleet file.
* ``links``: authenticated connections. ``remote_engine``: the engine at the other end of one, as an ``AsyncEngine``.
* ``fleet``: the replicas at the router's end, as one engine: ``Replicas`` of ``engine/frontends`` with places that come
  and go. ``paces``: their speeds. ``host``: a replica at the other end. ``metrics``: the fleet in ``/metrics``.
* ``scaling``: decisions about the number of replicas, with reasons.
* ``router``: both as plain processes. ``manifests``: Kubernetes, KubeRay, systemd.
* ``ray_app``, ``ray_policy``, ``ray_cluster``: both as deployments of Ray Serve, the autoscaling policy there, and the
  commands. These modules alone import Ray.

``serve run transect.cluster:app file=FLEET.toml`` starts a fleet in a Ray cluster.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return ``app``, whose module imports Ray."""
    if name == "app":
        from .ray_app import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
