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

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "monitoring"
BOARD = json.loads((FOLDER / "grafana" / "dashboards" / "transect.json").read_text())


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


def test_the_board_is_what_grafana_reads():
    """By Grafana's own models: nothing of the board is lost on the way through them."""
    dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    read = dashboard.Dashboard.from_json(BOARD)
    again = json.loads(encoder.JSONEncoder(sort_keys=True).encode(read))
    assert set(BOARD) <= set(again) and again["title"] == "Transect"
    for panel, kept in zip(BOARD["panels"], again["panels"], strict=True):
        assert set(panel) <= set(kept) and kept["targets"] == panel["targets"], panel["title"]
        assert set(panel["fieldConfig"]["defaults"]) <= set(kept["fieldConfig"]["defaults"])
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
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
