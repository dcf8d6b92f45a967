"""Search beside single requests and beside optillm: speed, accuracy on exact tasks, tokens of adaptive stopping.

    python benchmarks/engine/search.py [--model MODEL] [--dummy] [--device cpu] [--parts speed tasks server]
                                       [--tasks 100] [--served 24] [--rounds 5] [--optillm PROGRAM]
                                       [--only RACE ...] [--resume] [--out FILE]

``speed``: tokens per second of ``--branches`` branches of one prompt, beside as many requests that find the prompt in
the prefix cache, and the most KV blocks that each held. Contenders take turns.
``tasks``: accuracy of methods beside one greedy answer and beside guessing, with 95% intervals, in an ``LLM``.
``server``: the same tasks over HTTP, and through optillm in front of the same server, one task at a time. Install
optillm 0.3.20 in an environment of its own, and name its program: ``--optillm /path/to/bin/optillm``. Both draw at
temperature 1, which optillm fixes. Its mixture also has the model write a critique of up to 512 tokens, so a task takes
it 15 to 30 seconds with the default model on two cores, where the votes take 2 to 8: ``--only "mixture of 3" --served 8
--rounds 3`` runs this race alone, on less.

The file is written after each family of tasks and each race. ``--resume`` keeps what the file has of this commit, and
measures the rest.

With ``--device cuda --dummy --model MODEL --parts speed`` the shape of a large model is measured for speed alone.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from search_tasks import FAMILIES, Family, Task

import _paths  # noqa: F401
from benchmarks import record
from transect import LLM, SamplingParams, Search
from transect.bench.search_gain import Gain
from transect.search.extract import extract

MAX_TOKENS = 24
VERIFIER = '''
import re

def check(question, answer):
    """Recompute a sum, count the words of a puzzle, or sort the letters."""
    numbers = [int(each) for each in re.findall(r"\\d+", question)]
    if "+" in question:
        found = re.findall(r"-?\\d+", answer)
        return bool(found) and int(found[-1]) == sum(numbers)
    if question.startswith("Write"):
        word = question.split()[1]
        return answer.strip() == "[" + ", ".join([word] * numbers[0]) + "]"
    if question.startswith("Sort"):
        return answer.strip() == " ".join(sorted(question.rpartition(": ")[2].split()))
    return None
'''


def engine(options: argparse.Namespace, **more: Any) -> LLM:
    """Build an engine with the benchmark's settings."""
    settings: dict[str, Any] = {"device": options.device, "max_num_seqs": options.branches, "seed": 1, **more}
    settings |= {"load_format": "dummy"} if options.dummy else {}
    return LLM(options.model, max_model_len=options.context, **settings)


# ---- speed


def branches(llm: LLM, prompt: list[int], count: int, tokens: int) -> None:
    """Run one search with ``count`` branches."""
    params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, seed=1)
    (result,) = llm.search([prompt], Search("majority", n=count, extract="text"), params)
    assert result.drawn == count * tokens


def requests(llm: LLM, prompt: list[int], count: int, tokens: int) -> None:
    """Run ``count`` requests, after one of a single token by which the others find the prompt in the prefix cache."""
    params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, seed=1)
    llm.generate([prompt], params.with_(max_tokens=1))
    llm.generate([prompt] * count, [params.with_(seed=number) for number in range(count)])


