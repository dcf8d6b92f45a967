"""The fleet on Ray Serve: a deployment for the router, and one for the replicas.

The router is the fleet's HTTP server, with its own sockets, connection limits and streams. Ray starts it, watches it
and starts it again, and is in no request's way: tokens pass from a replica to the router over their link. For Ray
Serve's proxy the same application is an ASGI ingress.

Replicas are started, stopped, watched and counted by Ray Serve: ``check_health``, ``record_routing_stats``,
``record_autoscaling_stats``, a policy, and a destructor that lets streams finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from ..engine.frontends.streams import EngineDeadError
from ..server.app import create_app
from ..server.operations.request_log import configure
from ..server.process import bind, serve_until
from . import metrics
from .fleet import RemoteReplicas
from .host import Host, fresh
from .ray_policy import FleetPolicy
from .router import address, bind_links, ready_line
from .scaling import arguments
from .settings import FleetSettings, read

log = logging.getLogger("ray.serve")

STALE_S = 5.0
"""Age from which a report of the router is not shown to the autoscaler."""
BIND_S = 20.0
"""Seconds to wait for a port that the router before still has."""
ROUTER, REPLICAS = "Router", "Replica"
"""Names of the deployments."""


class FewestTokens(RequestRouter):
    """Ray Serve's choice among several routers of a fleet: the one with the fewest queued tokens. Which replica gets a
    request is decided in the router (``engine/scheduling/policies/routing.py``)."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates, one after another, fewest tokens first."""
        return [[each] for each in sorted(candidate_replicas, key=lambda each: queued(each.routing_stats))]


def queued(stats: dict[str, Any] | None) -> float:
    """Return the queued tokens in routing statistics; 0 if there are none yet."""
    return float((stats or {}).get("queued_tokens", 0.0))


@serve.ingress()
class RouterActor:
    """The router in an actor.

    Args:
        settings: of the fleet.
        listens: the HTTP server has its own socket at ``server.host`` and ``server.port``.
        replicas: handle of the replicas in the same application, which Ray starts therefore; they dial in.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, settings: FleetSettings, listens: bool, replicas: Any = None
    ) -> None:
        configure(settings.server.request_log, settings.server.log_level)
        self.settings, self._stop = settings, asyncio.Event()
        linking = await patiently(lambda: bind_links(settings))
        self.url = ""
        sock = None
        if listens:
            sock = await patiently(lambda: bind(settings.server.host, settings.server.port))
        self.fleet = await RemoteReplicas.listen(settings, linking)
        self._link_address = address(linking)
        self._serving = None if sock is None else asyncio.create_task(self._serve(sock))
        self._app: Any = None

    async def _serve(self, sock: Any) -> int:
        await self.fleet.first()

        def ready(fleet: RemoteReplicas) -> None:
            line = ready_line(self.settings, fleet, sock)
            self.url = line.split(" ready on ")[1].split()[0]
            log.warning(line)

        return await serve_until(self._stop, self.fleet, self.settings.server, sock, ready)

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application for Ray Serve's proxy."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "lifespan":
                for _ in range(2):
                    kind = (await receive())["type"]
                    await send({"type": f"{kind}.complete"})
                return
            await self.fleet.first()
            if self._app is None:
                self._app = create_app(self.fleet, self.settings.server)
            await self._app(scope, receive, send)

        return app

    async def link_address(self) -> tuple[str, int]:
        """Return the address on which replicas dial in, as other nodes reach it."""
        host, _, port = self._link_address.rpartition(":")
        if host in ("0.0.0.0", "::"):
            host = ray.util.get_node_ip_address()
        return host, int(port)

    async def state(self) -> dict[str, Any]:
        """Return the URL of the HTTP server, empty until the first replica is here, and the state of the fleet."""
        return {"url": self.url, **metrics.state_of(self.fleet)}

    def record_routing_stats(self) -> dict[str, float]:
        """Return the queued tokens of all replicas."""
        return {"queued_tokens": float(sum(each["queued_tokens"] for each in self.fleet.replicas()))}

    async def check_health(self) -> None:
        """Raise if the HTTP server has ended."""
        if self._serving is not None and self._serving.done():
            raise RuntimeError(f"the HTTP server has ended: {self._serving.exception() or self._serving.result()}")

    async def __del__(self) -> None:
        """Finish the running requests, within ``server.grace_s`` seconds."""
        self._stop.set()
        if self._serving is not None:
            with contextlib.suppress(Exception):
                await self._serving
        await self.fleet.shutdown()


class ReplicaActor:
    """A replica in an actor, with an engine process of its own.

    Args:
        settings: of the fleet.
        generation: number of the roll.
        router: name of the application of the router.
    """

    async def __init__(self, settings: FleetSettings, generation: int, router: str) -> None:  # type: ignore[misc]
        self.settings, self._router = settings, router
        self._host: Any = None
        name = serve.get_replica_context().replica_id.unique_id
        self._host = await Host.start(settings, name, self._find, generation)
        # Ray stops a replica of the generation before as soon as this one is ready: the router has to know it.
        async with asyncio.timeout(settings.replicas.start_timeout_s):
            while not self._host.linked:
                await asyncio.sleep(0.02)

    async def _find(self) -> tuple[str, int]:
        own = self.settings.links
        if own.port and (own.address or own.host not in ("0.0.0.0", "::")):
            return own.address or own.host, own.port
        try:
            handle = serve.get_deployment_handle(ROUTER, app_name=self._router)
            host, port = await asyncio.wait_for(handle.link_address.remote(), 5.0)
        except Exception as error:  # Ray's, of many kinds: the router is being started
            raise EngineDeadError(f"Ray does not know the router's address: {error}") from None
        return own.address or host, port

    async def pid(self) -> int:
        """Return the process id of the engine."""
        return self._host.pid

    def record_routing_stats(self) -> dict[str, float]:
        """Return the router's last report of this replica's work."""
        return fresh(self._host.load, STALE_S) or {}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the same for the autoscaler.

        Raises:
            RuntimeError: the report is too old; the autoscaler then knows that it does not see this replica.
        """
        found = fresh(self._host.load, STALE_S)
        if found is None:
            raise RuntimeError(f"the router has not reported the load of this replica for {STALE_S:g} s")
        return found

    async def check_health(self) -> None:
        """Raise if the engine could not be started again, so that Ray starts another replica."""
        if self._host.failure is not None:
            raise RuntimeError(f"the engine is given up: {self._host.failure}")

    async def __del__(self) -> None:
        """Leave the fleet after the last stream, or after ``replicas.drain_timeout_s`` seconds."""
        if self._host is not None:
            await self._host.retire()


