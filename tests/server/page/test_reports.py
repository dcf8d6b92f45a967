"""Reports in a real browser: a training run on the board, and files that are dropped on the page."""

import json
import re
import threading
import time
from pathlib import Path

import pytest
import uvicorn
from accessible import check_accessible
from training_runs import tiny_run

from transect.cli.board import Reports
from transect.explain.program.split import PARTS
from transect.server.page.board import create_board
from transect.server.process import bind, url_of
from transect.train.loop.report import RunLog
from transect.train.loop.trainer import Trainer

EXPLAINED = {
    "wall_s": 1.2,
    "plain_s": 1.0,
    "on_gpu": False,
    "parts_s": {"floor": 0.4, "host": 0.5, "unexplained": 0.1},
    "findings": [
        {"title": "A loop in Python", "evidence": "64 calls", "gain": 0.3, "share": 0.3, "advice": "use one call"}
    ],
    "operators": [{"name": "aten::mm", "shapes": "[[2, 2]]", "calls": 3, "seconds": 0.4, "floor_s": 0.2}],
    "notes": [],
    "facts": {},
}
ROOFLINE = {
    "device": "a device",
    "bytes_per_second": 1e10,
    "flops_per_second": {"float32": 1e12},
    "source": "measured",
    "points": [
        {
            **{"name": "linear", "group": "decode", "flops": 1e9, "bytes": 1e9, "intensity": 1.0},
            **{"floor_s": 0.1, "measured_s": 0.2, "bound": "bytes"},
        }
    ],
}


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """The page over a real run and two reports."""
    folder = tmp_path_factory.mktemp("board")
    samples = {"prompts": ["The cat"], "every": 2, "max_tokens": 4}
    config = tiny_run(folder, steps=4, run_dir=str(folder / "run"), samples=samples)
    log = RunLog(config.run_dir, tensorboard=False)
    Trainer(config).run([log])
    log.close()
    for name, content in (("explained.json", EXPLAINED), ("roofline.json", ROOFLINE)):
        (folder / name).write_text(json.dumps(content))
    read = Reports([folder / "run", folder / "explained.json", folder / "roofline.json"])
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_board(read), lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.002)
    yield url_of(sock)
    server.force_exit = server.should_exit = True
    thread.join()


def test_a_training_run_and_reports_are_shown(new_page, board):
    page = new_page(board)
    page.get_by_role("heading", name="Loss").wait_for()
    assert page.get_by_role("navigation").inner_text().split() == ["Reports"]
    assert page.locator("line-chart path").count() >= 4
    page.get_by_text("The cat").first.wait_for()
    page.get_by_text("optimizer state").first.wait_for()
    page.get_by_text("The run is spread as: one device").wait_for()
    chart = page.locator("line-chart .line-chart").first
    chart.focus()
    chart.press("ArrowLeft")
    assert page.locator("line-chart .readout").first.inner_text().startswith("step ")
    choice = page.locator(".controls select")
    choice.select_option("explained.json")
    page.get_by_text("A loop in Python").wait_for()
    page.get_by_text("Do: use one call").wait_for()
    assert "40%" in page.locator(".parts").first.inner_text()
    choice.select_option("roofline.json")
    page.get_by_role("cell", name="linear").wait_for()
    assert page.locator(".roofline circle").count() == 1


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.prove)])
def test_axe_finds_no_error(new_page, board, scheme):
    page = new_page(board, color_scheme=scheme)
    page.get_by_role("heading", name="Loss").wait_for()
    check_accessible(page, "a training run")
    for name, text in (("explained.json", "A loop in Python"), ("roofline.json", "FLOPs/byte")):
        page.locator(".controls select").select_option(name)
        page.get_by_text(text).first.wait_for()
        check_accessible(page, name)


def test_files_are_opened_in_the_page_of_a_server(new_page, server, tmp_path):
    page = new_page(f"{server.url}/#/reports")
    page.get_by_text("Drop files here").wait_for()
    log = [{"kind": "step", "step": step, "loss": 3.0 - step, "tokens_per_second": 9.0} for step in (1, 2)]
    files = {
        "explained.json": json.dumps(EXPLAINED),
        "log.jsonl": "".join(json.dumps(line) + "\n" for line in log) + '{"torn',
        "other.json": "{}",
        "hostile.json": json.dumps(EXPLAINED | {"notes": ["<img src=x onerror=window.hacked=1>"]}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    chosen = page.locator("report-view input[type=file]")
    chosen.set_input_files(tmp_path / "other.json")
    page.get_by_text("other.json: This JSON is none of the reports").wait_for()
    chosen.set_input_files([tmp_path / "explained.json", tmp_path / "log.jsonl"])
    page.get_by_role("heading", name="log.jsonl").wait_for()
    assert page.locator("line-chart path").count() >= 2
    chosen.set_input_files(tmp_path / "hostile.json")
    page.get_by_text("<img src=x onerror").wait_for()
    assert page.evaluate("window.hacked") is None
    assert page.locator(".controls option").count() == 3


def test_the_page_knows_all_parts_of_a_program():
    source = (Path(__file__).resolve().parents[3] / "page" / "src" / "reports" / "program.ts").read_text()
    shown = dict(re.findall(r"^  (\w+): \['([^']+)',", source, re.MULTILINE))
    assert shown == dict(PARTS)
