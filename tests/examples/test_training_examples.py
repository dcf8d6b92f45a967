"""The training examples: what they claim comes true."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LOOP = """
import json, os, sys
from pathlib import Path
from commands import script_here
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    file, missing, arguments = json.loads(line)
    if missing:
        known = [name for name in sys.modules if name.split(".")[0] == missing]
        kept = {name: sys.modules.pop(name) for name in known}
        sys.modules[missing] = None
    done = script_here(Path(file), *arguments)
    if missing:
        del sys.modules[missing]
        sys.modules.update(kept)
    print(json.dumps([done.returncode, done.stdout, done.stderr]), file=answers, flush=True)
"""
"""Runs examples one by one, without a package if its name is given: most of a short one is the import of torch."""
Run = Callable[..., str]


@pytest.fixture(scope="module")
def process() -> Iterator[subprocess.Popen[str]]:
    """Kernels stay out of it: the interpreter is slow."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    places = [EXAMPLES.parent / "src", EXAMPLES.parent / "tests" / "helpers"]
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, places)), "PYTHONWARNINGS": "error::UserWarning"}
    environment["OMP_NUM_THREADS"] = "1"  # where tests share the machine, threads that wait for each other spin
    with subprocess.Popen(
        [sys.executable, "-c", LOOP], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as made:
        yield made
        made.kill()


@pytest.fixture
def run(process: subprocess.Popen[str]) -> Run:
    """Return a function that runs an example, without the package ``missing``, and returns its output."""

    def ask(name: str, *arguments: str, missing: str = "") -> str:
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps([str(EXAMPLES / f"{name}.py"), missing, arguments]), file=process.stdin, flush=True)
        code, out, errors = json.loads(process.stdout.readline())
        assert missing or not code, errors
        return out + errors

    return ask


def numbers(pattern: str, text: str) -> list[float]:
    """The groups of the first match as numbers."""
    found = re.search(pattern, text)
    assert found, text
    return [float(group) for group in found.groups()]


def test_the_line_is_the_one_of_least_squares(run: Run) -> None:
    out = run("line")
    by_formula, by_trying = numbers(r"at the start: (\S+) by the formula, (\S+) by trying", out)
    assert by_formula == pytest.approx(by_trying, abs=1e-6)
    w, b, best_w, best_b = numbers(r"y = (\S+) x \+ (\S+); least squares says (\S+) x \+ (\S+)", out)
    assert (w, b) == pytest.approx((best_w, best_b), abs=1e-5)
    assert "*" in out.split("loss, by step")[1]


def test_a_rate_above_the_limit_makes_the_loss_grow_and_one_below_it_does_not(run: Run) -> None:
    (limit,) = numbers(r"of at most (\S+)", run("line"))
    for factor, grows in ((0.97, False), (1.03, True)):
        first, last = numbers(r"loss (\S+) -> (\S+);", run("line", "--rate", str(factor * limit), "--steps", "2000"))
        assert (last > first) is grows


def test_a_curve_can_be_drawn(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    assert "by step" not in run("line", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_xor_is_learned_and_the_three_ways_agree(run: Run) -> None:
    out = run("xor", "--steps", "200")  # the file itself asserts that all losses and weights agree
    rows = re.findall(r"^ +\d+ +(\S+) +(\S+) +(\S+)$", out, re.MULTILINE)
    assert len(rows) == 9
    assert all(hand == ours == torchs for hand, ours, torchs in rows)
    assert float(rows[-1][0]) < 0.01 * float(rows[0][0])
    answers = re.findall(r"^(\d) xor (\d): 1 with probability (\S+)$", out, re.MULTILINE)
    assert len(answers) == 4
    assert all(round(float(p)) == int(a) ^ int(b) for a, b, p in answers)


def test_digits_are_read(run: Run) -> None:
    (accuracy,) = numbers(r"test accuracy (\S+)%", run("digits", "--steps", "250"))
    assert accuracy > 95


def test_a_decoder_learns_bytes_and_writes_some(run: Run) -> None:
    out = run("characters", "--steps", "8")
    losses = [float(value) for value in re.findall(r"^step +\d+: (\S+) bits", out, re.MULTILINE)]
    assert losses[0] == pytest.approx(8, abs=0.3)  # before the first step every byte is about as likely
    (held_out,) = numbers(r"held out: (\S+) bits a byte", out)
    assert held_out < 5.5
    drawn = out.split("The class statement")[1].split("bits a byte, by step")[0]
    assert len(drawn.encode()) > 100


@pytest.mark.prove  # the chapters, the recipes and `transect train` are tested with adapters as well
def test_lora_lowers_the_loss_and_shows_answers_before_and_after(run: Run, smollm2) -> None:
    out = run("lora_smollm2", "--steps", "3")
    losses = [float(value) for value in re.findall(r"^step +\d+: loss (\S+) nats", out, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[-1] < 0.7 * losses[0]
    before, after = (re.findall(rf"^  {when}: +(.+)$", out, re.MULTILINE) for when in ("before", "after"))
    assert len(before) == len(after) == 3
    assert not any("{" in answer for answer in before)
    assert before != after


@pytest.mark.prove  # GRPO runs in the tests of objectives and recipes as well
def test_rewards_alone_teach_sums(run: Run) -> None:
    out = run("grpo", "--steps", "12")
    first, last = numbers(r"right answers: (\d+)% of the first rollout, (\d+)% of the last ones", out)
    assert 20 < first < 90
    assert last > first + 5


@pytest.mark.prove
def test_preferences_move_the_short_answers_ahead(run: Run, smollm2) -> None:
    out = run("dpo", "--steps", "3")
    margins = [float(value) for value in re.findall(r"margin (\S+) nats", out)]
    assert margins[0] == 0 and margins[-1] > 1
    assert out.count("before:") == out.count("after:") == 3


@pytest.mark.prove
def test_adapters_learn_over_four_bits(run: Run, smollm2) -> None:
    out = run("qlora", "--steps", "3")
    (bits,) = numbers(r"(\S+) bits each", out)
    assert 4 < bits < 6
    losses = [float(value) for value in re.findall(r"loss (\S+) nats", out)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("missing", "example", "message"),
    [
        ("sklearn", ("digits",), "the digits come with scikit-learn: pip install scikit-learn"),
        (
            "matplotlib",
            ("line", "--steps", "9", "--plot", "line.png"),
            "--plot needs matplotlib: pip install matplotlib",
        ),
    ],
    ids=["digits", "plot"],
)
def test_a_package_that_is_missing_is_named(run: Run, missing: str, example: tuple[str, ...], message: str) -> None:
    """An installation for running models has neither."""
    assert any(line.endswith(message) for line in run(*example, missing=missing).splitlines())


def test_triton_that_is_missing_is_named() -> None:
    file = str(EXAMPLES / "softcap.py")
    program = f"import runpy, sys; sys.modules['triton'] = None; runpy.run_path({file!r}, run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent / "src")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500, env=environment)
    message = "Triton is not installed: pip install 'transect[gpu]'"
    assert any(line.endswith(message) for line in (done.stdout + done.stderr).splitlines()), done.stderr
