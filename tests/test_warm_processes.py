"""Processes that start from a helper do what processes do that start as usual."""

import json
import os
import signal
import subprocess
import sys

import pytest
from warm_processes import _to_run, cold, install

SHOW = """
import json, os, signal, sys
import transect
print(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "first": sys.path[0], "main": __name__, "given": os.environ.get("GIVEN"),
    "left": os.environ.get("PATH"), "parent": os.getppid(), "leads": os.getpgrp() == os.getpid(),
    "session": os.getsid(0) == os.getpid(), "input": sys.stdin.read(), "cores": sorted(os.sched_getaffinity(0)),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "open": sorted(int(each) for each in os.listdir("/proc/self/fd"))[:3],
}))
print("beside", file=sys.stderr)
"""
ENDS = {
    "by itself": "",
    "with a code": "sys.exit(7)",
    "with words": "sys.exit('words')",
    "by an error": "raise ValueError('wrong')",
    "at its exit": "import atexit; atexit.register(print, 'late')",
    "after a thread": "import threading, time; threading.Timer(0.05, print, ['late']).start()",
    "by a signal": "os.kill(os.getpid(), signal.SIGKILL)",
    "by Ctrl-C": "os.kill(os.getpid(), signal.SIGINT)",
}


@pytest.fixture(scope="module", autouse=True)
def installed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "_execute_child", subprocess.Popen._execute_child)  # restored at the end
        if not install():
            pytest.skip("processes start as usual on this system")
        yield


def both(program, *arguments, **options):
    """Run a program as usual and warm."""
    run = {"capture_output": True, "text": True, "timeout": 200, **options}
    command = [sys.executable, "-c", program, *arguments]
    with cold():
        usual = subprocess.run(command, **run)
    return usual, subprocess.run(command, **run)


@pytest.mark.parametrize(
    "options", [{}, {"process_group": 0}, {"start_new_session": True}], ids=["its parent's group", "group", "session"]
)
def test_surroundings_are_those_that_were_asked_for(tmp_path, options):
    environment = {name: value for name, value in os.environ.items() if name != "PATH"} | {"GIVEN": "x"}
    usual, warm = both(SHOW, "a", "b", cwd=tmp_path, env=environment, input="some words", **options)
    assert json.loads(usual.stdout) == json.loads(warm.stdout)
    assert usual.stderr == warm.stderr and json.loads(warm.stdout)["parent"] == os.getpid()


def test_it_ends_as_others_do():
    programs = [f"import os, signal, sys\nimport torch\n{end}" for end in ENDS.values()]
    for name, program in zip(ENDS, programs, strict=True):
        with cold():
            usual = subprocess.run([sys.executable, "-c", program.replace("import torch\n", "")], capture_output=True)
        warm = subprocess.run([sys.executable, "-c", program], capture_output=True)
        assert (usual.returncode, usual.stdout) == (warm.returncode, warm.stdout), name
        assert usual.stderr.splitlines()[-1:] == warm.stderr.splitlines()[-1:], name


def test_its_child_is_its_child_and_descriptors_are_passed():
    read, write = os.pipe()
    inner = "import torch, os, sys; os.write(int(sys.argv[1]), str(os.getppid()).encode())"
    outer = (
        "import torch, subprocess, sys, os; print(os.getpid());"
        f"subprocess.run([sys.executable, '-c', {inner!r}, sys.argv[1]], pass_fds=[int(sys.argv[1])], check=True)"
    )
    run = [sys.executable, "-c", outer, str(write)]
    done = subprocess.run(run, pass_fds=[write], capture_output=True, text=True)
    os.close(write)
    with os.fdopen(read) as answers:
        assert done.returncode == 0 and answers.read() == done.stdout.strip()


def test_it_has_the_package_of_this_process():
    usual, warm = both("import transect.spec.shapes as shapes; print(shapes.__file__)")
    assert usual.stdout == warm.stdout != ""


def test_variables_that_torch_sets_for_itself_keep_it_warm(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere")
    monkeypatch.setenv("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    program = "import torch, os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'], open('/proc/self/cmdline').read())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith("/nowhere ") and "warm_processes.py" in done.stdout


def test_signals_and_streams_reach_it():
    program = "import torch, time; print('ready', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == -signal.SIGTERM and process.stdout.read() == ""


@pytest.mark.parametrize(
    ("words", "warm"),
    [
        (["-m", "transect", "serve"], True),
        (["-m", "pip"], False),
        (["-c", "import transect"], True),
        (["-c", "import sys, transect; print('torch' in sys.modules)"], False),
        (["-c", "print(1)"], False),
        (["-X", "importtime", "-m", "transect"], False),
        (["nothing.py"], False),
    ],
)
def test_what_looks_at_its_imports_starts_as_usual(words, warm):
    given = dict.fromkeys(("preexec_fn", "executable", "gid", "gids", "uid", "umask"))
    given |= {"args": [sys.executable, *words], "shell": False, "close_fds": True}
    assert (_to_run(given) == words) if warm else (_to_run(given) is None)