def peak_blocks(llm: LLM, work: Any, *arguments: Any) -> int:
    """Return the most KV blocks that running requests held."""
    most, step = 0, llm._core.step

    def watched() -> Any:
        nonlocal most
        outputs = step()
        most = max(most, llm.stats().kv_blocks_used)
        return outputs

    llm._core.step = watched  # type: ignore[method-assign]
    try:
        work(llm, *arguments)
    finally:
        llm._core.step = step  # type: ignore[method-assign]
    return most


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Measure tokens per second of branches beside requests."""
    llm = engine(options)
    prompt = [300 + number % 1000 for number in range(options.prompt)]
    count, tokens = options.branches, options.tokens
    contenders = {"branches": branches, "requests": requests}
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(options.rounds + 1):
        for name in sorted(contenders, reverse=bool(turn % 2)):
            llm.reset_prefix_cache()
            began = time.perf_counter()
            contenders[name](llm, prompt, count, tokens)
            if turn:  # the first round warms up
                rates[name].append(count * tokens / (time.perf_counter() - began))
    ratios = [own / other for own, other in zip(rates["branches"], rates["requests"], strict=True)]
    found: dict[str, Any] = {"branches_over_requests": record.summary(ratios)}
    for name, work in contenders.items():
        llm.reset_prefix_cache()
        blocks = peak_blocks(llm, work, prompt, count, tokens)
        found[name] = {"tokens_per_s": record.summary(rates[name]), "most_kv_blocks": blocks}
        print(f"{name:10} {statistics.median(rates[name]):10.1f} tokens/s, at most {blocks} KV blocks", flush=True)
    found |= {"count": count, "prompt_tokens": len(prompt), "tokens": tokens}
    return found


# ---- tasks


def right(text: str, task: Task, family: Family) -> bool:
    """Return True if a text has the right short answer."""
    return extract(text, family.extract) == task.answer


def methods(family: Family) -> dict[str, Search]:
    """List the searches to compare for a family of tasks."""
    voted = {"extract": family.extract}
    found = {
        "majority of 32": Search("majority", n=32, **voted),
        "adaptive, at most 32": Search("adaptive", n=32, wave=4, **voted),
        "confident, at most 32": Search("confident", n=32, warmup=8, window=4, **voted),
        "best of 16 by likelihood": Search("best_of_n", n=16),
        "best of 16 by verdict": Search("best_of_n", n=16, score="verdict"),
    }
    if family.name != "lot":
        found["best of 16 by a checker"] = Search("best_of_n", n=16, score="check")
    return found


def tasks(options: argparse.Namespace, found: dict[str, Any]) -> Iterator[None]:
    """Measure the accuracy of methods on the families of tasks that ``found`` lacks; yields after each."""
    left = [name for name in options.families if name not in found]
    if not left:
        return
    llm = engine(options, max_num_seqs=max(options.branches, 64))
    checker: dict[str, Any] = {}
    exec(VERIFIER, checker)  # the text of the file that a server is given
    for name in left:
        family = FAMILIES[name]
        asked = family.tasks(options.tasks, 0)
        said = [task.messages for task in asked]
        greedy = llm.chat(said, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0))
        single = [right(output.outputs[0].text, task, family) for output, task in zip(greedy, asked, strict=True)]
        guess = family.guessing(asked)
        part: dict[str, Any] = {
            "guess": guess,
            "greedy_tokens": sum(len(each.outputs[0].token_ids) for each in greedy),
        }
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=options.temperature, seed=1)
        for title, search in methods(family).items():
            began = time.perf_counter()
            results = llm.search(said, search, params, judges={"check": checker["check"]})
            seconds = time.perf_counter() - began
            gain = Gain([right(r.text, t, family) for r, t in zip(results, asked, strict=True)], single, guess)
            drawn = sum(result.drawn for result in results)
            part[title] = {**gain.to_dict(), "tokens": drawn, "seconds": seconds}
            print(f"{name}: {title}: {gain}; {drawn} tokens", flush=True)
        part["adaptive_share_of_tokens"] = part["adaptive, at most 32"]["tokens"] / part["majority of 32"]["tokens"]
        found[name] = part
        yield


# ---- server


@contextmanager
def process(command: Sequence[str], ready: str, **environment: str) -> Iterator[str]:
    """Run a server until the block ends; yields the line that has ``ready``."""
    with tempfile.NamedTemporaryFile("r+") as log:  # a pipe that nobody reads would block the server
        made = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment})
        try:
            while not (line := next((line for line in Path(log.name).read_text().splitlines() if ready in line), "")):
                if made.poll() is not None:
                    raise RuntimeError(f"{command[0]} did not start: {Path(log.name).read_text()[-500:]}")
                time.sleep(0.1)
            yield line
        finally:
            made.terminate()
            made.wait(60)


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a chat request, and return the answer."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


CONTENDERS: dict[str, dict[str, dict[str, Any]]] = {
    "vote of 5": {
        "transect": {"model": "majority-m", "search": {"n": 5, "extract": "number"}},
        "optillm": {"model": "self_consistency-m"},
    },
    "best of 8, judged by the model": {
        "transect": {"model": "bon-m", "search": {"n": 8, "score": "verdict"}},
        "optillm": {"model": "bon-m"},
    },
    "mixture of 3": {
        "transect": {"model": "moa-m", "search": {"n": 3}},
        "optillm": {"model": "moa-m"},
    },
}


def served(options: argparse.Namespace, found: dict[str, Any]) -> Iterator[None]:
    """Measure wall time and accuracy over HTTP, with and without optillm in between, in the races that ``found`` lacks;
    yields after each."""
    left = [title for title in options.only if title not in found]
    if not left:
        return
    family = FAMILIES["sum"]
    asked = family.tasks(options.served * options.rounds, 1)
    command = [sys.executable, "-m", "transect", "serve", options.model, "--port", "0", "--served-model-name", "m"]
    with tempfile.TemporaryDirectory() as folder:
        verifier = Path(folder) / "checks.py"
        verifier.write_text(VERIFIER)
        command += ["--device", options.device, "--verifier", f"check={verifier}:check"]
        with process(command, " ready on ") as line:
            url = line.split(" ready on ")[1].split()[0]
            single = [
                right(_text(post(url, _body(task, {"model": "m"}) | {"temperature": 0})), task, family)
                for task in asked
            ]
            guess = family.guessing(asked)
            with optillm(options.optillm, url) as urls:
                for title in left:
                    found[title] = _race(title, urls, asked, family, single, guess, options.rounds)
                    yield


@contextmanager
def optillm(program: str | None, url: str) -> Iterator[dict[str, str]]:
    """Run optillm in front of a server, if there is a program. Yields the addresses of the contenders."""
    if program is None:
        print("no --optillm: only transect is measured", flush=True)
        yield {"transect": url}
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [program, "--base-url", f"{url}/v1", "--port", str(port), "--best-of-n", "8"]
    with process(words, "Running on", OPENAI_API_KEY="none"):
        yield {"transect": url, "optillm": f"http://127.0.0.1:{port}"}


def _body(task: Task, fields: dict[str, Any]) -> dict[str, Any]:
    return {"messages": task.messages, "max_tokens": MAX_TOKENS, "temperature": 1} | fields


def _text(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"] or "")


def _race(
    title: str, urls: dict[str, str], asked: list[Task], family: Family, single: list[bool], guess: float, rounds: int
) -> dict[str, Any]:
    """Let contenders take turns; each round has tasks of its own."""
    contenders = CONTENDERS[title]
    found: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {name: [] for name in urls}
    answers: dict[str, list[bool]] = {name: [] for name in urls}
    each = len(asked) // rounds
    for turn in range(rounds):
        part = asked[turn * each : (turn + 1) * each]
        for name in sorted(urls, reverse=bool(turn % 2)):
            began = time.perf_counter()
            texts = [_text(post(urls[name], _body(task, contenders[name]))) for task in part]
            seconds[name].append(time.perf_counter() - began)
            answers[name] += [right(text, task, family) for text, task in zip(texts, part, strict=True)]
            print(f"{title}: {name}: round {turn + 1} of {rounds}: {seconds[name][-1]:.1f} s", flush=True)
    for name in urls:
        gain = Gain(answers[name], single, guess)
        found[name] = {**gain.to_dict(), "seconds": record.summary(seconds[name]), "tasks": each}
        print(f"{title}: {name}: {statistics.median(seconds[name]):.1f} s; {gain}", flush=True)
    if "optillm" in urls:
        ratios = [own / other for own, other in zip(seconds["transect"], seconds["optillm"], strict=True)]
        found["transect_over_optillm"] = record.summary(ratios)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--parts", nargs="+", default=["speed", "tasks", "server"], choices=["speed", "tasks", "server"]
    )
    parser.add_argument("--branches", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=500, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each branch")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--served", type=int, default=24, help="tasks over HTTP in a round")
    parser.add_argument("--families", nargs="+", default=["add", "puzzle", "lot"], choices=sorted(FAMILIES))
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--optillm", help="program of optillm 0.3.20 in an environment of its own")
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS), help="races to run")
    parser.add_argument("--resume", action="store_true", help="keep what the file has of this commit")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = options.device
    if device != "cpu":
        import torch

        device = torch.cuda.get_device_name()
    where = "cpu" if options.device == "cpu" else "h200" if "H200" in device else "h100"
    out = options.out or record.RESULTS / where / "search.json"
    settings = {name: getattr(options, name) for name in ("model", "dummy", "rounds", "temperature")}
    head = {**settings, "device": device, "environment": record.environment()}
    head["command"] = record.command("benchmarks/engine/search.py")
    found: dict[str, Any] = {}
    if options.resume and out.exists():
        found = begun(json.loads(out.read_text()), head)
    if "speed" in options.parts and "speed" not in found:
        found["speed"] = speed(options)
        record.write(out, found | head)
    for part, measure in (("tasks", tasks), ("server", served)):
        if part in options.parts:
            for _ in measure(options, found.setdefault(part, {})):
                record.write(out, found | head)


def begun(recorded: dict[str, Any], head: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a file that a run with the same model at the same commit has written.

    Raises:
        ValueError: it was another run.
    """
    for name in ("model", "dummy", "device", "temperature"):
        if recorded[name] != head[name]:
            raise ValueError(f"the file is of {name} {recorded[name]}, not {head[name]}: give another --out")
    commits = [each["environment"]["commit"] for each in (recorded, head)]
    if commits[0] != commits[1]:
        raise ValueError(f"the file is of commit {commits[0]}, not {commits[1]}: give another --out")
    return {part: recorded[part] for part in ("speed", "tasks", "server") if part in recorded}


if __name__ == "__main__":
    main()
