"""Other people's clients against the server: what they send and what they look for in answers."""

import json
import shutil
import subprocess

import openai
import pytest

CHAT = [{"role": "user", "content": "Hi"}]
REPLY = "Hello, wörld. END of it"


@pytest.fixture
def openai_client(live):
    with openai.OpenAI(base_url=f"{live}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_usage_in_every_chunk(openai_client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        openai_client.chat.completions.create(model="fake-model", messages=CHAT, stream=True, stream_options=options)
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == len(REPLY.encode())
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == REPLY
    asked = {"prompt": "Hi", "max_tokens": 9, "stream": True, "stream_options": options}
    chunks = list(openai_client.completions.create(model="fake-model", **asked))
    assert [chunk.usage.completion_tokens for chunk in chunks[:-1]][-1] == chunks[-1].usage.completion_tokens == 9


def test_openai_with_fields_of_other_servers_that_ask_for_nothing(openai_client, engine):
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": "Yo", "reasoning_content": "hm", "tool_calls": None, "function_call": None},
        {"role": "user", "content": "x"},
    ]
    empties = {
        "documents": [],
        "suffix": "",
        "mm_processor_kwargs": None,
        "kv_transfer_params": None,
        "max_tokens": 4.0,
        "seed": 7.0,
        "length_penalty": 1.0,
        "use_beam_search": False,
        "guided_json": None,
        "whatever_comes_next": None,
    }
    answer = openai_client.chat.completions.create(model="fake-model", messages=history, extra_body=empties)
    assert answer.usage.completion_tokens == 4
    assert engine.seen[0][1].seed == 7


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"modalities": ["audio"]}, "any output but text"),
        ({"suffix": "x"}, "filling in text before a suffix anywhere but in /v1/completions"),
        ({"documents": [{"text": "x"}]}, "giving documents"),
        ({"functions": [{"name": "f"}]}, "function calling"),
        ({"suffix_": "x"}, "unknown field 'suffix_'"),
    ],
)
def test_openai_hears_in_its_own_words_what_cannot_be_done(openai_client, asked, words):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        openai_client.chat.completions.create(model="fake-model", messages=CHAT, extra_body=asked)
    assert caught.value.param == next(iter(asked))


@pytest.mark.prove  # its import alone takes seconds
def test_litellm_knows_when_the_context_is_full(live, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    call = {"model": "openai/fake-model", "api_base": f"{live}/v1", "api_key": "none", "num_retries": 0}
    with pytest.raises(litellm.ContextWindowExceededError, match=r"maximum context length is 200 tokens\. However, "):
        litellm.completion(messages=[{"role": "user", "content": "x" * 300}], **call)
    answer = litellm.completion(messages=CHAT, max_tokens=5, **call)
    assert answer.choices[0].message.content == REPLY[:5]


@pytest.mark.prove
def test_guidellm_finds_token_counts(live, tmp_path):
    """Runs where the command is installed; it wants much that nothing else here does."""
    command = shutil.which("guidellm")
    if command is None:
        pytest.skip("guidellm is not installed")
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Hi {i}"}) + "\n" for i in range(3)))
    done = subprocess.run(
        [
            *(command, "run", "--backend", f"kind=openai_http,target={live},model=fake-model"),
            *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"),
            *("--data", f"kind=json_file,path={path}", "--output", f"kind=json,path={tmp_path / 'out.json'}"),
            "--disable-console",
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == 3 and not benchmark["requests"]["errored"]
