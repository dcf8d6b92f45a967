"""What hatchling asks when it builds the package: the README as a package index shows it."""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")


def readme_for_index(text: str, sources: str) -> str:
    """Markdown whose relative links lead to ``sources``, the address of the repository's files.

    Without an address a link becomes its text with the file's name, and a picture goes.
    """

    def replaced(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if sources:
            base = sources.replace("/blob/", "/raw/") if picture else sources
            return f"{picture}[{words}]({base.rstrip('/')}/{target})"
        file = target.partition("#")[0]
        return "" if picture else words if file in words else f"{words} ({file})"

    return _LINK.sub(replaced, text)


class ReadmeHook(MetadataHookInterface):
    """Fills in ``readme``."""

    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": readme_for_index(text, self.config.get("sources", "")),
        }
