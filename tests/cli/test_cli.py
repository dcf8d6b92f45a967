"""The ``transect`` command as a user meets it: a process, its output and its exit code."""

import os
import re
import signal
import subprocess
import sys

import pytest
from commands import run_here
from warm_processes import cold

TRANSECT = [sys.executable, "-m", "transect"]
PATIENCE_S = 200


def run(*arguments):
    """Run the command to its end, in a process of its own."""
    return subprocess.run([*TRANSECT, *arguments], capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def model(smollm2):
    return str(smollm2.path)


def one_line_error(done):
    """The message of a command that failed as it should."""
    assert done.returncode == 2, done
    assert done.stderr.startswith("transect: error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("arguments", [["--help"], [], ["bench"], ["serve", "--help"]])
def test_help_loads_nothing_heavy(arguments):
    program = (
        "import sys\nfrom transect.cli import main\ntry: main(sys.argv[1:])\n"
        "finally: print(sorted({'torch', 'fastapi', 'tokenizers', 'numpy', 'zmq'} & set(sys.modules)), "
        "sum(name.partition('.')[0] == 'transect' for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("Usage: transect") and not done.stderr
    heavy, modules = done.stdout.splitlines()[-1].rsplit(" ", 1)
    assert heavy == "[]" and int(modules) <= (15 if arguments in ([], ["--help"]) else 63)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serv"], "'serve'? See transect --help"),
        (["serve", "--prot", "1"], "--port"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--host", "no.such.host.invalid"], "--host"),
        (["serve", "--api-key-file", "/no/such/file"], "--api-key-file"),
        (["generate"], "'model'; see transect generate --help"),
        (["generate", "smollm2-135m", ""], "prompt is empty"),
        (["generate", "smollm2-135m", "x", "--temperature", "-1"], "temperature"),
        (["generate", "smollm2-135m", "x", "--n", "3"], "--n is for searches: give --search METHOD"),
        (["generate", "smollm2-135m", "x", "--search", "best"], "search.method must be one of adaptive"),
        (["data", "sample", "x.jsonl", "-o", "y.jsonl", "--for", "x"], "--for takes dpo, grpo, sft"),
        (["generate", "smollm2-135m", "x", "--max-tokens", "0"], "max_tokens"),
        (["generate", "smollm", "x"], "smollm2-135m"),
        (["generate", "smollm2-135m", "x", "--device", "tpu"], "device must be"),
        (["chat", "smollm2-135m", "--device", "tpu"], "device must be"),
        (["generate", "/no/such.gguf", "x"], "/no/such.gguf"),
        (["pull", "smollm2-153m"], "smollm2-135m"),
        (["bench", "latency", "--runs", "0"], "--runs"),
        (["bench", "serve", "--slo", "fast"], "objective 'fast' is not understood"),
        (["bench", "serve", "--url", "nowhere"], "give a URL such as"),
        (["bench", "serve", "--url", "http://127.0.0.1:1"], "does not answer"),
        (["bench", "serve", "--request-rate", "1", "--concurrency", "2"], "give one of"),
        (["bench", "serve", "--prompt-tokens", "many"], "not a distribution of lengths"),
        (["bench", "serve", "--model", "m", "--extra-body", "[]"], "JSON object"),
        (["bench", "serve", "--plot", "load.bmp"], "load.bmp must end in .png"),
        (["generate", "qwen3-0.6b", "x"], "load_format dummy"),
    ],
)
def test_errors_are_one_line_that_says_what_to_change(arguments, words):
    assert words in one_line_error(run_here(*arguments))


def test_an_error_ends_the_process_with_2():
    assert "'serve'? See transect --help" in one_line_error(run("serv"))


def test_damaged_model_file(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + b"\0" * 50)
    assert "model.gguf" in one_line_error(run_here("generate", str(file), "x"))


def test_debug_shows_where(tmp_path):
    done = run("--debug", "generate", "/no/such.gguf", "x")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_generate_streams_to_stdout_and_speed_to_stderr(model):
    with cold():
        done = run("generate", model, "The capital of France is", "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert re.search(r"12 tokens, \d+ tok/s, first after \d", done.stderr)
    again = run_here("generate", model, "-", "--max-tokens", "12", stdin="The capital of France is")
    assert again.stdout == done.stdout


def test_generate_into_a_closed_pipe_is_quiet(model):
    command = [*TRANSECT, "generate", model, "Once upon a time", "--max-tokens", "400"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(PATIENCE_S) == 1 and not errors


def test_help_into_a_closed_pipe_is_quiet():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*TRANSECT, "bench"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 1 and not done.stderr


@pytest.mark.parametrize("after", ["the start", "the first text"])
def test_ctrl_c_is_quiet(model, after):
    command = [*TRANSECT, "generate", model, "Once upon a time", "--max-tokens", "1500"]
    # A session of its own: the signal goes to the whole group, as from a terminal.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        if after == "the first text":
            process.stdout.read(1)
        else:
            # Waits for the engine process, which exists well before it is ready.
            while not subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True).stdout:
                assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        errors = process.stderr.read()
        assert process.wait(PATIENCE_S) == 130 and not errors


def test_chat_remembers_until_reset(model):
    question = "word " * 60
    lines = f"{question}\n/what\n{question}\n/reset\n{question}\n\n/exit\nnever read\n"
    # The likeliest tokens are the same every time: drawn ones may end an answer before its fifth token.
    options = ("--temperature", "0", "--max-tokens", "5", "--max-model-len", "128")
    done = run_here("chat", model, *options, stdin=lines)
    assert done.returncode == 0 and not done.stderr, done.stderr
    # One question fits into the context, two and an answer do not.
    answers = re.findall(r"5 tokens, \d+ tok/s.*cut at|context of 128 tokens is full|forgotten", done.stdout)
    assert [answer.split()[0] for answer in answers] == ["5", "context", "forgotten", "5"]
    assert done.stdout.count("/reset forgets") == 2


def test_chat_searches_its_answers(model):
    """The answer of a search is part of the conversation, as any other."""
    options = ("--search", "majority", "--n", "3", "--max-tokens", "4", "--temperature", "1", "--seed", "1")
    done = run_here("chat", model, *options, stdin="two and two?\nand then?\n/exit\n")
    assert done.returncode == 0 and not done.stderr, done.stderr
    summaries = re.findall(r"^\[majority: 3 branches, (\d+) tokens; votes .+: [123]", done.stdout, re.M)
    assert len(summaries) == 2 and all(3 <= int(tokens) <= 12 for tokens in summaries)
    done = run_here("chat", model, "--n", "3")
    assert done.returncode == 2 and "--n is for searches: give --search METHOD" in done.stderr


def test_demo_without_a_terminal_prints_plain_lines(model):
    done = run("demo", model, "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^chat \d: first token after", done.stdout, re.M)) == 8
    assert len(re.findall(r"^chat \d: \d+ tokens, \d+ tok/s", done.stdout, re.M)) == 8
    assert "together" in done.stdout and "KV cache at most" in done.stdout
    assert "the server has stopped cleanly" in done.stdout
    assert done.stdout.rstrip().endswith(f"serve {model}, then open http://127.0.0.1:8000/")
    assert "\x1b" not in done.stdout and done.stderr == f"transect: loading {model}\n"
