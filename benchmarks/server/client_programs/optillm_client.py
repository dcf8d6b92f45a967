"""optillm in front of the server: a proxy that asks it several times for one answer."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import openai
from outcomes import BASE, MODEL, check, feature, main

with contextlib.closing(socket.socket()) as probe:
    probe.bind(("127.0.0.1", 0))
    PORT = probe.getsockname()[1]
ASK = [{"role": "user", "content": "What is the capital of France?"}]
"""Its answer is short: optillm takes one that was cut off for an error."""
LOG = Path(tempfile.mkdtemp()) / "log"


def started():
    """Start the proxy, and yield once it answers."""
    program = "import sys; from optillm.server import main; sys.exit(main())"
    options = ("--base-url", BASE, "--port", str(PORT), "--host", "127.0.0.1")
    environment = {**os.environ, "OPENAI_API_KEY": "none", "HOME": tempfile.mkdtemp()}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *options], env=environment, stdout=LOG.open("w"), stderr=subprocess.STDOUT
    )
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2):
            return process
        time.sleep(0.5)
    process.kill()
    raise RuntimeError(f"optillm did not start: {LOG.read_text()[-300:]}")


proxy = started()
client = openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0, timeout=280)


def ask(approach):
    try:
        answer = client.chat.completions.create(
            model=f"{approach}-{MODEL}", messages=ASK, max_tokens=256, temperature=0
        )
    except openai.APIError as error:
        said = [line for line in LOG.read_text().splitlines() if "ERROR" in line or "Error:" in line]
        raise RuntimeError(f"{approach}: {error}; {said[-1:]}") from error
    text = answer.choices[0].message.content
    check(text and "rror" not in text[:20], answer)


@feature("chat")
def chat():
    for approach in ("none", "re2", "bon"):
        ask(approach)
    return "none, re2, bon (three answers with n = 3, each rated)"


try:
    main()
finally:
    proxy.kill()
    proxy.wait()
