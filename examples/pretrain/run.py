"""Pretrain a small language model from random weights and hear it speak: one command, within ten minutes on an H200.

    python examples/pretrain/run.py library                  # on an H200: 54 MB of books, plays and dictionaries
    python examples/pretrain/run.py library --preset cpu     # the same in small
    python examples/pretrain/run.py shakespeare --text tinyshakespeare.txt   # beside nanoGPT's published losses

It runs the commands that a user would type, and prints each: ``transect data tokenize``, ``train``, ``plot`` and
``serve``; at the end it asks the server for some text. Everything is under ``runs/pretrain`` of the working directory,
and a ``.toml`` beside this file says all settings of the training. What came of it is in ``RUN/result.json``.

A file that is there already is not made again: remove ``runs/pretrain`` to begin anew.
"""

from __future__ import annotations

import argparse
import bz2
import json
import lzma
import math
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import corpus
from byte_model import Shape, write_model

HERE = Path(__file__).resolve().parent
ROOT = Path("runs/pretrain")
SHAPES = {
    "library-h200": Shape(dim=512, layers=8, heads=8, ffn=1408, context=1024),
    "library-cpu": Shape(dim=128, layers=4, heads=4, ffn=336, context=128),
    "shakespeare-h200": Shape(dim=384, layers=6, heads=6, ffn=1024, context=256),
    "shakespeare-cpu": Shape(dim=128, layers=4, heads=4, ffn=336, context=64),
}
PROMPTS = {
    "library": (
        "Alice was beginning to",
        "\n\nCHAPTER II\n\n",
        "ROMEO.\nWhat light",
        'Philosophy \\Phi*los"o*phy\\, n.',
        "operating system\n<operating system>",
        "And it came to pass",
    ),
    "shakespeare": ("ROMEO:\n", "First Citizen:\n"),
}
PUBLISHED = {
    # https://github.com/karpathy/nanoGPT, README.md at 3adf61e: nats per character of the last tenth of the text
    "shakespeare-h200": {"parameters": 10.65e6, "nats": 1.4697, "tokens": 5000 * 64 * 256},
    "shakespeare-cpu": {"parameters": 0.80e6, "nats": 1.88, "tokens": 2000 * 12 * 64},
}


def transect(*arguments: str, seconds: float | None = None) -> None:
    """Run a command of ``transect`` and show it; it is asked to end after ``seconds``.

    Raises:
        CalledProcessError: it failed.
    """
    print(f"\n$ transect {shlex.join(arguments)}", flush=True)
    process = subprocess.Popen([sys.executable, "-m", "transect", *arguments])
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # training finishes its step and writes a checkpoint
        process.wait()
    except KeyboardInterrupt:
        process.wait()  # it was told too
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, arguments)


def prepare(task: str, text: Path | None) -> list[Path]:
    """The text files of a task, the first to train on, the others to validate on."""
    folder = ROOT / task
    folder.mkdir(parents=True, exist_ok=True)
    if task == "library":
        files = [folder / f"{name}.jsonl" for name in ("train", *(f"validation-{kind}" for kind in corpus.KINDS))]
        if not all(file.exists() for file in files):
            corpus.fetch(folder)
            corpus.write(folder)
        return files
    files = [folder / "train.txt", folder / "validation.txt"]
    if not all(file.exists() for file in files):
        if text is None:
            raise ValueError(
                "give --text: data/tinyshakespeare/input.txt of https://github.com/karpathy/char-rnn, or any other text"
            )
        whole = text.read_bytes().decode("utf-8")
        cut = int(0.9 * len(whole))  # where nanoGPT cuts
        files[0].write_bytes(whole[:cut].encode())
        files[1].write_bytes(whole[cut:].encode())
    return files


