"""The page's files: built from their sources, small, and sent with a policy that lets no other code run."""

import gzip
import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from transect.server.app import create_app
from transect.server.options import ServerOptions
from transect.server.page.routes import FILES, read_files

SOURCES = Path(__file__).resolve().parents[3] / "page"
MOST_BYTES = 300_000
CLOSED = ServerOptions(model_names=("m",), api_keys=("secret",))


def digest_of_sources():
    """The digest that ``page/build.mjs`` writes, computed as it does."""
    names = ["package.json", "package-lock.json", "tsconfig.json", "build.mjs"]
    names += [path.relative_to(SOURCES).as_posix() for path in (SOURCES / "src").rglob("*") if path.is_file()]
    digest = hashlib.sha256()
    for name in sorted(names):
        content = (SOURCES / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def test_the_built_page_is_that_of_its_sources():
    built = json.loads((FILES / "build.json").read_text())["sources"]
    assert built == digest_of_sources(), "page/ was changed and not built: run `npm ci && npm run build` in page/"


@pytest.mark.prove
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_building_again_gives_the_same_bytes(tmp_path):
    shutil.copytree(SOURCES, tmp_path / "page", ignore=shutil.ignore_patterns("node_modules"))
    for command in (["npm", "ci"], ["npm", "run", "build"]):
        subprocess.run(command, cwd=tmp_path / "page", check=True, capture_output=True)
    built = tmp_path / "src" / "transect" / "server" / "page" / "files"
    assert {path.name: path.read_bytes() for path in built.iterdir()} == {
        path.name: path.read_bytes() for path in FILES.iterdir()
    }


def test_the_page_is_small_and_loads_nothing_from_elsewhere():
    assert sum(len(gzip.compress(path.read_bytes())) for path in FILES.iterdir()) < MOST_BYTES
    for name in ("index.html", "style.css"):
        text = (FILES / name).read_text()
        assert "//" not in text.replace("http://www.w3.org/2000/svg", ""), f"{name} has an address of another host"


def test_every_file_is_a_type_that_the_server_knows():
    assert {"index.html", "page.js", "style.css", "icon.svg"} <= read_files().keys()


@pytest.mark.parametrize("options", [CLOSED], ids=["with keys"])
async def test_the_page_needs_no_key_and_all_that_it_asks_for_does(client):
    response = await client.get("/", headers={"accept-encoding": "gzip"})
    assert response.status_code == 200 and response.headers["content-encoding"] == "gzip"
    assert response.content == (FILES / "index.html").read_bytes()
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy
    script = await client.get("/page/page.js", headers={"accept-encoding": "identity"})
    assert script.content == (FILES / "page.js").read_bytes()
    assert (await client.get("/v1/models")).status_code == 401
    assert (await client.get("/pages")).status_code == 401


async def test_a_browser_loads_a_file_again_only_when_it_changed(client):
    tag = (await client.get("/page/page.js")).headers["etag"]
    again = await client.get("/page/page.js", headers={"if-none-match": tag})
    assert again.status_code == 304 and again.content == b""
    assert (await client.get("/page/style.css", headers={"if-none-match": tag})).status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "..%2f__init__.py", "%2e%2e/routes.py"])
async def test_other_files_are_not_sent(client, name):
    assert (await client.get(f"/page/{name}")).status_code == 404


async def test_without_the_page_the_server_answers_as_before(engine):
    app = create_app(engine, ServerOptions(model_names=("m",), page=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        assert (await client.get("/")).status_code == 404
        assert (await client.get("/page/page.js")).status_code == 404


@pytest.mark.parametrize("options", [ServerOptions(model_names=("m",), api_keys=("k",), admin_api_keys=("boss",))])
async def test_flows_and_predictions_are_the_operators(client):
    for key, shown, predicted in (("k", 403, 403), ("boss", 200, 404)):  # the fake engine keeps no log
        headers = {"Authorization": f"Bearer {key}"}
        assert (await client.get("/v1/flows", headers=headers)).status_code == shown
        asked = await client.post("/v1/decisions/what-if", headers=headers, json={"set": {}})
        assert asked.status_code == predicted
        assert (await client.get("/v1/page", headers=headers)).json()["flows"] == 0
