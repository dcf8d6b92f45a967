"""Ranks as processes: they meet, end with their parent, and one that ends too early is named."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
import torch
import torch.distributed as dist
from tiny_checkpoints import make_model
from tiny_llm import save_tiny_llm, save_tiny_llm_text

from transect.bench.collectives import COLLECTIVES
from transect.parallel import launch
from transect.parallel.children import BEGIN_S
from transect.parallel.launch import Ranks
from transect.parallel.mesh import Mesh
from transect.spec.layouts.ranks import RankLayout, RankPlace, share

PATIENCE_S = 200


def wait_for(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.02)


def gone(pid):
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


def test_places_count_along_the_tensor_axis_first():
    layout = RankLayout(tensor=2, pipeline=3, data=2)
    places = [layout.place(rank) for rank in range(layout.size)]
    assert places[:3] == [RankPlace(0, 0, 0), RankPlace(0, 0, 1), RankPlace(0, 1, 0)] and places[-1] == RankPlace(
        1, 2, 1
    )
    assert [layout.rank(place) for place in places] == list(range(12))
    assert [share(7, part, 3) for part in range(3)] == [slice(0, 3), slice(3, 5), slice(5, 7)]
    with pytest.raises(ValueError, match="there is no rank 12"):
        layout.place(12)


def test_messages_and_collectives(pair):
    world = pair.world
    for number in (signal.SIGINT, signal.SIGTERM):  # service managers send it to all: the first rank ends the others
        os.kill(pair.pids[1], number)
    pair.call("parallel_jobs:collectives", {"long": "x" * 5000})
    mesh = Mesh(world, RankLayout(tensor=2))
    assert (mesh.place, mesh.tensor.rank, mesh.tensor.size, mesh.pipeline.size) == (RankPlace(0, 0, 0), 0, 2, 1)
    group = Mesh(world, RankLayout(tensor=2)).tensor
    assert group.group is mesh.tensor.group  # each has threads, so another mesh has no others
    assert group.all_reduce(torch.tensor([1.0, 2.0])).tolist() == [11.0, 12.0]
    assert group.all_gather(torch.arange(3)).tolist() == [[0, 1, 2], [10, 11, 12]]
    assert group.reduce_scatter(torch.arange(4)).tolist() == [10, 12]
    assert group.all_to_all(torch.arange(4)).tolist() == [0, 1, 10, 11]
    group.send(torch.tensor([7]), 1).wait()
    assert group.receive(torch.tensor([0]), 1).tolist() == [8]
    assert world.exchange("mine") == ["mine", "x" * 5000]
    with pytest.raises(ValueError, match="the ranks disagree: the seed is 1 on rank 0 and 2 on rank 1"):
        world.agree({"the seed": 1})
    with pytest.raises(ValueError, match="rank 1: turn it off"):
        world.exchange("mine")
    with pytest.raises(ValueError, match="there are 2 ranks, and the layout"):
        Mesh(world, RankLayout(tensor=3))


def test_only_one_set_of_ranks_in_a_process(pair):
    with pytest.raises(ValueError, match="one of several ranks already"):
        Ranks.start(2)


def test_ranks_of_torchrun_wait_no_longer_for_a_rank_that_does_not_come(monkeypatch):
    waits = []

    def rendezvous(url, timeout=None):
        waits.append(timeout)
        raise TimeoutError

    monkeypatch.setattr(launch.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(launch.dist, "rendezvous", rendezvous)
    with pytest.raises(TimeoutError):
        Ranks.join()
    assert waits == [timedelta(seconds=BEGIN_S)]


PROGRAM = """
    import sys
    from transect.parallel.launch import Ranks
    ranks = Ranks.start(2)
    print(ranks.pids[1], flush=True)
    {work}