def serve_and_ask(model: Path, prompts: tuple[str, ...], max_tokens: int, options: list[str]) -> list[dict[str, str]]:
    """Start ``transect serve``, let it continue each prompt, and stop it.

    Raises:
        ValueError: the server ended, or did not answer within two minutes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["serve", str(model), "--port", str(port), *options]
    print(f"\n$ transect {shlex.join(arguments)}", flush=True)
    server = subprocess.Popen([sys.executable, "-m", "transect", *arguments])
    try:
        until = time.monotonic() + 120
        while not answers(f"http://127.0.0.1:{port}/health"):
            if server.poll() is not None or time.monotonic() > until:
                raise ValueError("the server did not start; its last lines above say why")
            time.sleep(0.2)
        found = []
        for prompt in prompts:
            body = {"model": str(model), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.7, "seed": 1}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                text = json.load(answer)["choices"][0]["text"]
            print(f"{'-' * 60}\n{prompt}|{text}", flush=True)
            found.append({"prompt": prompt, "text": text})
        return found
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=40)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def of_log(log: list[dict[str, Any]]) -> dict[str, Any]:
    """What the log of a run says: sizes, speed, memory, and validation over tokens."""
    steps = [line for line in log if line["kind"] == "step"]
    per_step = steps[0]["tokens"]
    half = statistics.median(line["seconds"] for line in steps)
    return {
        "steps": len(steps),
        "tokens_per_step": per_step,
        "tokens": per_step * len(steps),
        "median_step_seconds": half,
        "tokens_per_second": per_step / half,
        "mfu": statistics.median(line["mfu"] for line in steps) if "mfu" in steps[0] else None,
        "seconds_of_steps": sum(line["seconds"] for line in steps),
        "peak_bytes": max(line["peak_bytes"] for line in steps),
        "validation": [
            {"tokens": line["step"] * per_step, "nats": line["loss"], "bits_per_byte": line["bits_per_byte"]}
            for line in log
            if line["kind"] == "evaluation"
        ],
    }


def command_of(options: argparse.Namespace) -> str:
    """The command as another user would type it: without this machine's folders."""
    words = ["python", "examples/pretrain/run.py", options.task, "--preset", options.preset]
    words += [] if options.text is None else ["--text", options.text.name]
    words += [] if options.steps is None else ["--steps", str(options.steps)]
    words += [] if options.seconds is None else ["--seconds", f"{options.seconds:g}"]
    return shlex.join(words)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def bits_by_file(model: Path, files: list[Path], settings: Any) -> dict[str, float]:
    """Bits per byte of a checkpoint on each token file, in windows of the training's length that see nothing else."""
    import dataclasses

    from transect.train.model.build import build
    from transect.train.objectives.next_token import NextToken

    found = {}
    config = dataclasses.replace(settings, model=str(model), task="finetune")
    trainable = build(config)
    for file in files:
        data = dataclasses.replace(config.data, train=(str(file),), validation=(str(file),))
        measured = NextToken(dataclasses.replace(config, data=data), trainable).evaluate()
        assert measured is not None
        found[file.stem] = measured.loss * measured.labels / math.log(2) / measured.bytes
    return found


def compressed_bits(held_out: list[Path]) -> dict[str, float]:
    """What bzip2 and xz need for the validation text, in bits per byte, for comparison."""
    data = b"".join(text_of(file) for file in held_out)
    return {name: 8 * len(tool.compress(data)) / len(data) for name, tool in (("bzip2", bz2), ("xz", lzma))}


def text_of(file: Path) -> bytes:
    if file.suffix != ".jsonl":
        return file.read_bytes()
    with file.open(encoding="utf-8") as lines:
        return "".join(json.loads(line)["text"] for line in lines).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description="Pretrain a small model, and let it write.")
    parser.add_argument("task", choices=("library", "shakespeare"))
    parser.add_argument("--preset", choices=("h200", "cpu"), default="h200")
    parser.add_argument("--text", type=Path, help="the text of the task shakespeare")
    parser.add_argument("--steps", type=int, help="in place of the preset's number of steps")
    parser.add_argument("--seconds", type=float, help="end the training after so long, wherever it is")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each sample")
    options = parser.parse_args()
    begin = time.perf_counter()

    from transect.hardware.environment import environment
    from transect.train.config import TrainConfig
    from transect.train.loop.report import read_log

    name = f"{options.task}-{options.preset}"
    settings = TrainConfig.from_toml(HERE / f"{name}.toml")
    shape = ROOT / f"{name}-shape"
    write_model(shape, SHAPES[name])
    files = prepare(options.task, options.text)
    token_files = [file.with_suffix(".tokens") for file in files]
    for file, tokens in zip(files, token_files, strict=True):
        if not (tokens / "meta.json").exists():
            transect("data", "tokenize", str(file), "-o", str(tokens), "--model", str(shape))
    prepared = time.perf_counter()
    steps = [] if options.steps is None else ["--steps", str(options.steps)]
    transect("train", str(HERE / f"{name}.toml"), *steps, seconds=options.seconds)
    trained = time.perf_counter()
    run = Path(settings.run_dir)
    log = read_log(run)
    evaluations = [line for line in log if line["kind"] == "evaluation"]
    unit = ["--bits"] if evaluations else []
    transect("plot", str(run), "-o", str(run / "curve.svg"), "--by", "tokens", *unit, "--window", "10")
    device = [] if settings.device == "auto" else ["--device", settings.device]
    samples = serve_and_ask(run / "last", PROMPTS[options.task], options.tokens, device)

    result = {
        "command": command_of(options),
        "corpus": {file.name: len(text_of(file)) for file in files},
        **of_log(log),
        "seconds": {
            "prepare": prepared - begin,
            "train": trained - prepared,
            "plot, serve, ask": time.perf_counter() - trained,
        },
        "bits_per_byte": bits_by_file(run / "last", token_files[1:], settings),
        "compressors_bits_per_byte": compressed_bits(files[1:]),
        "published": PUBLISHED.get(name),
        "samples": samples,
        "environment": environment(("torch", "numpy", "triton", "transformers")),
    }
    (run / "result.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for file, bits in result["bits_per_byte"].items():
        print(f"{file}: {bits:.4f} bits per byte")
    if evaluations:
        best = min(evaluations, key=lambda line: line["loss"])
        print(f"best validation: {best['bits_per_byte']:.4f} bits per byte after {best['step']} steps")
    if name in PUBLISHED:
        print(f"nanoGPT publishes {PUBLISHED[name]['nats'] / math.log(2):.4f} at this size")
    print(f"all of it in {time.perf_counter() - begin:.0f} s; {run / 'result.json'}")


if __name__ == "__main__":
    main()
