"""The Grafana board of examples/monitoring: well-formed, provisioned, and about metrics that the server has."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

from transect.flow.watch.report import DriftReport, DriftTest, write_report
from transect.server.app import create_app
from transect.server.options import ServerOptions

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "monitoring"
BOARDS = FOLDER / "grafana" / "dashboards"
BOARD = json.loads((BOARDS / "transect.json").read_text())
VERSIONS = json.loads((BOARDS / "versions.json").read_text())
"""The board of releases, drift and captures, which only a server with these shows."""


def expressions():
    """Every query of the board."""
    yield BOARD["templating"]["list"][0]["definition"]
    for panel in BOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])


async def test_every_query_is_about_something_that_the_server_shows(client):
    await client.post("/v1/completions", json={"prompt": "Hi", "n": 2})
    text = (await client.get("/metrics")).text
    shown = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    labels = set(re.findall(r'(\w+)="', text))
    asked = set()
    for expression in expressions():
        names = set(re.findall(r"transect_\w+", expression))
        assert names and names <= shown, expression
        used = set(re.findall(r"\{(\w+)=~", expression)) | set(re.findall(r"by \((\w+)\)", expression))
        assert used <= labels, expression
        asked |= names
    assert {"transect_engine_up", "transect_requests_waiting", "transect_queue_time_seconds_sum"} <= asked


VLLM_BOARDS = (
    *("e2e_request_latency_seconds_bucket", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
    *("time_per_output_token_seconds_bucket", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
    *("request_decode_time_seconds_sum", "request_inference_time_seconds_bucket", "request_success_total"),
    *("request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_max_num_generation_tokens_sum"),
    *("request_params_n_bucket", "request_params_max_tokens_bucket", "prompt_tokens_total", "generation_tokens_total"),
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"),
    *("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
)
"""What boards and autoscalers made for vLLM ask for, without ``vllm:``."""


async def test_boards_that_were_made_for_vllm_find_what_they_ask_for(client):
    await client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 4})
    text = (await client.get("/metrics")).text
    shown = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    assert not {name for name in VLLM_BOARDS if f"vllm:{name}" not in shown}


@pytest.mark.prove
def test_a_real_prometheus_answers_every_query(live, tmp_path, port):
    """With the configuration of the example, but for the address and the interval. Debian has the package."""
    command = shutil.which("prometheus")
    if command is None:
        pytest.skip("prometheus is not installed")
    settings = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    settings["global"]["scrape_interval"] = "1s"
    settings["scrape_configs"][0]["static_configs"][0]["targets"] = [live.removeprefix("http://")]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    shutil.copy(FOLDER / "alerts.yaml", tmp_path)
    address = f"127.0.0.1:{port}"
    places = ("--config.file", tmp_path / "prometheus.yaml", "--storage.tsdb.path", tmp_path / "data")
    process = subprocess.Popen([command, *places, "--web.listen-address", address], stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://{address}", transport=httpx.HTTPTransport(retries=30)) as prometheus:
            left, until = set(expressions()), time.monotonic() + 100
            while left and time.monotonic() < until:
                httpx.post(f"{live}/v1/completions", json={"prompt": "Hi", "max_tokens": 4}).raise_for_status()
                for expression in sorted(left):
                    query = re.sub(r"\$\{?\w*(interval|range)\w*\}?", "30s", expression)
                    query = re.sub(r"\$\{?\w+(:\w+)?\}?", ".*", query)
                    query = re.sub(r"label_values\((.*), *\w+\)", r"\1", query)
                    answer = prometheus.get("/api/v1/query", params={"query": query})
                    assert answer.status_code == 200, (expression, answer.text)
                    if answer.json()["data"]["result"]:
                        left.remove(expression)
                time.sleep(0.5)
    finally:
        process.terminate()
        process.wait()
    assert not left


@pytest.mark.parametrize("board", [BOARD, VERSIONS], ids=["transect", "versions"])
def test_the_board_is_what_grafana_reads(board):
    """By Grafana's own models: nothing of the board is lost on the way through them."""
    dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    read = dashboard.Dashboard.from_json(board)
    again = json.loads(encoder.JSONEncoder(sort_keys=True).encode(read))
    assert set(board) <= set(again) and again["title"] == board["title"]
    for panel, kept in zip(board["panels"], again["panels"], strict=True):
        assert set(panel) <= set(kept) and kept["targets"] == panel["targets"], panel["title"]
        assert set(panel["fieldConfig"]["defaults"]) <= set(kept["fieldConfig"]["defaults"])
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken = set()
    for panel in read.panels:
        place = panel.grid_pos
        cells = {(place.x + x, place.y + y) for x in range(place.w) for y in range(place.h)}
        assert place.x + place.w <= 24 and not cells & taken, panel.title
        taken |= cells
        assert panel.title and panel.description and panel.targets