"""


def program(work, folder):
    """A process that starts a pair of ranks; what it has printed first is the child's process id."""
    helpers = str(Path(__file__).resolve().parents[1] / "helpers")
    path = os.pathsep.join([helpers, *filter(None, [os.environ.get("PYTHONPATH")]), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM.format(work=work))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(folder)},
    )
    return process, int(process.stdout.readline())


@pytest.mark.prove
def test_ranks_end_with_their_parent_and_a_lost_one_is_named(tmp_path):
    waits = "ranks.call('time:sleep', None) if 0 else sys.stdin.read()"
    process, child = program(waits, tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: gone(child), "the child to end")
    assert not list(tmp_path.iterdir())  # nor has it left anything

    asks = "ranks.call('parallel_jobs:fail', None)\n    try: ranks.world.exchange(1)\n"
    asks += "    except Exception as error: print(repr(ranks.explain(error)))\n    ranks.close()"
    process, child = program(asks, tmp_path)
    said, errors = process.communicate(timeout=PATIENCE_S)
    assert f"RankFailure('rank 1 (process {child}) ended with code 1: RuntimeError: on purpose')" in said
    assert errors.count("RuntimeError: on purpose") == 1 and gone(child)


def test_groups_of_gpus_are_ended_by_one_thread_at_a_time(monkeypatch):
    """That which ends kernels after the end of a rank may take longer than ``close`` waits."""
    go, ended = threading.Event(), []
    monkeypatch.setattr(launch, "END_S", 0.01)
    monkeypatch.setattr(Ranks, "_abort", lambda self: go.wait())
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(True))
    child = SimpleNamespace(pid=1, wait=lambda: -9)
    ranks = Ranks(SimpleNamespace(device=torch.device("cuda")), {1: child}, None)
    wait_for(lambda: ranks.failure, "the end of the child")
    ranks._leave()
    assert not ended
    go.set()
    ranks._aborting.join()
    ranks._leave()
    wait_for(lambda: ended, "the end of the groups")


def on_two_hosts(port, *program):
    """What a program says under ``torchrun`` on two "hosts" of one rank each: output and errors of each host."""
    hosts = start_on_two_hosts(port, *program)
    return [host.communicate(timeout=PATIENCE_S) for host in hosts]


