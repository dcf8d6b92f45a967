"""Record which commits that results name are not in this repository's history.

Pages mark these commits. The mark is data, ``results/commits.json``, and not computed from git when pages are checked,
because CI works on shallow clones.

    python benchmarks/commits.py    bring the file up to date; needs the whole history
"""

from __future__ import annotations

import re
import subprocess

import _paths  # noqa: F401
from benchmarks import record


def named() -> list[str]:
    """List the commits that the results name, without ``+changes``."""
    texts = (path.read_text() for path in sorted(record.RESULTS.rglob("*.json")) if path != record.COMMITS)
    lists = (match for text in texts for match in re.findall(r'"\w*commits?": ("[^"]*"|\[[^\]]*\])', text))
    return sorted({commit for match in lists for commit in re.findall(r"\b[0-9a-f]{7,12}\b", match)})


def main() -> None:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(record.ROOT), *arguments], capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        raise SystemExit("this checkout does not have the whole history: run `git fetch --unshallow` first")
    absent = [commit for commit in named() if git("merge-base", "--is-ancestor", commit, "HEAD").returncode]
    record.write(record.COMMITS, {"not_in_repository": absent})


if __name__ == "__main__":
    main()
