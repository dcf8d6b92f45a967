"""Scripts run as ``python`` would run them, end in every way there is, and what they did until then is explained."""

import _thread
import io
import os
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import run_here
from planted_faults import ceilings

from transect.cli.explain import _script
from transect.explain.program import explain as program
from transect.explain.program.apply import apply
from transect.explain.program.explain import Explain, explain_script
from transect.explain.program.finding import Finding
from transect.explain.program.sampler import StackSampler
from transect.explain.program.script import Input, Script, ScriptFailed

HEAD = "import os, sys, threading, torch\nx = torch.ones(8, 8)\nfor _ in range(30):\n    y = x @ x\n"


def write(folder, body, name="script.py"):
    path = folder / name
    path.write_text(HEAD + body)
    return path


def explained(script):
    return explain_script(script, Explain(ceilings(), cores=1, stacks=False))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("def f(d):\n    return d['x']\nf({})\n", r"failed with KeyError: 'x' \(.*script.py:6\)"),
        ("sys.exit(3)\n", "ended with exit status 3"),
        ("sys.exit('too bad')\n", "ended with too bad"),
    ],
)
def test_what_ran_before_an_error_is_explained(tmp_path, body, why, capsys):
    with pytest.raises(ScriptFailed, match=why) as failed:
        explained(Script(write(tmp_path, body)))
    assert "aten::mm" in str(failed.value.found) and "until then" in str(failed.value.found)
    said = capsys.readouterr().err
    assert "transect/explain" not in said and ("in f" in said or "too bad" in said or "status 3" in str(failed.value))


def test_ctrl_c_ends_the_program_and_not_the_explanation(tmp_path):
    found = explained(Script(write(tmp_path, "raise KeyboardInterrupt\n")))
    assert found.interrupted and "interrupted" in str(found) and "aten::mm" in str(found)


NOW = "import signal\nassert signal.getitimer(signal.ITIMER_REAL)[0] > 0\nsignal.setitimer(signal.ITIMER_REAL, 0.1)\n"
"""The alarm that was set for a script comes once it has computed, however slow the machine is."""


def test_a_program_that_never_ends_is_ended(tmp_path):
    script = write(tmp_path, f"{NOW}while True:\n    sum(range(100))\n")
    command = ("explain", "run", "--preset", "cpu-8-cores", "--seconds", "60", "--", "python", str(script))
    done = run_here(*command)
    assert done.returncode == 0 and "aten::mm" in done.stdout and "interrupted" in done.stdout, done.stderr


def test_threads_that_a_script_leaves_running_are_not_waited_for_any_longer_either(tmp_path):
    """The main thread has ended; the other one ends where nobody waits for it any more."""
    body = f"threading.Thread(target=sys.modules['seen_by_script'].wait, args=(5,)).start()\n{NOW}"
    sys.modules["seen_by_script"] = goes_on = threading.Event()
    try:
        found = explained(Script(write(tmp_path, body), seconds=60))
    finally:
        goes_on.set()
        del sys.modules["seen_by_script"]
    assert found.interrupted and "aten::mm" in str(found)


def test_what_a_script_changes_is_changed_back(tmp_path, monkeypatch):
    """A report lands in the folder, and on the output, that it was asked for."""
    body = (
        f"os.chdir('/')\nsys.path.clear()\nsys.argv.append('x')\nsys.stdout = open({os.devnull!r}, 'w')\nprint('in')\n"
    )
    monkeypatch.chdir(tmp_path)
    write(tmp_path, body)
    done = run_here("explain", "run", "--preset", "cpu-8-cores", "--json", "found.json", "--", "python", "script.py")
    assert done.returncode == 0 and "wall time" in done.stdout and "in\n" not in done.stdout
    assert (tmp_path / "found.json").is_file() and os.getcwd() == str(tmp_path)


def test_modules_run_as_with_m(tmp_path, monkeypatch):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "helper.py").write_text("VALUE = 7\n")
    write(folder, "from . import helper\nprint(helper.VALUE, sys.argv[1:], __name__)\n", "train.py")
    monkeypatch.chdir(tmp_path)
    command = ("explain", "run", "--preset", "cpu-8-cores", "--", "python", "-u", "-m")
    assert "7 ['-b', '--json'] __main__" in run_here(*command, "package.train", "-b", "--json").stdout
    assert "no module package.nothing" in run_here(*command, "package.nothing").stderr
    assert "not -O" in run_here("explain", "run", "--", "python", "-O", "x.py").stderr
    assert _script(["python_bench.py", "-b"], None) == Script("python_bench.py", ("-b",))  # is no interpreter


