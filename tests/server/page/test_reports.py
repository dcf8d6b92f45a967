"""Reports in a real browser: a training run, a flow and a layout on the board, and files dropped on the page."""

import dataclasses
import json
import os
import re
import threading
import time
from pathlib import Path

import pytest
import uvicorn
from accessible import check_accessible
from page_engine import PageEngine, PageServer
from training_runs import tiny_run
from typer.testing import CliRunner

from transect.cli.board import Reports
from transect.cli.plan import application
from transect.explain.program.split import PARTS
from transect.flow.chain import StepState
from transect.flow.folder import FlowFolder
from transect.flow.gate.measure import GateVerdict
from transect.flow.rollout.rule import ROLL_BACK, CanaryBars, look
from transect.flow.steps.step import StepOutcome
from transect.server.page.board import create_board
from transect.server.process import bind, url_of
from transect.spec.layouts.picture import layout_picture
from transect.spec.layouts.spread import Spread
from transect.train.loop.report import RunLog
from transect.train.loop.trainer import Trainer

PICTURES = os.environ.get("TRANSECT_PICTURES")
"""Folder for the pictures of docs; none are kept without it."""
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
SPREAD = Spread(data=2, tensor=2, pipeline=4, zero=1)
RUN = {
    **{"kind": "training run", "name": "large", "every": 1, "others": [], "checkpoints": [4], "config": {}},
    **{"memory": None, "layout": layout_picture(SPREAD, 30, 8)},
    "steps": [{"kind": "step", "step": step, "loss": 3.0 - step, "tokens_per_second": 9.0} for step in (1, 2)],
}


def write_flow(folder, *, watched):
    """Write the states of a flow whose candidate the gate lets pass; the watch runs, or has rolled it back."""
    verdicts = {
        "perplexity": GateVerdict(True, "the perplexity is lower: 3.1 against 3.4", 3.1, 3.4, (-0.4, -0.2)),
        "size": GateVerdict(True, "4 MB are allowed", 3.0e6, 3.0e6),
    }
    verdict = look({"requests": 90, "errors": 18}, {"requests": 900, "errors": 0}, CanaryBars(), 0.95, last=True)
    assert verdict.action == ROLL_BACK
    outcomes = {
        "gate": StepOutcome("passed 2 measures against units:1", figures={k: v.to_dict() for k, v in verdicts.items()}),
        "register": StepOutcome("units:2", figures={"version": "units:2", "bytes": 3_000_000}),
        "release": StepOutcome(
            "units is now units:1 90%, units:2 10%",
            figures={"units:1": 0.9, "units:2": 0.1},
            outputs={"candidate": "units:2", "current": "units:1"},
        ),
    }
    states = [StepState(name, "done", seconds=3.0, outcome=each.to_dict()) for name, each in outcomes.items()]
    if watched:
        seen = StepOutcome(f"{verdict.action}: {verdict.reason}", figures={"looks": 1, "rates": verdict.rates})
        back = StepOutcome(f"units:2 was rolled back to units:1: {verdict.reason}", passed=False)
        states.append(StepState("watch", "done", outcome=seen.to_dict()))
        states.append(StepState("promote", "stopped", outcome=back.to_dict()))
    else:
        figures = {"figures": {"candidate requests": 20, "current requests": 180}}
        states.append(StepState("watch", "running", began=time.time(), outcome=figures))
        states.append(StepState("promote"))
    steps = [dataclasses.asdict(each) for each in states]
    folder.mkdir(exist_ok=True)
    FlowFolder(folder).write_chain({"name": "units", "file": "units.toml", "updated": time.time(), "steps": steps})


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """The page over a real run and two reports."""
    folder = tmp_path_factory.mktemp("board")
    samples = {"prompts": ["The cat"], "every": 2, "max_tokens": 4}
    config = tiny_run(folder, steps=4, run_dir=str(folder / "run"), samples=samples)
    log = RunLog(config.run_dir, tensorboard=False)
    Trainer(config).run([log])
    log.close()
    reports = {"explained.json": EXPLAINED, "roofline.json": ROOFLINE, "layout.json": RUN}
    for name, content in reports.items():
        (folder / name).write_text(json.dumps(content))
    write_flow(folder / "flow", watched=False)
    read = Reports([folder / "run", folder / "flow", *(folder / name for name in reports)])
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_board(read), lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.002)
    yield url_of(sock), folder
    server.force_exit = server.should_exit = True
    thread.join()


def test_a_training_run_and_reports_are_shown(new_page, board):
    page = new_page(f"{board[0]}/#/reports/run")
    page.get_by_role("heading", name="Loss").wait_for()
    assert page.get_by_role("navigation").inner_text().split() == ["Reports"]
    assert page.locator("line-chart path").count() >= 4
    page.get_by_text("The cat").first.wait_for()
    page.get_by_text("optimizer state").first.wait_for()
    page.get_by_text("One device computes everything").wait_for()
    chart = page.locator("line-chart .line-chart").first
    chart.focus()
    chart.press("ArrowLeft")
    assert page.locator("line-chart .readout").first.inner_text().startswith("step ")
    check_accessible(page, "a training run")
    choice = page.locator(".controls select")
    choice.select_option("explained.json")
    page.get_by_text("A loop in Python").wait_for()
    check_accessible(page, "an explained program")
    page.get_by_text("Do: use one call").wait_for()
    assert "40%" in page.locator(".parts").first.inner_text()
    choice.select_option("roofline.json")
    page.get_by_role("cell", name="linear").wait_for()
    assert page.locator(".roofline circle").count() == 1
    check_accessible(page, "a roofline")


