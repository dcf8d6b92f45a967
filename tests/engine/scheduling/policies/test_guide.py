"""The guide's scheduling policy, added in one file to a copy of the package: ordered by, replayed, and served."""

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from tiny_llm import save_tiny_llm

ORDER = """
import sys
from transect import LLM, SamplingParams
llm = LLM("model", device="cpu", threads=1, max_num_seqs=1, longest_first=False, seed=0,
          scheduling_policy=sys.argv[1], decision_log=sys.argv[1])
lengths = (8, 40, 24, 6)
names = {llm.submit([5, 6, 7], SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.0)): n for n in lengths}
ended = []
while llm.has_work:
    ended += [names[output.request_id] for output in llm.step() if output.finish_reason]
print(ended)
"""


@pytest.fixture(scope="module")
def package(changed_packages):
    """A copy of the package with the change that the guide shows, and a model."""
    made = changed_packages("docs/extend/policy.md")
    (made / "model").mkdir()
    save_tiny_llm(made / "model")
    return made


def test_short_answers_come_first_and_a_replay_decides_the_same(package):
    assert "[8, 40, 24, 6]" in package.python(ORDER, "fcfs").stdout
    assert "[6, 8, 24, 40]" in package.python(ORDER, "shortest").stdout
    assert "replayed, all the same" in package.transect("explain", "replay", "shortest").stdout


def test_a_server_runs_it_and_priorities_are_refused_there(package):
    command = [sys.executable, "-m", "transect", "serve", "model", "--port", "0", "--served-model-name", "m",
               "--scheduling-policy", "shortest", "--device", "cpu", "--threads", "1"]  # fmt: skip
    server = subprocess.Popen(
        command,
        cwd=package.folder,
        env=package.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        lines = iter(server.stdout.readline, "")
        url = next(found[0] for line in lines if (found := re.search(r"http://[\d.]+:\d+", line)))
        asked = {"model": "m", "prompt": "A", "max_tokens": 4, "ignore_eos": True}
        assert ask(url, asked)["usage"]["completion_tokens"] == 4
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(url, asked | {"priority": 3})
        assert refused.value.code == 400 and "scheduling policy shortest" in refused.value.read().decode()
    finally:
        server.terminate()
        server.wait(60)


def ask(url, body):
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def test_a_name_that_is_none_is_refused_with_all_there_are(package):
    told = package.transect("serve", "model", "--scheduling-policy", "short", code=2).stderr
    assert "fcfs" in told and "priority" in told and "shortest" in told
