"""Routes with which an operator releases versions under a name (``server/releases.py``)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from ..http.body import JsonRoute
from ..http.clients import check_operator
from ..openai.protocol import Body
from ..releases import ReleasedVersion, Releases

release_routes = APIRouter(route_class=JsonRoute, tags=["operations"])


class VersionBody(Body):
    """A version: the name of a served model or adapter, and its weight."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    weight: Annotated[float, Field(ge=0)] = 1.0


class ReleaseBody(Body):
    """The versions of a released name."""

    versions: Annotated[list[VersionBody], Field(min_length=1, max_length=16)]


def _releases(request: Request) -> Releases:
    check_operator()
    releases: Releases = request.app.state.serving.releases
    return releases


@release_routes.get("/v1/releases")
async def releases(request: Request) -> dict[str, Any]:
    """List all releases. For the operator's key."""
    found = _releases(request)
    return {"object": "list", "data": [found.state(name) for name in found.names()]}


@release_routes.get("/v1/releases/{name:path}")
async def release(request: Request, name: str) -> dict[str, Any]:
    """Describe a release: versions, shares, running requests. For the operator's key."""
    return _releases(request).state(name)


@release_routes.put("/v1/releases/{name:path}")
async def put_release(request: Request, name: str, body: ReleaseBody) -> dict[str, Any]:
    """Release a name, or change its versions. Running requests keep theirs. For the operator's key."""
    return _releases(request).put(name, [ReleasedVersion(each.model, each.weight) for each in body.versions])


@release_routes.delete("/v1/releases/{name:path}")
async def delete_release(request: Request, name: str) -> dict[str, Any]:
    """Take a released name back; running requests finish. For the operator's key."""
    draining = _releases(request).delete(name)
    return {"object": "release", "name": name, "deleted": True, "draining": draining}