def start_on_two_hosts(port, *program):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [
        subprocess.Popen(
            [*launch, "--node-rank", str(host), *program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for host in range(2)
    ]


@pytest.mark.prove
def test_a_server_under_torchrun(tmp_path, port):
    """Rank 0 serves, the other one follows, and both end when rank 0 is told to."""
    save_tiny_llm(tmp_path)
    options = ["--port", "0", "--tensor-parallel-size", "2", "--dtype", "float32", "--no-native", "--threads", "1"]
    hosts = start_on_two_hosts(port, "-m", "transect", "serve", str(tmp_path), "--served-model-name", "m", *options)
    try:
        ready = hosts[0].stdout.readline()
        assert " ready on " in ready, hosts[0].stderr.read()
        url = ready.split(" ready on ")[1].split()[0]
        body = {"model": "m", "prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).json()
        assert answer["usage"]["completion_tokens"] == 5
        server = next(p for p in psutil.Process(hosts[0].pid).children() if "serve" in p.cmdline())
        server.send_signal(signal.SIGTERM)
        said = [host.communicate(timeout=PATIENCE_S) for host in hosts]
        assert [host.returncode for host in hosts] == [0, 0], said
    finally:
        for host in hosts:
            host.kill()


@pytest.mark.prove
def test_collectives_between_two_hosts(port):
    (out, errors), (other, _) = on_two_hosts(
        port, "-m", "transect", "bench", "collectives", "--max-bytes", "4096", "--iterations", "2", "--json"
    )
    rows = json.loads(out)["rows"]
    assert {row["collective"] for row in rows} == set(COLLECTIVES) and other == "", errors
    assert all(row["wrong"] == 0 and row["seconds"] > 0 for row in rows)


@pytest.mark.prove
def test_under_torchrun_every_rank_runs_the_program(tmp_path, port):
    """Two "hosts" of one rank each, that meet at a port."""
    make_model("qwen3").save_pretrained(tmp_path / "model")
    save_tiny_llm_text(tmp_path / "model")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        from transect import LLM, SamplingParams
        llm = LLM(sys.argv[1], tensor_parallel_size=2, dtype="float32", native=False, threads=1, seed=5)
        found = llm.generate([[5, 6, 7]] * 3, SamplingParams(max_tokens=12, ignore_eos=True))
        print("rank", os.environ["RANK"], [r.outputs[0].token_ids for r in found], flush=True)
    """)
    )
    said = on_two_hosts(port, str(script), str(tmp_path / "model"))
    lines = [line for out, _ in said for line in out.splitlines() if line.startswith("rank ")]
    assert len(lines) == 2 and lines[0].split(" ", 2)[2] == lines[1].split(" ", 2)[2], said
    assert sum(err.count("KV cache") for _, err in said) == 1  # one of them says what runs


AGAIN = """
    import os, sys, time
    from pathlib import Path
    from transect.parallel.launch import Ranks
    world, mark = Ranks.join().world, Path(sys.argv[1])
    if not any(world.exchange(mark.exists())):
        if world.rank == 0:
            time.sleep(300)  # until torchrun ends it
        mark.touch()
        sys.exit(1)
    print("restarts", sorted(world.exchange(os.environ["TORCHELASTIC_RESTART_COUNT"])), flush=True)
"""


@pytest.mark.prove
def test_hosts_that_count_restarts_apart_meet_again(tmp_path, port):
    """A rank of the second "host" ends. That of the first is well and is ended, which is no restart to count there."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(AGAIN))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    command += ["--rdzv-id", "again", "--max-restarts", "2", str(script), str(tmp_path / "mark")]
    pipe = subprocess.PIPE
    hosts = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    try:
        said = [host.communicate(timeout=PATIENCE_S) for host in hosts]
    finally:
        for host in hosts:
            host.terminate()
    assert [out for out, _ in said] == ["restarts ['0', '1']\n"] * 2, said


FOUR = """
    import sys
    from transect import LLM, SamplingParams
    settings = dict(dtype="float32", native=False, threads=1, seed=5, num_kv_blocks=64, block_size=4)
    found = []
    for sizes in ({}, *eval(sys.argv[2])):
        llm = LLM(sys.argv[1], check_plans=True, **sizes, **settings)
        results = llm.generate([[5, 6, 7], [8] * 20, [9]], SamplingParams(max_tokens=12, n=2, ignore_eos=True))
        found.append([[choice.token_ids for choice in result.outputs] for result in results])
        llm.close()
    assert all(each == found[0] for each in found), found
    print("the same")
"""


def on_four_ranks(family, folder, *layouts):
    """What is said where a model draws the same tokens in these layouts."""
    make_model(family).save_pretrained(folder)
    save_tiny_llm_text(folder)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FOUR), str(folder), repr(layouts)],
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert "the same" in done.stdout, done.stderr
    return done.stderr


@pytest.mark.prove
def test_four_ranks_more_than_key_heads_and_both_axes_at_once(tmp_path):
    both = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    said = on_four_ranks("qwen3", tmp_path, {"tensor_parallel_size": 4}, both)
    assert "rank 3: cpu, 1 threads: heads 2-3 of 4, key heads 1 of 2, tokens 48-95 of 96, layers 1 of 2, head" in said


@pytest.mark.prove
def test_stages_that_share_experts_with_ranks_of_other_requests(tmp_path):
    layout = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}
    said = on_four_ranks("qwen3_moe", tmp_path, layout)
    assert "rank 3: cpu, 1 threads: experts 3-5 of 6, layers 1 of 2, head" in said


def test_the_process_group_is_left_as_it_was(pair):
    assert dist.is_initialized() and dist.get_world_size() == 2 == pair.world.size