async def patiently(make: Any) -> Any:
    """Bind a socket that the process before may still have."""
    until = time.monotonic() + BIND_S
    while True:
        try:
            return make()
        except ValueError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.2)


def router_app(settings: FleetSettings, listens: bool = True, replicas: Any = None) -> Any:
    """Return the application of the router. ``replicas``: those that are in the same application."""
    options: dict[str, Any] = {"num_cpus": 0}
    if settings.ray.router_on_head:
        options["resources"] = {"node:__internal_head__": 0.001}
    deployment: Any = serve.deployment(RouterActor)
    made = deployment.options(
        name=ROUTER,
        num_replicas=1,
        ray_actor_options=options,
        max_ongoing_requests=10_000,
        health_check_period_s=settings.ray.health_period_s,
        health_check_timeout_s=settings.ray.health_timeout_s,
        graceful_shutdown_timeout_s=settings.server.grace_s + 10.0,
        request_router_config={
            "request_router_class": FewestTokens,
            "request_routing_stats_period_s": settings.ray.health_period_s,
        },
    )
    return _versioned(made, 1).bind(settings, listens, replicas)


def replicas_app(settings: FleetSettings, router: str, generation: int = 1, count: int | None = None) -> Any:
    """Return the application of the replicas.

    Args:
        settings: of the fleet.
        router: name of the application of the router.
        generation: number of the roll; another number replaces all replicas, new before old, one at a time.
        count: number of replicas; None for the autoscaler's.
    """
    own, period = settings.replicas, settings.ray.health_period_s
    actor: dict[str, Any] = {"num_cpus": own.cpus, "num_gpus": settings.gpus}
    if own.memory_gb is not None:
        actor["memory"] = int(own.memory_gb * 1e9)
    decider = arguments(settings)
    if count is not None:  # Ray's replicas send no metrics any more after an update without a policy
        decider |= {"policy": "fixed", "least": count, "most": count}
    interval = min(1.0, settings.scaling.interval_s / 2)
    scaling = AutoscalingConfig(
        min_replicas=decider["least"],
        initial_replicas=decider["least"],
        max_replicas=decider["most"],
        metrics_interval_s=interval,
        look_back_period_s=2 * interval,
        upscale_delay_s=0.0,  # the policy has its own patience
        downscale_delay_s=0.0,
        policy=AutoscalingPolicy(policy_function=FleetPolicy, policy_kwargs=decider),
    )
    deployment: Any = serve.deployment(ReplicaActor)
    made = deployment.options(
        name=REPLICAS,
        ray_actor_options=actor,
        max_replicas_per_node=own.per_node,
        max_surge_percent=1,  # rounded up to one replica
        health_check_period_s=period,
        health_check_timeout_s=settings.ray.health_timeout_s,
        graceful_shutdown_timeout_s=own.drain_timeout_s + 15.0,
        request_router_config={"request_routing_stats_period_s": period},
        autoscaling_config=scaling,
    )
    return _versioned(made, generation).bind(settings, generation, router)


def _versioned(deployment: Any, version: int) -> Any:
    """Name the version of a deployment: Ray restarts its replicas if that, or their arguments, have changed. Ray has no
    public name for it; where the private one is ignored, each command restarts replicas, without loss but slowly."""
    deployment._version = str(version)
    return deployment


def app(arguments: dict[str, str]) -> Any:
    """Return a fleet in one application, for ``serve run transect.cluster:app file=FLEET.toml``.

    Requests come through Ray Serve's proxy; ``listen=true`` opens the fleet's own HTTP server too.

    Raises:
        ValueError: the file is at fault, or not given.
    """
    if "file" not in arguments:
        raise ValueError("give the fleet file: serve run transect.cluster:app file=FLEET.toml")
    settings = read(Path(arguments["file"]))
    name = arguments.get("name", "default")
    listens = arguments.get("listen", "false") == "true"
    return router_app(settings, listens, replicas_app(settings, name))
