"""Jobs of several processes: ranks explain themselves, and are compared."""

import json

import pytest
from commands import run_here

from transect.explain.program.job import Job, Rank, launches

TRAIN = """
import time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(30):
    if dist.get_rank() == 1:
        time.sleep(0.05)
    optimizer.zero_grad()
    net(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_ranks_are_compared(tmp_path):
    script, figures = tmp_path / "train.py", tmp_path / "found.json"
    script.write_text(TRAIN)
    launcher = ("torchrun", "--standalone", "--nproc-per-node", "2", str(script))  # at a port that it finds
    options = ("--window", "0.5", "--preset", "cpu-8-cores", "--json", str(figures))
    done = run_here("explain", "run", *options, "--", *launcher)
    assert done.returncode == 0, done.stderr
    assert "2 processes with torch" in done.stdout and "the others wait for rank 1" in done.stdout
    found = json.loads(figures.read_text())
    assert [rank["name"] for rank in found["ranks"]] == ["rank 0", "rank 1"]
    assert all(rank["steps"]["kind"] == "optimizer step" for rank in found["ranks"])
    waiting = [rank["waiting_s"] / rank["step_s"] for rank in found["ranks"]]
    assert waiting[0] > waiting[1]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("torchrun --nproc-per-node 2 train.py", True),
        ("accelerate launch train.py", True),
        ("python -m torch.distributed.run train.py", True),
        ("python -m accelerate.commands.launch train.py", True),
        ("python -m package.train", False),
        ("python -u train.py", False),
        ("train.py", False),
        ("-m package.train", False),
        ("--nothing", False),
    ],
)
def test_launchers_are_known(words, answer):
    assert launches(words.split()) is answer


def test_a_command_that_runs_no_torch_says_so(tmp_path):
    done = run_here("explain", "run", "--", "ls", str(tmp_path))
    assert done.returncode != 0 and "ran torch to its end" in done.stderr
    done = run_here("explain", "run", "--", str(tmp_path / "nothing"))
    assert done.returncode != 0 and "cannot be started" in done.stderr


def rank(name, step, waiting, **parts):
    figures = {"parts_s": parts, "steps": None, "findings": [], "facts": {}, "name": name}
    return Rank(name, step, waiting, figures)


def test_the_straggler_waits_for_nobody():
    job = Job([rank("rank 0", 1.0, 0.5, loading=0.1), rank("rank 1", 1.0, 0.05, loading=0.6)])
    assert job.straggler is job.ranks[1]
    first, second = job.findings
    assert (
        first["kind"] == "straggler" and first["gain"] == pytest.approx(0.225) and "data loading" in first["evidence"]
    )
    assert second["kind"] == "communication" and second["gain"] == pytest.approx(0.05)


def test_ranks_that_are_alike_have_no_straggler():
    job = Job([rank("rank 0", 1.0, 0.01), rank("rank 1", 1.0, 0.012)])
    assert job.straggler is None and job.findings == [] and "findings: none" in str(job)