def test_outputs_that_cannot_be_written_are_refused_before_the_run(tmp_path):
    script = write(tmp_path, "raise SystemError('it ran')\n")
    (tmp_path / "no").touch()
    for option in ("--json", "--html", "--keep-trace"):
        done = run_here("explain", "run", option, str(tmp_path / "no" / "x"), "--", "python", str(script))
        assert done.returncode == 2 and "cannot be written" in done.stderr and "it ran" not in done.stderr


def test_threads_that_a_script_leaves_running_belong_to_it(tmp_path):
    body = "import time\ndef work():\n    time.sleep(0.05)\n    print('worked', flush=True)\n"
    ran = []
    sys.modules["seen_by_script"] = ran
    body += "    sys.modules['seen_by_script'].append(1)\nthreading.Thread(target=work).start()\n"
    try:
        found = explained(Script(write(tmp_path, body)))
    finally:
        del sys.modules["seen_by_script"]
    assert ran and found.split.wall > 0.05


def test_operators_of_all_threads_are_seen_and_hold_no_lock(tmp_path):
    """Threads that compute are no threads that run Python; the main thread only waits for them."""
    body = "big = torch.randn(300, 300)\ndef work():\n    for _ in range(60):\n        big @ big\n"
    body += "threads = [threading.Thread(target=work) for _ in range(2)]\n"
    body += "for thread in threads:\n    thread.start()\nfor thread in threads:\n    thread.join()\n"
    found = explain_script(Script(write(tmp_path, body)), Explain(ceilings(), cores=1))
    kinds = [each.kind for each in found.findings]
    assert kinds[0] == "wait" and "gil" not in kinds and "script.py:" in found.findings[0].evidence, str(found)
    trace = found.split.trace
    assert len({int(trace.lane[i]) for i in trace.where(0) if trace.key_of(int(i)).name == "aten::mm"}) > 1


def test_floors_are_those_of_the_threads_that_a_program_chose(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(program, "machine_ceilings", lambda: seen.append(torch.get_num_threads()) or ceilings())
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        explain_script(Script(write(tmp_path, "torch.set_num_threads(1)\n")), Explain(stacks=False))
        explain_script(Script(write(tmp_path, "")), Explain(stacks=False))
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 1, 1]


def test_there_is_one_profiler(tmp_path):
    """A second one would end the process."""
    with pytest.raises(ScriptFailed, match="switch the program's own off"):
        explained(Script(write(tmp_path, "with torch.profiler.profile():\n    x @ x\n")))
    with torch.profiler.profile(), pytest.raises(ValueError, match="one at a time"), Explain(ceilings()):
        pass
    with torch.profiler.profile() as own:
        torch.ones(2).neg()
    assert any("neg" in each.key for each in own.key_averages())


def test_a_child_that_is_forked_explains_nothing(tmp_path, capsys):
    """It ends where the script does, with its own status."""
    body = "child = os.fork()\nif not child:\n    sys.exit(5)\nprint('status', os.waitpid(child, 0)[1] >> 8)\n"
    found = explained(Script(write(tmp_path, body)))
    assert "status 5" in capsys.readouterr().out and "aten::mm" in str(found)


def test_standard_input_is_the_same_each_time(tmp_path, capsys):
    """Where changes are applied the script runs again, with nobody to see what it prints."""
    body = "total = sum(len(line) for line in sys.stdin)\nprint(total, 'characters')\nsys.stdout.fileno()\n"
    body += "sys.stdout.buffer.write(b'bytes')\nassert total == 12\n"
    given = io.TextIOWrapper(io.BytesIO(b"some\nwords.\n"))
    script = _script(["python3.11", str(write(tmp_path, body))], given)
    promised = SimpleNamespace(steps=None, findings=[Finding("autograd", "", "", 0.01, "", "inference mode, threads")])
    done = apply(script, promised)
    assert [each.failed for each in done] == ["", ""] and "characters" not in capsys.readouterr().out
    assert script.stdin.kept == b"some\nwords.\n" and given.read() == ""
    assert "AssertionError" in apply(replace(script, stdin=Input(io.BytesIO())), promised)[0].failed


