"""Adapters by name: ``model`` of a request, loading and unloading at run time, and what a path may be."""

import asyncio
from contextlib import aclosing

import httpx
import pytest

from transect.server.app import create_app
from transect.server.options import ServerOptions, named_modules

OPERATOR = {"Authorization": "Bearer boss"}
ASK = {"Authorization": "Bearer guest"}


class AdapterEngine:
    """The fake engine, with adapters: notes which one each request has, refuses those whose files say so."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.loaded: dict[str, str] = {}
        self.used: list[str] = []

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    async def stream(self, prompt_token_ids, params, request_id, *, adapter=None, **options):
        self.used.append("" if adapter is None else self.loaded[adapter.id])
        async with aclosing(self.inner.stream(prompt_token_ids, params, request_id, **options)) as updates:
            async for update in updates:
                yield update

    async def load_adapter(self, files) -> None:
        if b"BAD" in (files.path / "adapter_model.safetensors").read_bytes():
            raise ValueError(f"the adapter {files.path} does not fit the model")
        self.loaded[files.id] = files.path.name

    async def forget_adapter(self, files) -> None:
        del self.loaded[files.id]


def make(folder, name: str, content: str = ""):
    path = folder / name
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_text(content or name)
    return path


@pytest.fixture
def folder(tmp_path):
    for name in ("first", "second"):
        make(tmp_path / "allowed", name)
    make(tmp_path / "allowed", "broken", "BAD")
    make(tmp_path, "outside")
    (tmp_path / "allowed" / "link").symlink_to(tmp_path / "outside")
    return tmp_path / "allowed"


@pytest.fixture
def engine(engine) -> AdapterEngine:
    return AdapterEngine(engine)


@pytest.fixture
def app(engine, folder, tmp_path):
    options = ServerOptions(
        model_names=("base",),
        lora_modules=(f"given={tmp_path / 'outside'}",),
        allowed_lora_dir=str(folder),
        api_keys=("guest",),
        admin_api_keys=("boss",),
    )
    return create_app(engine, options)


@pytest.fixture
def client(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server", headers=ASK)


async def ask(client, model: str, **more):
    body = {"model": model, "prompt": "hi", "max_tokens": 4} | more
    return await client.post("/v1/completions", json=body)


async def test_model_picks_an_adapter_in_every_api(client, engine, app) -> None:
    await app.state.serving.adapters.start()
    message = [{"role": "user", "content": "hi"}]
    asked = [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": message}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": message, "max_tokens": 4}),
        ("/v1/embeddings", {"input": "hi"}),
    ]
    for path, body in asked:
        for model, adapter in (("given", "outside"), ("base", ""), ("first", "first")):
            reply = await client.post(path, json=body | {"model": model})
            assert reply.status_code == 200, reply.text
            assert reply.json()["model"] == model
            assert engine.used.pop() == adapter
    assert (await ask(client, "nobody")).status_code == 404


async def test_models_are_listed_with_their_parents(client) -> None:
    listed = {each["id"]: each for each in (await client.get("/v1/models")).json()["data"]}
    assert listed["base"]["parent"] is None and listed["base"]["root"] == "base"
    assert listed["first"]["parent"] == "base" and listed["first"]["root"].endswith("allowed/first")
    assert {"given", "second"} <= set(listed) and "link" not in listed
    assert (await client.get("/v1/models/second")).json()["parent"] == "base"


async def test_an_adapter_in_the_folder_is_loaded_when_it_is_asked_for(client, engine) -> None:
    assert not engine.loaded
    replies = await asyncio.gather(*(ask(client, "second") for _ in range(4)))
    assert [reply.status_code for reply in replies] == [200] * 4
    assert list(engine.loaded.values()) == ["second"]
    bad = await ask(client, "broken")
    assert bad.status_code == 400 and "does not fit" in bad.json()["error"]["message"]


async def test_operators_load_replace_and_unload(client, engine, folder) -> None:
    load = {"lora_name": "mine", "lora_path": str(folder / "first")}
    refused = await client.post("/v1/load_lora_adapter", json=load)
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "operator_key_needed"
    loaded = await client.post("/v1/load_lora_adapter", json=load, headers=OPERATOR)
    assert loaded.status_code == 200, loaded.text
    assert (await ask(client, "mine")).status_code == 200 and engine.used[-1] == "first"
    again = await client.post("/v1/load_lora_adapter", json=load, headers=OPERATOR)
    assert again.status_code == 400 and again.json()["error"]["code"] == "adapter_exists"
    other = load | {"lora_path": "second", "load_inplace": True}
    assert (await client.post("/v1/load_lora_adapter", json=other, headers=OPERATOR)).status_code == 200
    assert (await ask(client, "mine")).status_code == 200 and engine.used[-1] == "second"
    unload = {"lora_name": "mine"}
    assert (await client.post("/v1/unload_lora_adapter", json=unload)).status_code == 403
    assert (await client.post("/v1/unload_lora_adapter", json=unload, headers=OPERATOR)).status_code == 200
    assert (await ask(client, "mine")).status_code == 404
    assert (await client.post("/v1/unload_lora_adapter", json=unload, headers=OPERATOR)).status_code == 404
    base = {"lora_name": "base", "lora_path": "first"}
    assert (await client.post("/v1/load_lora_adapter", json=base, headers=OPERATOR)).status_code == 400


async def test_unloading_waits_for_streams(client, engine) -> None:
    await client.post("/v1/load_lora_adapter", json={"lora_name": "m", "lora_path": "first"}, headers=OPERATOR)
    running = asyncio.create_task(ask(client, "m", prompt="HANG", max_tokens=8))
    while not engine.running:
        await asyncio.sleep(0)
    unloading = asyncio.create_task(client.post("/v1/unload_lora_adapter", json={"lora_name": "m"}, headers=OPERATOR))
    while (await ask(client, "m")).status_code != 404:
        await asyncio.sleep(0)
    assert not unloading.done() and "first" in engine.loaded.values()
    engine.go.set()
    assert (await running).status_code == 200
    assert (await unloading).status_code == 200 and "first" not in engine.loaded.values()


@pytest.mark.parametrize("path", ["../outside", "link", ".", "/etc", "first/../../outside"])
async def test_paths_outside_of_the_folder_are_refused(client, engine, path: str) -> None:
    body = {"lora_name": "x", "lora_path": path}
    reply = await client.post("/v1/load_lora_adapter", json=body, headers=OPERATOR)
    assert reply.status_code == 403 and reply.json()["error"]["code"] == "outside_adapter_directory"
    assert not engine.loaded


async def test_names_are_no_paths(client, engine) -> None:
    for name in ("../outside", "link", ".", "..", "first/", "/first"):
        assert (await ask(client, name)).status_code == 404
    assert not engine.loaded


async def test_without_a_folder_nothing_is_loaded_at_run_time(engine) -> None:
    app = create_app(engine, ServerOptions(model_names=("base",)))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://server")
    reply = await client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/tmp"})
    assert reply.status_code == 403 and "--allowed-lora-dir" in reply.json()["error"]["message"]


async def test_requests_and_tokens_are_counted_by_adapter(client) -> None:
    await ask(client, "first")
    await ask(client, "base")
    text = (await client.get("/metrics")).text
    assert 'transect_adapter_requests_total{adapter="first"' in text and 'adapter="base"' not in text
    assert 'adapter="first",kind="answer"' in text


def test_modules_are_named() -> None:
    assert named_modules(["a=x", '{"name": "b", "path": "y"}']) == {"a": "x", "b": "y"}
    for wrong in ("x", "=x", "a=", '{"name": "b"}', "{"):
        with pytest.raises(ValueError, match="takes NAME=DIR"):
            named_modules([wrong])
    with pytest.raises(ValueError, match="names a twice"):
        named_modules(["a=x", "a=y"])
    with pytest.raises(ValueError, match="name of the model and of an adapter"):
        ServerOptions(model_names=("a",), lora_modules=("a=x",))
