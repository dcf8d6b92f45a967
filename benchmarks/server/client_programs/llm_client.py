"""Simon Willison's ``llm``: its command line, with the server in extra-openai-models.yaml."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from outcomes import BASE, MODEL, check, feature, main

COMMAND = str(Path(sys.executable).parent / "llm")
FOLDER = tempfile.mkdtemp()
ENVIRONMENT = {**os.environ, "LLM_USER_PATH": FOLDER}
(Path(FOLDER) / "extra-openai-models.yaml").write_text(
    f"- {{model_id: chat, model_name: {MODEL}, api_base: '{BASE}', api_key_name: none, supports_schema: true, "
    f"supports_tools: true}}\n"
    f"- {{model_id: text, model_name: {MODEL}, api_base: '{BASE}', api_key_name: none, completion: true}}\n"
)
(Path(FOLDER) / "keys.json").write_text('{"none": "none"}')


def llm(*arguments):
    done = subprocess.run([COMMAND, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=180)
    check(done.returncode == 0, done.stderr)
    return done.stdout.strip()


@feature("chat")
def chat():
    check(llm("-m", "chat", "--no-stream", "-o", "max_tokens", "12", "Name three colours."))


@feature("streamed chat")
def stream():
    check(llm("-m", "chat", "-o", "max_tokens", "12", "Name three colours."))


@feature("text completions")
def completions():
    check(llm("-m", "text", "-o", "max_tokens", "4", "The sea is"))


@feature("structured output")
def structured():
    found = json.loads(llm("-m", "chat", "--schema", "name, age int", "-o", "max_tokens", "200", "Invent a dog."))
    check(set(found) == {"name", "age"} and isinstance(found["age"], int), found)


@feature("tools")
def tools():
    source = 'def weather(city: str) -> str:\n    """Weather of a city."""\n    return "Sunny."\n'
    check(llm("-m", "chat", "--functions", source, "--no-stream", "-o", "max_tokens", "48", "Weather in Rome?"))
    return "offered; the model decides whether it calls"


main()
