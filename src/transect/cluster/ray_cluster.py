"""``transect cluster`` on Ray: start, roll, scale and stop a fleet.

A fleet is two applications of Ray Serve: ``NAME`` is the router, ``NAME-replicas`` the replicas. So a roll of the
replicas never touches the router, which has the streams. Where there is no Ray cluster, one is started on this machine,
and ended by ``down``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .settings import FleetSettings

STATE = "state.json"
"""Name of the file in a fleet's folder with its generation and its Ray cluster."""
START_S, STOP_S = 240.0, 30.0
"""Seconds for a Ray cluster of this machine to start, and to end."""
PROBE_S = 3.0
"""Seconds for a Ray cluster to accept a connection."""
CURRENT = Path("/tmp/ray/ray_current_cluster")
"""File in which Ray notes the address of this machine's cluster."""
TESTED = ("2.60.0",)
"""Versions of Ray that the tests ran with."""

Say = Callable[[str], None]


def need_ray() -> Any:
    """Import Ray.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import ray
        from ray import serve  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"the fleet needs Ray ({error}): pip install 'transect[cluster]'; without Ray, start "
            "`transect cluster router` and `transect cluster replica`"
        ) from None
    return ray


def state_of(settings: FleetSettings) -> dict[str, Any]:
    """Read the state of a fleet's commands; empty if it is not up."""
    try:
        found: dict[str, Any] = json.loads((settings.place / STATE).read_text())
        return found
    except (OSError, ValueError):
        return {}


def _keep(settings: FleetSettings, **changes: Any) -> dict[str, Any]:
    state = state_of(settings) | changes
    settings.place.mkdir(parents=True, exist_ok=True)
    (settings.place / STATE).write_text(json.dumps(state))
    return state


def connect(settings: FleetSettings, say: Say = lambda line: None, start: bool = False) -> Any:
    """Connect this process to the fleet's Ray cluster. Returns the module ``ray``.

    Args:
        start: start a cluster on this machine if there is none.

    Raises:
        ValueError: there is no cluster.
    """
    ray = need_ray()
    if ray.is_initialized():
        return ray
    own = settings.ray.address
    known = state_of(settings).get("address")
    quiet: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    for address in dict.fromkeys(filter(None, [known, None if own == "local" else own])):
        there = _running_here() if address == "auto" else address
        if there is not None and _answers(there):
            ray.init(address=there, **quiet)
            return ray
    if own not in ("auto", "local"):
        raise ValueError(f"there is no Ray cluster at {own}: start one, or set ray.address to auto")
    if not start:
        raise ValueError(f"there is no Ray cluster: start the fleet {settings.name} with `transect cluster up`")
    address = _start_here(settings, say)
    ray.init(address=address, **quiet)
    return ray


def _running_here() -> str | None:
    """Return the address of this machine's Ray cluster, as Ray's own ``auto`` finds it; None if there is none."""
    with contextlib.suppress(OSError):
        return os.environ.get("RAY_ADDRESS") or CURRENT.read_text().strip() or None
    return None


