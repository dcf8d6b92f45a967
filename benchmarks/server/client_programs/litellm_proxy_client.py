"""litellm's proxy in front of the server, asked by the openai package."""

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
from outcomes import BASE, HELLO, MODEL, WEATHER, check, check_weather, feature, main, served

with contextlib.closing(socket.socket()) as probe:
    probe.bind(("127.0.0.1", 0))
    PORT = probe.getsockname()[1]
FOLDER = Path(tempfile.mkdtemp())
LOG = FOLDER / "log"
KEY = "sk-1234567890abcdef-proxy"
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city.", "parameters": WEATHER}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}


def started():
    """The proxy, once it answers."""
    settings = f"""
model_list:
  - model_name: {MODEL}
    litellm_params: {{model: "openai/{MODEL}", api_base: "{BASE}", api_key: "none"}}
general_settings: {{master_key: "{KEY}"}}
litellm_settings: {{num_retries: 0, telemetry: false}}
"""
    (FOLDER / "config.yaml").write_text(settings)
    program = "from litellm.proxy.proxy_cli import run_server; run_server()"
    options = ("--config", str(FOLDER / "config.yaml"), "--port", str(PORT), "--host", "127.0.0.1")
    environment = {**os.environ, "HOME": str(FOLDER), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *options], env=environment, stdout=LOG.open("w"), stderr=subprocess.STDOUT
    )
    until = time.monotonic() + 180
    while time.monotonic() < until and process.poll() is None:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health/liveliness", timeout=2),
        ):
            return process
        time.sleep(0.5)
    process.kill()
    raise RuntimeError(f"the proxy did not start: {LOG.read_text()[-300:]}")


proxy = started()
client = openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key=KEY, max_retries=0, timeout=120)


def ask(**fields):
    return client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, **fields)


@feature("models")
def models():
    check([each.id for each in client.models.list().data] == [MODEL])


@feature("chat")
def chat():
    answer = ask(max_tokens=12)
    check(answer.choices[0].message.content and answer.usage.completion_tokens == 12, answer)


@feature("streamed chat")
def stream():
    text = "".join(each.choices[0].delta.content or "" for each in ask(max_tokens=12, stream=True) if each.choices)
    check(text == ask(max_tokens=12).choices[0].message.content, text)


@feature("text completions")
def completions():
    check(client.completions.create(model=MODEL, prompt="The sea is", max_tokens=4).choices[0].text)


@feature("structured output")
def structured():
    check_weather(ask(response_format=SCHEMA).choices[0].message.content)


@feature("tools")
def tools():
    answer = ask(tools=[TOOL], tool_choice="required")
    check_weather(answer.choices[0].message.tool_calls[0].function.arguments)


@feature("streamed tools")
def streamed_tools():
    named = {"type": "function", "function": {"name": "weather"}}
    pieces = []
    for each in ask(tools=[TOOL], tool_choice=named, stream=True):
        calls = each.choices[0].delta.tool_calls if each.choices else None
        pieces += [call.function.arguments or "" for call in calls or ()]
    check_weather("".join(pieces))


@feature("responses")
def responses():
    check(client.responses.create(model=MODEL, input="Name a colour.", max_output_tokens=16).output_text)


@feature("embeddings")
def embeddings():
    served("/v1/embeddings")
    found = client.embeddings.create(model=MODEL, input=["The sea is blue.", "Two."], encoding_format="float")
    check(len(found.data) == 2 and len(found.data[0].embedding) > 8)


try:
    main()
finally:
    proxy.kill()
    proxy.wait()