def test_standard_input_that_nobody_reads_is_not_waited_for(tmp_path):
    """That of a program which another one started may stay open for ever."""
    end, other = os.pipe()
    with open(end) as given, open(other, "wb", buffering=0) as written:
        script = _script(
            [str(write(tmp_path, "print(sys.stdin.readline() if sys.argv[1:] else 'read nothing')\n"))], given
        )
        assert not script.run().failed and not script.stdin.kept
        written.write(b"line\n")
        assert not replace(script, arguments=("read",)).run().failed and script.stdin.kept == b"line\n"


def test_the_first_range_of_a_process_is_not_the_programs(monkeypatch):
    """It takes milliseconds. One that is over when the profiler begins bears them."""
    with Explain(ceilings(), stacks=False):  # measures what profiling costs, by profiling
        pass
    begun = []

    def noted(name, call):
        return lambda *arguments, **settings: begun.append(name) or call(*arguments, **settings)

    for name in ("record_function", "profile"):
        monkeypatch.setattr(torch.profiler, name, noted(name, getattr(torch.profiler, name)))
    with Explain(ceilings(), stacks=False) as run:
        torch.ones(64, 64) @ torch.ones(64, 64)
    assert begun[:3] == ["record_function", "profile", "record_function"]
    split = run.result.split
    assert {type(seconds) for seconds in (*split.parts.values(), *(op.floor or 0.0 for op in split.ops))} == {float}


def test_compiled_modules_get_no_warning_of_the_hook_that_looks_at_them():
    module = torch.compile(torch.nn.Linear(4, 4), backend="eager")
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as said, Explain(ceilings(), stacks=False):
        module(torch.ones(2, 4))
    assert not [each for each in said if "global hooks" in str(each.message)] and warnings.filters == before


def test_what_a_function_holds_ends_in_its_own_thread():
    """Guards of torch's switch something of their thread back when they end: in another one autograd would stay off."""
    ended = set()

    class Guard:
        def __del__(self):
            ended.add(threading.get_ident())

    def guarded():
        guard = Guard()  # noqa: F841
        return sum(range(20))

    with StackSampler(1e-5) as sampler:
        while len(sampler.found.samples) <= 20:
            for _ in range(1000):
                guarded()
    assert ended == {threading.get_ident()}


@pytest.mark.skipif(sys.platform != "linux", reason="timers of Linux")
def test_timers_of_the_sampling_thread_are_fine():
    """They ring microseconds late, not fifty; those of the program stay as they are."""
    with StackSampler() as sampler:
        path = Path(f"/proc/{sampler._thread.native_id}/timerslack_ns")
        own = Path("/proc/self/timerslack_ns").read_text()
        try:
            path.read_text()
        except PermissionError:
            pytest.skip("reading it of another thread needs CAP_SYS_NICE")
        deadline = time.monotonic() + 30
        while int(path.read_text()) != 1000 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert int(path.read_text()) == 1000 != int(own)


@pytest.mark.parametrize("waits", [True, False])
def test_a_thread_that_threading_does_not_know_runs_if_it_moves_on(waits):
    """Libraries start such threads, and the system gives no processor time for them."""
    read, write = os.pipe()
    ended = _thread.allocate_lock()
    ended.acquire()

    def blocked():
        os.read(read, 1)
        ended.release()

    def counting():
        while not done:
            for number in range(20):
                sum(int(digit) for digit in str(number))
        ended.release()

    def enough(samples):
        ran = sum(sample.busy for sample in samples)
        return len(samples) > 50 and (waits or ran > len(samples) / 4)

    done, until = [], time.monotonic() + 60
    _thread.start_new_thread(blocked if waits else counting, ())
    with StackSampler() as sampler:
        while not enough(list(sampler.found.samples)) and time.monotonic() < until:
            for _ in range(100_000):  # a busy machine may give both threads little of the time
                pass
    done.append(True)
    os.write(write, b"x")
    ended.acquire()
    os.close(read)
    os.close(write)
    ran = sum(sample.busy for sample in sampler.found.samples)
    assert (ran == 0) if waits else (ran > len(sampler.found.samples) / 4)
