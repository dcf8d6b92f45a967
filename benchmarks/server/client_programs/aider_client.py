"""aider, as its command is run in a folder with one file: one question, with and without streaming."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from outcomes import BASE, MODEL, check, feature, main

FOLDER = Path(tempfile.mkdtemp())
(FOLDER / "colours.py").write_text('COLOURS = ["red", "green"]\n')
(FOLDER / "settings.yml").write_text(
    f"- name: openai/{MODEL}\n  edit_format: ask\n  use_repo_map: false\n"
    '  extra_params: {max_tokens: 200, temperature: 0, stop: [".", ":", "\\n\\n"]}\n'
)
OPTIONS = (
    "--no-git", "--yes-always", "--no-check-update", "--no-analytics", "--no-show-model-warnings", "--no-pretty",
    "--no-show-release-notes", "--no-detect-urls", "--model-settings-file", "settings.yml",
)  # fmt: skip


def ask(*options):
    """Ask a question as a command."""
    environment = {
        **os.environ,
        "HOME": str(FOLDER),
        "OPENAI_API_BASE": BASE,
        "OPENAI_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    done = subprocess.run(
        [sys.executable, "-m", "aider", "--model", f"openai/{MODEL}", *OPTIONS, *options],
        cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    received = re.search(r"Tokens: .* sent, [1-9][0-9,]* received", done.stdout)  # printed when an answer is complete
    check(done.returncode == 0 and received, done.stdout[-250:] + done.stderr[-250:])


@feature("chat")
def chat():
    ask("--no-stream", "--message", "Which colours are there?", "colours.py")


@feature("streamed chat")
def stream():
    ask("--stream", "--message", "Which colours are there?", "colours.py")


main()
