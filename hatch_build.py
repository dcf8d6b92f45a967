"""Fill in the package's description from README.md, with links that work on a package index."""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

PLACEHOLDER = "/OWNER/"
"""Part of ``repo_url`` until the place of publication is known."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")


def readme_for_index(text: str, repo_url: str) -> str:
    """Make relative links of a Markdown text absolute.

    Without an address, or with the placeholder for one, a link becomes its text with the file's name, and pictures are
    left out.
    """
    published = repo_url and PLACEHOLDER not in repo_url

    def replaced(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if published:
            return f"{picture}[{words}]({repo_url.rstrip('/')}/{'raw' if picture else 'blob'}/main/{target})"
        file = target.partition("#")[0]
        return "" if picture else words if file in words else f"{words} ({file})"

    return _LINK.sub(replaced, text)


class ReadmeHook(MetadataHookInterface):
    """Set ``readme`` of the package's metadata."""

    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": readme_for_index(text, self.config.get("repo_url", "")),
        }
