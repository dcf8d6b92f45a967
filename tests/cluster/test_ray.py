"""The fleet on Ray Serve. Most of it runs in `make prove`: a Ray cluster takes seconds to start and to end."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from transect.bench.same_answers import ask
from transect.cluster import ray_app, ray_cluster

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def deployment(application):
    return application._bound_deployment


def test_what_ray_is_told_of_the_replicas(settings):
    made = deployment(ray_app.replicas_app(settings, "test", generation=3))
    config, scaling = made._deployment_config, made._deployment_config.autoscaling_config
    assert (made._version, config.max_surge_percent) == ("3", 1)  # new before old, one at a time
    assert config.graceful_shutdown_timeout_s > settings.replicas.drain_timeout_s
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 4)
    assert scaling.policy.policy_kwargs["target_s"] == settings.scaling.target_s
    assert made.ray_actor_options["num_cpus"] == 1.0 and made.ray_actor_options["num_gpus"] == 0.0
    fixed = deployment(ray_app.replicas_app(settings, "test", count=3))._deployment_config.autoscaling_config
    assert (fixed.min_replicas, fixed.max_replicas, fixed.policy.policy_kwargs["policy"]) == (3, 3, "fixed")
    # The same arguments and version: Ray changes the number, and restarts nothing.
    assert made._replica_config.init_args == (settings, 3, "test")


def test_the_router_stays_on_the_head_node(settings):
    made = deployment(ray_app.router_app(settings))
    assert made.ray_actor_options["resources"] == {"node:__internal_head__": 0.001}
    assert made._deployment_config.request_router_config.request_router_class.endswith("FewestTokens")


async def test_ray_asks_the_router_with_the_fewest_tokens_first():
    routers = [SimpleNamespace(routing_stats=stats) for stats in ({"queued_tokens": 7.0}, None, {"queued_tokens": 3.0})]
    found = await ray_app.FewestTokens.choose_replicas(None, routers)
    assert found == [[routers[1]], [routers[2]], [routers[0]]]


def test_serve_run_names_the_missing_file():
    from transect.cluster import app

    with pytest.raises(ValueError, match=r"serve run transect\.cluster:app file="):
        app({})


def test_a_fleet_that_is_not_up_says_so(settings):
    if ray_cluster.need_ray().is_initialized():
        pytest.skip("this process is connected to a Ray cluster")
    with pytest.raises(ValueError, match="start the fleet test with `transect cluster up`"):
        ray_cluster.connect(settings)


@pytest.mark.prove
def test_drills_under_load_lose_nothing(tmp_path):
    out = tmp_path / "drills.json"
    names = "kills,stopped,roll,scale,cancelled,controller,blind,router"
    command = [sys.executable, "benchmarks/cluster/drills.py", "--kills", "20", "--only", names, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    drills = json.loads(out.read_text())["drills"]
    assert all(each["answers"] > 0 and each["differing"] == 0 for each in drills.values())
    assert all(each["dropped"] == 0 for name, each in drills.items() if name != "router")
    assert drills["kills"]["kills"] == 20 and drills["roll"]["fewest_ready"] == 3
    assert drills["router"]["same_engines"] and drills["router"]["dropped"] > 0  # and every client saw an error


@pytest.mark.prove
async def test_serve_run_takes_the_same_file(settings, tmp_path):
    """Requests through Ray Serve's proxy, in one application; the engine is killed in between."""
    file = tmp_path / "fleet.toml"
    file.write_text(
        f'name = "run"\nfolder = "{tmp_path}/run"\n[engine]\nmodel = "{settings.engine.model}"\n[server]\nport = 0\n'
        '[replicas]\nmin = 2\ncpus = 0.2\nengine_module = "stub_engine"\n[links]\nport = 8472\n'
        '[ray]\naddress = "local"\nport = 6472\nnum_cpus = 2\n'
    )
    from transect.cluster import settings as fleet_settings

    own = fleet_settings.read(file)
    environment = os.environ | {"RAY_ADDRESS": "127.0.0.1:6472"}
    ray_cluster.connect(own, start=True)
    run = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run", "--non-blocking"]
    try:
        done = subprocess.run(
            [*run, "transect.cluster:app", f"file={file}"], env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr[-3000:]
        body = {"prompt": list(range(65, 97)), "seed": 3, "max_tokens": 100, "ignore_eos": True, "stream": True}
        async with httpx.AsyncClient(base_url="http://127.0.0.1:8000", timeout=60, trust_env=False) as client:
            calm = await ask(client, "/v1/completions", body)
            assert calm.clean and calm.pieces > 10
            state = (await client.get("/v1/fleet")).json()
            assert [each["state"] for each in state["replicas"]] == ["ready", "ready"]
            hit = []

            def kill(answer):
                if answer.pieces == 5:
                    hit.append(True)
                    for each in state["replicas"]:
                        if not hit[1:]:
                            hit.append(True)
                            os.kill(each["pid"], 9)

            again = await ask(client, "/v1/completions", body, kill)
            assert again.same_as(calm) and hit
    finally:
        ray_cluster.down(own, print)


@pytest.mark.prove
def test_the_chapter_can_be_followed(smollm2, tmp_path):
    """The file and the commands of the chapter, in order, with the built-in model."""
    text = (ROOT / "docs" / "learn" / "one-to-many.md").read_text()
    (tmp_path / "fleet.toml").write_text(re.search(r'```toml title="fleet.toml"\n(.*?)```', text, re.DOTALL)[1])
    commands = [line for each in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in each.splitlines()]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    said = {}
    try:
        for command in commands:
            line = command.replace("transect ", f"{sys.executable} -m transect ", 1) if command[0] == "t" else command
            done = subprocess.run(
                line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
            said[command] = done.stdout
    finally:
        if "transect cluster down fleet.toml" not in said:
            down = [sys.executable, "-m", "transect", "cluster", "down", "fleet.toml"]
            subprocess.run(down, cwd=tmp_path, env=environment, timeout=120)
    assert "2 to 3 replicas of smollm2-135m" in said["transect cluster up fleet.toml --dry-run"]
    assert "ready on http://127.0.0.1:8410" in said["transect cluster up fleet.toml"]
    assert "generation 2" in said["transect cluster roll fleet.toml"]
    (answer,) = (out for command, out in said.items() if command.startswith("curl"))
    assert json.loads(answer)["usage"]["completion_tokens"] == 16
    assert not (tmp_path / "fleet-state" / "state.json").exists()