def _answers(address: str) -> bool:
    """Return False if nothing listens at an address: Ray would wait for minutes then."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():  # such as ray://...
        return True
    try:
        with socket.create_connection((host, int(port)), PROBE_S):
            return True
    except OSError:
        return False


def _start_here(settings: FleetSettings, say: Say) -> str:
    own = settings.ray
    address = f"127.0.0.1:{own.port}"
    command = [
        *(sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block"),
        *("--node-ip-address", "127.0.0.1", "--port", str(own.port), "--include-dashboard", "false"),
        *("--object-store-memory", str(own.object_store_mb * 1_000_000), "--disable-usage-stats"),
        *(() if own.num_cpus is None else ("--num-cpus", str(own.num_cpus))),
    ]
    settings.place.mkdir(parents=True, exist_ok=True)
    file = settings.place / "ray.log"
    with file.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    until = time.monotonic() + START_S
    while b"Ray runtime started" not in file.read_bytes():
        if process.poll() is not None or time.monotonic() > until:
            process.terminate()
            raise ValueError(f"a Ray cluster could not be started on this machine: see {file}")
        time.sleep(0.1)
    _keep(settings, address=address, ray_pid=process.pid)
    say(f"started a Ray cluster on this machine ({address}, process {process.pid})")
    return address


def up(settings: FleetSettings, say: Say) -> dict[str, Any]:
    """Start the fleet, or give a running one changed bounds and policies. Returns its state.

    Raises:
        ValueError: it does not start.
    """
    connect(settings, say, start=True)
    from ray import serve

    from .ray_app import replicas_app, router_app

    generation = int(state_of(settings).get("generation", 1))
    serve.start(proxy_location="Disabled")
    say(f"fleet {settings.name}: starts the router and {settings.replicas.min} replicas of {settings.engine.model}")
    _run(router_app(settings), settings.name, wait=False)
    _run(replicas_app(settings, settings.name, generation), f"{settings.name}-replicas")
    _keep(settings, generation=generation, name=settings.name, count=None)
    until = time.monotonic() + START_S
    while not (found := state(settings))["url"]:
        if time.monotonic() > until:
            raise ValueError("the replicas are ready, but the HTTP server does not answer: see the logs of Ray Serve")
        time.sleep(0.1)
    say(f"ready on {found['url']} | {len(found['replicas'])} replicas")
    return found


def _run(app: Any, name: str, wait: bool = True) -> None:
    from ray import serve
    from ray.serve.api import _run as run

    try:
        run(app, _blocking=wait, name=name, route_prefix=None if name.endswith("-replicas") else "/")
    except RuntimeError as failure:
        reason = str(failure)
        with contextlib.suppress(Exception):
            report = serve.status().applications[name]
            messages = [*(each.message for each in report.deployments.values()), report.message]
            reason = [line.strip() for line in next(filter(None, messages)).splitlines() if line.strip()][-1]
        raise ValueError(f"{name} does not start: {reason}") from None


def state(settings: FleetSettings) -> dict[str, Any]:
    """Return the state of the fleet from its router, with Ray Serve's view of the applications.

    Raises:
        ValueError: the fleet is not up.
    """
    connect(settings)
    from ray import serve

    applications = serve.status().applications
    if settings.name not in applications:
        raise ValueError(f"the fleet {settings.name} is not up: start it with `transect cluster up`")
    found: dict[str, Any] = {"url": "", "replicas": [], "alarms": [], "decisions": []}
    with contextlib.suppress(Exception):  # Ray's, of many kinds: the router is being started
        found |= serve.get_app_handle(settings.name).state.remote().result(timeout_s=10)
    shown = {}
    for name in (settings.name, f"{settings.name}-replicas"):
        if name in applications:
            each = applications[name]
            counts = {str(key): value for one in each.deployments.values() for key, value in one.replica_states.items()}
            shown[name] = {"status": str(each.status.value), "message": each.message, "replicas": counts}
    return found | {"applications": shown, "generation": state_of(settings).get("generation")}


def roll(settings: FleetSettings, say: Say) -> dict[str, Any]:
    """Replace all replicas, each new one before an old one, with the settings of the file and the weights as they are.

    Raises:
        ValueError: the fleet is not up, or the new replicas do not start; the old ones stay then.
    """
    connect(settings)
    from .ray_app import replicas_app

    before = state_of(settings)
    generation = int(before.get("generation", 1)) + 1
    say(f"fleet {settings.name}: generation {generation} replaces {generation - 1}, one replica at a time")
    app = replicas_app(settings, settings.name, generation, before.get("count"))
    _run(app, f"{settings.name}-replicas")
    _keep(settings, generation=generation)
    return state(settings)


def scale(settings: FleetSettings, count: int | None, say: Say) -> dict[str, Any]:
    """Set the number of replicas; None gives it back to the autoscaler.

    Raises:
        ValueError: the fleet is not up, or the number is not possible.
    """
    if count is not None and count < 1:
        raise ValueError(f"a fleet has at least 1 replica, not {count}: `transect cluster down` ends it")
    connect(settings)
    from .ray_app import replicas_app

    generation = int(state_of(settings).get("generation", 1))
    say(f"fleet {settings.name}: {'the autoscaler decides' if count is None else f'{count} replicas'}")
    _run(replicas_app(settings, settings.name, generation, count), f"{settings.name}-replicas")
    _keep(settings, count=count)
    return state(settings)


def down(settings: FleetSettings, say: Say) -> None:
    """End the fleet after its streams, and the Ray cluster if ``up`` has started it.

    Raises:
        ValueError: the fleet is not up.
    """
    pid = state_of(settings).get("ray_pid")
    try:
        ray = connect(settings)
        from ray import serve

        for name in (settings.name, f"{settings.name}-replicas"):  # streams first: the router finishes them
            with contextlib.suppress(Exception):
                serve.delete(name)
        say(f"fleet {settings.name}: the router and all replicas have ended")
        if pid is not None:
            serve.shutdown()
        ray.shutdown()
    finally:
        if pid is not None and _is_ours(pid):
            os.kill(pid, signal.SIGTERM)
            until = time.monotonic() + STOP_S
            while _is_ours(pid) and time.monotonic() < until:
                time.sleep(0.1)
            say("ended the Ray cluster of this machine")
        (settings.place / STATE).unlink(missing_ok=True)


def _is_ours(pid: int) -> bool:
    """Return True if a process is a head node that ``up`` has started."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    try:
        return b"ray.scripts" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
