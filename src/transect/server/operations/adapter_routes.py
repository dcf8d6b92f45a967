"""Routes with which an operator loads and unloads adapters while the server runs; vLLM's names."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from ...engine.frontends.streams import EngineDeadError
from ..http.body import JsonRoute
from ..http.clients import check_operator
from ..http.errors import ApiError
from ..serving import Serving

adapter_routes = APIRouter(route_class=JsonRoute, tags=["operations"])

Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadRequest(BaseModel):
    """``lora_path`` is a directory below ``--allowed-lora-dir``. With ``load_inplace`` the name may be in use."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadRequest(BaseModel):
    """``lora_int_id`` of vLLM is not looked at."""

    lora_name: Name
    lora_int_id: int | None = None


@adapter_routes.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request, body: LoadRequest) -> JSONResponse:
    """Serve an adapter under a name, from now on. For the operator's key."""
    serving = _checked(request, body.lora_name)
    try:
        entry = await serving.adapters.load(body.lora_name, body.lora_path, replace=body.load_inplace)
    except EngineDeadError as error:
        raise ApiError(503, f"the engine has stopped: {error}", code="engine_dead") from None
    return JSONResponse({"id": entry.name, "object": "model", "root": str(entry.path), "parent": serving.model_name})


@adapter_routes.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request, body: UnloadRequest) -> JSONResponse:
    """Refuse new requests for an adapter, wait for those that run with it, and forget it. For the operator's key."""
    serving = _checked(request, body.lora_name)
    using = serving.releases.using(body.lora_name)
    if using:
        message = f"the adapter {body.lora_name!r} is a version of the release {using[0]!r}: take it out there first"
        raise ApiError(409, message, param="lora_name", code="adapter_released")
    await serving.adapters.unload(body.lora_name)
    return JSONResponse({"id": body.lora_name, "object": "model", "deleted": True})


def _checked(request: Request, name: str) -> Serving:
    check_operator()
    serving: Serving = request.app.state.serving
    if name in serving.options.model_names:
        raise ApiError(400, f"{name!r} is the model itself: choose another name", param="lora_name")
    return serving
