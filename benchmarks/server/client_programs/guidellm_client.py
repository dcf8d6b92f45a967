"""guidellm: a synchronous and a concurrent benchmark of chats, from its command line."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from outcomes import MODEL, URL, check, feature, main

COMMAND = Path(sys.executable).parent / "guidellm"
FOLDER = Path(tempfile.mkdtemp())
(FOLDER / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Name {i} colours."}) + "\n" for i in range(8)))


def benchmark(backend, profile):
    path = FOLDER / f"out-{profile.split(',')[0]}.json"
    done = subprocess.run(
        [
            *(COMMAND, "run", "--backend", f"kind=openai_http,target={URL},model={MODEL}{backend}"),
            *("--profile", f"kind={profile}", "--constraint", "kind=max_requests,count=6", "--disable-console"),
            *("--data", f"kind=json_file,path={FOLDER / 'prompts.jsonl'}", "--output", f"kind=json,path={path}"),
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )
    check(done.returncode == 0, (done.stdout + done.stderr)[-300:])
    (found,) = json.loads(path.read_text())["benchmarks"]
    requests = found["requests"]
    check(len(requests["successful"]) == 6 and not requests["errored"], requests["errored"])


@feature("streamed chat")
def chat():
    benchmark("", "concurrent,streams=3")
    return "6 requests, 3 at a time"


@feature("text completions")
def completions():
    benchmark(",request_format=/v1/completions", "synchronous")
    return "6 requests, one at a time"


main()
