"""Fetches one wheel from a Python package index over HTTP, without pip.

Environments made by uv have no pip. The index is asked by its "simple" API (PEP 503 and PEP 691), and the settings of
pip and uv that come through the environment are honoured: ``UV_DEFAULT_INDEX``, ``UV_INDEX_URL`` or ``PIP_INDEX_URL``
name the index, ``UV_INDEX``, ``UV_EXTRA_INDEX_URL`` and ``PIP_EXTRA_INDEX_URL`` further ones, ``PIP_CERT`` or
``SSL_CERT_FILE`` the certificates, and ``HTTPS_PROXY`` a proxy. Configuration files are not read.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

import httpx

PUBLIC_INDEX = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_SECONDS = 15.0
"""Seconds of the longest wait for a connection, and for the next piece of an answer."""


def index_urls() -> list[str]:
    """List the indexes to query, in order: further ones first, as uv does, then the default one."""

    def values(*names: str) -> list[str]:
        words = [word for name in names for word in os.environ.get(name, "").split()]
        return [re.sub(r"^[\w.-]+=(?=\w+://)", "", word) for word in words]  # uv allows name=url

    default = values("UV_DEFAULT_INDEX") or values("UV_INDEX_URL") or values("PIP_INDEX_URL") or [PUBLIC_INDEX]
    further = values("UV_INDEX", "UV_EXTRA_INDEX_URL", "PIP_EXTRA_INDEX_URL")
    urls = list(dict.fromkeys([*further, default[0]]))
    return [url for url in urls if urlsplit(url).scheme in ("http", "https")]


def download_wheel(
    package: str, version: str, sha256: str, folder: Path, report: Callable[[int], None] = lambda done: None
) -> Path:
    """Download the wheel of ``package`` with the pinned checksum into ``folder``.

    An index that names another checksum for its file is passed over; the caller checks the bytes themselves.

    Args:
        sha256: of the wheel, in hexadecimal.
        report: told how many bytes have come.

    Raises:
        ValueError: no index could be reached, or none has the wheel; one line that says what to change.
        OSError: the file cannot be written.
    """
    unreachable: list[str] = []
    refused: list[str] = []
    indexes = index_urls()
    if not indexes:
        raise ValueError("no package index over http is set; set PIP_INDEX_URL or UV_INDEX_URL to one")
    with httpx.Client(timeout=_SECONDS, follow_redirects=True, verify=_certificates()) as client:
        for index in indexes:
            name = _shown(index)
            try:
                for link in _wheels(client, index, package, version):
                    _, fragment = urldefrag(link)
                    if fragment.startswith("sha256=") and fragment.removeprefix("sha256=") != sha256:
                        refused.append(f"{name} serves another file")
                        continue
                    return _stream(client, link, folder, report)
                refused.append(f"{name} has no such wheel")
            except httpx.HTTPStatusError as error:
                refused.append(f"{name} answered {error.response.status_code}")
            except httpx.InvalidURL as error:
                refused.append(f"{name} is not an address: {error}")
            except httpx.HTTPError as error:
                unreachable.append(f"{name}: {' '.join(str(error).split()) or type(error).__name__}")
    if unreachable:
        raise ValueError(
            f"no network: the package index could not be reached for {package} {version} "
            f"({'; '.join(unreachable + refused)}); check the connection, PIP_INDEX_URL and HTTPS_PROXY"
        )
    raise ValueError(
        f"the package index could not give {package} {version} ({'; '.join(dict.fromkeys(refused))}); "
        "check PIP_INDEX_URL or UV_INDEX_URL"
    )


def _certificates() -> ssl.SSLContext | bool:
    own = os.environ.get("PIP_CERT")
    return ssl.create_default_context(cafile=own) if own and Path(own).is_file() else True


def _shown(url: str) -> str:
    """Return an address without a password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _wheels(client: httpx.Client, index: str, package: str, version: str) -> Iterator[str]:
    """Yield links to wheels of that version for any machine, with checksums in their fragments if the index has
    them."""
    page = f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', package).lower()}/"
    answer = client.get(page, headers={"Accept": _ACCEPT})
    if answer.status_code == 404:
        return
    answer.raise_for_status()
    start = f"{re.sub(r'[-_.]+', '_', package).lower()}-{version}-"
    base = str(answer.url)
    for link in _links_of_json(answer) if "json" in answer.headers.get("content-type", "") else _links(answer.text):
        url = urljoin(base, link)
        file = unquote(urlsplit(url).path.rpartition("/")[2])
        if file.lower().startswith(start) and file.endswith("-none-any.whl"):
            yield url


def _links_of_json(answer: httpx.Response) -> Iterator[str]:
    for file in answer.json()["files"]:
        checksum = file.get("hashes", {}).get("sha256")
        yield f"{file['url']}#sha256={checksum}" if checksum else file["url"]


def _links(page: str) -> list[str]:
    found: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(value for name, value in attrs if tag == "a" and name == "href" and value)

    Links().feed(page)
    return found


def _stream(client: httpx.Client, link: str, folder: Path, report: Callable[[int], None]) -> Path:
    url, _ = urldefrag(link)
    path = folder / unquote(urlsplit(url).path.rpartition("/")[2])
    done = 0
    with client.stream("GET", url) as answer, open(path, "wb") as file:
        answer.raise_for_status()
        for chunk in answer.iter_bytes(1 << 18):
            file.write(chunk)
            done += len(chunk)
            report(done)
    return path