def test_a_flow_is_drawn_while_it_runs(new_page, board):
    with FlowFolder(board[1] / "flow").locked():  # as a process that runs the flow does
        page = new_page(f"{board[0]}/#/reports/flow%20units")
        chain = page.get_by_role("list", name="Steps of the flow")
        chain.wait_for()
        assert [each.split()[:2] for each in chain.get_by_role("listitem").all_inner_texts()] == [
            ["gate", "done"], ["register", "done"], ["release", "done"], ["watch", "running"], ["promote", "waiting"],
        ]  # fmt: skip
        gate = page.get_by_role("region", name="Measures of the gate").locator("tbody tr")
        assert gate.count() == 2 and "perplexity is lower" in gate.first.inner_text()
        assert "10%" in page.locator(".tile", has_text="Canary").inner_text()
    write_flow(board[1] / "flow", watched=True)
    page.get_by_text("Last decision, by promote:").wait_for()
    page.get_by_text("units:2 was rolled back to units:1").first.wait_for()
    assert "rolled back" in page.locator(".tile", has_text="Canary").inner_text()
    rates = page.get_by_role("region", name="Rates that the watch compares")
    assert "18 of 90" in rates.inner_text() and page.locator(".interval .worse").count() == 1
    check_accessible(page, "a flow")
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / "board-flow.png")


def test_a_layout_is_drawn(new_page, board):
    page = new_page(f"{board[0]}/#/reports/layout.json")
    page.get_by_text("replica 1").wait_for()
    assert page.locator(".ranks rect").count() == 16 and page.locator(".ranks text.number").count() == 16
    assert page.locator(".schedule .forward").count() == page.locator(".schedule .backward").count() == 4 * 8
    if PICTURES:
        page.locator("section", has=page.locator(".ranks")).screenshot(path=Path(PICTURES) / "board-layout.png")
    page.get_by_text("Ranks as a table").click()
    assert page.get_by_role("region", name="Ranks", exact=True).locator("tbody tr").count() == 16
    check_accessible(page, "a layout")


@pytest.mark.prove
def test_axe_finds_no_error_in_dark_colours(new_page, board):
    page = new_page(f"{board[0]}/#/reports/run", color_scheme="dark")
    page.get_by_role("heading", name="Loss").wait_for()
    check_accessible(page, "a training run")
    for name, text in (
        ("explained.json", "A loop in Python"),
        ("roofline.json", "FLOPs/byte"),
        ("flow units", "Last decision"),
        ("layout.json", "replica 1"),
    ):
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


def test_a_flow_of_a_server_is_shown_to_its_operator_while_it_runs(new_page, tmp_path):
    write_flow(tmp_path / "flow", watched=False)
    keys = {"api_keys": ("theirs",), "admin_api_keys": ("own",)}
    server = PageServer(PageEngine(), flow_dirs=(str(tmp_path / "flow"),), **keys)
    try:
        for key, shown in (("theirs", False), ("own", True)):
            with FlowFolder(tmp_path / "flow").locked():
                page = new_page(f"{server.url}/#/reports")
                page.get_by_label("Key", exact=True).fill(key)
                page.keyboard.press("Enter")
                if not shown:
                    page.get_by_text("Drop files here").wait_for()
                    assert page.get_by_role("list", name="Steps of the flow").count() == 0
                    continue
                page.get_by_role("heading", name="flow units").wait_for()
                assert "running" in page.get_by_role("list", name="Steps of the flow").inner_text()
        write_flow(tmp_path / "flow", watched=True)
        page.get_by_text("Last decision, by promote:").wait_for()
    finally:
        server.stop()


def test_plans_of_a_training_run_are_drawn(new_page, server, tmp_path):
    """The ranking of layouts, and the schedules of a pipeline, as the commands print them."""
    commands = {
        "layouts.json": "training llama-3.1-8b --gpus 8 --gpu h100 --json",
        "schedules.json": "schedule --pp 4 --microbatches 8 --json",
    }
    found = {}
    for name, words in commands.items():
        result = CliRunner().invoke(application, words.split())
        assert result.exit_code == 0, result.output
        (tmp_path / name).write_text(result.stdout)
        found[name] = json.loads(result.stdout)
    page = new_page(f"{server.url}/#/reports")
    page.locator("report-view input[type=file]").set_input_files([tmp_path / name for name in commands])
    page.get_by_role("heading", name="Pipeline schedules").wait_for()
    schedules = found["schedules.json"]
    assert page.locator("svg.schedule").count() == len(schedules) > 1
    passes = sum(len(actions) for each in schedules.values() for actions in each["actions"])
    assert page.locator(".schedule .forward, .schedule .backward").count() == passes
    check_accessible(page, "schedules")
    page.locator(".controls select").select_option("layouts.json")
    ranked = page.get_by_role("region", name="Layouts by speed").locator("tbody tr")
    best = found["layouts.json"]["layouts"][0]
    ranked.first.wait_for()
    assert best["layout"] in ranked.first.inner_text()
    assert ranked.count() == min(40, len(found["layouts.json"]["layouts"]))
    assert found["layouts.json"]["why"][0] in page.locator("report-view").inner_text()
    check_accessible(page, "layouts")


def test_the_page_knows_all_parts_of_a_program():
    source = (Path(__file__).resolve().parents[3] / "page" / "src" / "reports" / "program.ts").read_text()
    shown = dict(re.findall(r"^  (\w+): \['([^']+)',", source, re.MULTILINE))
    assert shown == dict(PARTS)