def test_compose_brings_the_board_and_its_data_together():
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    mounts = {}
    for service in compose["services"].values():
        for volume in service["volumes"]:
            here, there, mode = volume.split(":")
            assert mode == "ro" and (FOLDER / here).exists(), volume
            mounts[there] = FOLDER / here
    sources = yaml.safe_load((mounts["/etc/grafana/provisioning"] / "datasources" / "prometheus.yaml").read_text())
    (source,) = sources["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in compose["services"]
    used = {panel["datasource"]["uid"] for panel in BOARD["panels"]}
    assert used == {source["uid"]} == {BOARD["templating"]["list"][0]["datasource"]["uid"]}
    boards = yaml.safe_load((mounts["/etc/grafana/provisioning"] / "dashboards" / "transect.yaml").read_text())
    path = boards["providers"][0]["options"]["path"]
    assert (mounts[path] / "transect.json").is_file()
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{path}/transect.json"
    scrape = yaml.safe_load(mounts["/etc/prometheus/prometheus.yml"].read_text())
    assert scrape["scrape_configs"][0]["static_configs"][0]["targets"] == ["host.docker.internal:8000"]
    assert scrape["rule_files"] == ["alerts.yaml"] and "/etc/prometheus/alerts.yaml" in mounts
    assert VERSIONS["uid"] != BOARD["uid"] and {p["datasource"]["uid"] for p in VERSIONS["panels"]} == used


async def test_every_query_about_versions_and_drift_finds_its_metrics(engine, tmp_path):
    folder = tmp_path / "captures"
    releases = tmp_path / "releases.json"
    releases.write_text('{"prod": {"versions": [{"model": "m"}]}}')
    app = create_app(engine, ServerOptions(model_names=("m",), capture_dir=str(folder), releases=str(releases)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        for body in ({"prompt": "Hi"}, {"prompt": "NAN"}, {"prompt": "Hi", "response_format": {"type": "json_object"}}):
            answer = await client.post("/v1/completions", json=body | {"model": "prod"})
        await client.post("/v1/feedback", json={"id": answer.json()["id"], "thumb": "up"})
        write_report(folder, DriftReport(0.0, 0.0, 1, 0.1, [DriftTest("refusals", 0.0, 1.0, 0.1, False, 0.0, 0.0)]), 1)
        text = (await client.get("/metrics")).text
    app.state.serving.captures.close()
    shown = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    labels = {*re.findall(r'(\w+)="', text), "instance"}
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    queries = [target["expr"] for panel in VERSIONS["panels"] for target in panel["targets"]]
    for query in [*queries, *(rule["expr"] for rule in rules)]:
        names = set(re.findall(r"transect_\w+", query))
        assert names and names <= shown, query
        used = {each.strip() for found in re.findall(r"by \(([\w, ]+)\)", query) for each in found.split(",")}
        assert used | set(re.findall(r"\{(\w+)=~", query)) <= labels, query
