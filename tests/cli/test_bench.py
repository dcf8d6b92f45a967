"""``transect bench`` on a tiny random model: the commands end to end."""

import importlib.util
import json
import subprocess
import sys

import pytest
from commands import run_here

from transect.cli.bench_shared import Subject

TRANSECT = [sys.executable, "-m", "transect"]
SHAPE = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shape")
    (directory / "config.json").write_text(json.dumps(SHAPE))
    return str(directory)


def run(*arguments):
    return run_here("bench", *arguments)


def test_latency(shape, tmp_path):
    file = tmp_path / "result.json"
    sizes = ("--prompt-tokens", "20", "--new-tokens", "4", "--runs", "2", "--batch", "3", "--batch", "1")
    done = run("latency", "--model", shape, "--load-format", "dummy", *sizes, "--threads", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "floor ms" in done.stdout and "MBU" in done.stdout and "median of 2 runs" in done.stdout
    result = json.loads(file.read_text())
    assert [each["batch"] for each in result["results"]] == [1, 3]
    for each in result["results"]:
        for part in (each["prefill"], each["decode"]):
            assert 0 < part["of_floor"] < 1 and part["mbu"] > 0 and part["mfu"] > 0
        assert each["decode"]["seconds_per_token"]["runs"] == 2
        assert 20 < each["decode"]["context"] < 40
    assert result["environment"]["command"].startswith("transect bench latency")


def test_throughput(shape, tmp_path):
    file = tmp_path / "result.json"
    sizes = ("--sequences", "5", "--shortest", "2", "--longest", "12", "--max-num-seqs", "4")
    done = run("throughput", "--model", shape, "--load-format", "dummy", *sizes, "--threads", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(file.read_text())["results"]
    assert result["output_tokens_per_second"] < result["floor_output_tokens_per_second"]
    assert str(result["output_tokens"]) in done.stdout and 10 <= result["output_tokens"] <= 60


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("latency", "--prompt-tokens", "300"), "the model has 256: lower --prompt-tokens or --new-tokens"),
        (("throughput", "--shortest", "2", "--longest", "129"), "needs 258 tokens of context"),
    ],
)
def test_work_that_is_longer_than_the_context_says_what_to_lower(shape, arguments, message):
    done = run(*arguments, "--model", shape, "--load-format", "dummy")
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_serve(shape, tmp_path):
    command = [*TRANSECT, "serve", shape, "--load-format", "dummy", "--port", "0", "--threads", "1"]
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    file, picture = tmp_path / "result.json", tmp_path / "picture.png"
    with subprocess.Popen([*command, "--api-key-file", str(keys)], stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().split(" ready on ")[1].split()[0]
            # Long enough answers: on a busy machine a server may send several tokens at once, and five as one.
            work = ("--prompt-tokens", "uniform:2-9", "--output-tokens", "40", "--highest-id", "95", "--requests", "6")
            common = ("serve", "--url", url, "--api-key-file", str(keys), *work, "--slo", "ttft=60s,itl=60s")
            drawn = ("--plot", str(picture)) if importlib.util.find_spec("matplotlib") else ()
            done = run(*common, "--request-rate", "50", "--request-rate", "inf", "--json", str(file), *drawn)
            refused = run("serve", "--url", url, "--model", shape, *work, "--warm-up", "0", "--concurrency", "2")
        finally:
            server.terminate()
    assert server.returncode == 0
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert [level["load"] for level in result["levels"]] == [50.0, "inf"]
    for level in result["levels"]:
        assert level["succeeded"] == 6 and level["output_tokens"] == 240 and level["goodput"]["share"] == 1.0
        assert level["itl"]["p99"] > 0 and level["generator"]["lag"]["p99"] >= 0
    assert len(result["requests"]) == 12
    assert "goodput at 50 requests/s" in done.stdout
    assert not drawn or picture.stat().st_size > 1000
    assert refused.returncode == 1 and "6 requests failed: http 401" in refused.stdout


def test_energy_without_nvml(shape):
    done = run("latency", "--model", shape, "--load-format", "dummy", "--energy")
    if done.returncode == 0:
        pytest.skip("this machine has NVML")
    assert "energy cannot be measured: NVML is not on this machine" in done.stderr


def test_a_share_above_all_is_explained(capsys):
    about = Subject(None, None, None, None, "measured on 2026-01-02 while the machine was 85% busy")
    part = {"of_floor": 0.5, "mbu": 0.2, "mfu": 0.9}
    about.explain([part])
    assert not capsys.readouterr().out
    about.explain([part, part | {"mbu": 1.22}])
    assert "122% of the device's ceiling means that the ceiling, measured on 2026-01-02" in capsys.readouterr().out
