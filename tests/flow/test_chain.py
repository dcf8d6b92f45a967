"""The chain: what is skipped, what a plan says, errors, and a kill at every write."""

import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import killed_flows
import pytest

from transect.flow.chain import FlowChain
from transect.flow.folder import EVENTS, FlowFolder, write_json
from transect.flow.picture import chain_state, draw
from transect.flow.settings import FlowConfig
from transect.flow.steps.step import FlowStep, InterruptedStep, StepOutcome


@dataclass(frozen=True)
class Adding:
    """Settings of a step that adds a number."""

    number: int = 1
    passes: bool = True


def adding(name: str, place: int, runs: list[str], after: str = "", **options) -> FlowStep:
    """A step that adds its number to the sum of the step before, and notes that it ran."""

    def run(context) -> StepOutcome:
        runs.append(name)
        settings = context.tables[name]
        total = settings.number + context.output(after, "sum", 0)
        write_json({"sum": total}, context.folder / "sum.json")
        return StepOutcome(f"{total} so far", settings.passes, {"sum": total}, {"sum": total}, {"sum": "sum.json"})

    return FlowStep(
        name=name,
        place=place,
        settings=Adding,
        inputs=lambda context: {
            "number": context.tables[name].number,
            "passes": context.tables[name].passes,
            "before": context.output(after, "sum"),
        },
        plan=lambda context: f"add {context.tables[name].number}",
        run=run,
        **options,
    )


class Three:
    """A flow of three steps: ``a``, ``b`` and ``c``, which may be left out."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, []
        steps = [
            adding("a", 1, self.runs),
            adding("b", 2, self.runs, "a"),
            adding("c", 3, self.runs, "b", missing="out"),
        ]
        self.steps = {step.name: step for step in steps}
        (folder / "flow.toml").write_text('name = "sum"\n[c]\nnumber = 100\n')

    def chain(self, *settings: str, **options) -> FlowChain:
        config = FlowConfig.from_toml(self.folder / "flow.toml", settings, self.steps)
        return FlowChain(config, self.steps, tell=lambda line: None, **options)

    def run(self, *settings: str) -> list[str]:
        """Run, and return the names of the steps that worked."""
        self.runs.clear()
        self.states = self.chain(*settings).run()
        return list(self.runs)


@pytest.fixture
def three(tmp_path) -> Three:
    return Three(tmp_path)


def test_only_steps_with_new_inputs_run(three) -> None:
    assert three.run() == ["a", "b", "c"]
    assert [state.outcome["outputs"]["sum"] for state in three.states] == [1, 2, 102]
    assert three.run() == []
    assert all(state.kept for state in three.states)
    assert three.run("c.number=7") == ["c"]
    assert three.run("a.number=5") == ["a", "b", "c"]
    assert three.run("a.number=6", "b.number=0") == ["a", "b"]  # their sum is as before, and so is the input of c
    assert three.run() == []  # the work of earlier settings is still there


def test_a_plan_says_what_and_why_and_writes_nothing(three) -> None:
    assert [(each.action, each.reason) for each in three.chain().plan()] == [
        ("run", "it has not run with these inputs"), ("run", "a runs before it"), ("run", "a runs before it"),
    ]  # fmt: skip
    assert not (three.folder / "flows").exists()
    three.run()
    before = sorted((path, path.stat().st_mtime_ns) for path in (three.folder / "flows").rglob("*"))
    actions = [(each.action, each.reason) for each in three.chain("b.number=3").plan()]
    assert actions[0] == ("skip", "its inputs did not change")
    assert actions[1] == ("run", "changed: number")
    assert [each.action for each in three.chain("b.passes=false").plan()] == ["skip", "run", "run"]
    assert before == sorted((path, path.stat().st_mtime_ns) for path in (three.folder / "flows").rglob("*"))


def test_a_step_that_does_not_pass_ends_the_chain(three) -> None:
    assert three.run("b.passes=false") == ["a", "b"]
    assert [state.state for state in three.states] == ["done", "stopped", "waiting"]
    assert three.run("b.passes=false") == []
    assert [each.action for each in three.chain("b.passes=false").plan()] == ["skip", "skip", "leave out"]
    assert three.run() == ["b", "c"]


def test_a_step_without_a_table_is_left_out(three) -> None:
    (three.folder / "flow.toml").write_text('name = "sum"\n')
    assert three.run() == ["a", "b"]
    assert [state.state for state in three.states] == ["done", "done", "left out"]


def test_an_outcome_whose_files_are_gone_is_made_again(three) -> None:
    three.run()
    for file in three.folder.glob("flows/sum/work/b-*/sum.json"):
        file.unlink()
    assert [each.reason for each in three.chain().plan()][1].endswith("sum.json is missing")
    assert three.run() == ["b"]


def test_an_effect_that_is_lost_is_made_again(three) -> None:
    lost = []
    step = three.steps["c"]
    three.steps["c"] = adding("c", 3, three.runs, "b", lost=lambda context, outcome: "".join(lost))
    assert three.run() == ["a", "b", "c"] and step.name == "c"
    lost.append("the server forgot it")
    assert three.chain().plan()[2].reason == "the server forgot it"
    assert three.run() == ["c"]


def test_a_failure_is_written_and_the_next_run_continues(three, monkeypatch) -> None:
    def fail(context) -> StepOutcome:
        raise ValueError("b has no room")

    good = three.steps["b"]
    three.steps["b"] = FlowStep(**{name: getattr(good, name) for name in good.__slots__} | {"run": fail})
    with pytest.raises(ValueError, match="b has no room"):
        three.run()
    state = chain_state(three.folder / "flows" / "sum")
    assert [(step["state"], step["problem"]) for step in state["steps"]][1] == ("failed", "b has no room")
    three.steps["b"] = good
    assert [each.action for each in three.chain().plan()] == ["skip", "run", "run"]
    assert three.run() == ["b", "c"]


def test_a_request_to_stop_ends_between_steps(three) -> None:
    with pytest.raises(InterruptedStep):
        three.chain(should_stop=lambda: len(three.runs) == 1).run()
    assert three.runs == ["a"]
    assert three.run() == ["b", "c"]


def test_a_full_disk_is_said_and_loses_nothing(three, monkeypatch) -> None:
    three.run()
    with monkeypatch.context() as patch:
        real = Path.open

        def full(self, mode="r", *rest, **options):
            if "w" in mode and "sum.json" in self.name:
                raise OSError(28, "No space left on device")
            return real(self, mode, *rest, **options)

        patch.setattr(Path, "open", full)
        with pytest.raises(ValueError, match=r"cannot write .*sum.json \(No space left on device\): free some space"):
            three.run("b.number=9")
    assert three.run() == []
    assert three.run("b.number=9") == ["b", "c"]


def test_a_folder_that_cannot_be_written_is_said(three) -> None:
    (three.folder / "flows").write_text("a file in the way")
    with pytest.raises(ValueError, match=r"cannot write .*flows/sum"):
        three.run()


def test_two_processes_do_not_run_one_flow(three) -> None:
    message = r"another process runs the flow.*wait for it, or set another dir"
    with FlowFolder(three.folder / "flows" / "sum").locked(), pytest.raises(ValueError, match=message):
        three.run()
    assert three.run() == ["a", "b", "c"]


def test_damaged_files_are_named(three) -> None:
    three.run()
    (outcome,) = three.folder.glob("flows/sum/work/b-*/outcome.json")
    outcome.write_text('{"reason"')
    with pytest.raises(ValueError, match=r"outcome.json cannot be read .*: remove it, and run the flow again"):
        three.run()
    outcome.unlink()
    events = three.folder / "flows" / "sum" / EVENTS
    events.write_text(events.read_text() + '{"cut')
    assert three.run() == ["b"]


def test_the_picture_has_states_reasons_and_figures(three) -> None:
    from rich.console import Console

    with pytest.raises(ValueError, match="holds no flow"):
        chain_state(three.folder)
    three.run("b.passes=false")
    console = Console(width=100, record=True, file=io.StringIO())
    state = chain_state(three.folder / "flows" / "sum")
    console.print(draw(state))
    text = console.export_text()
    assert "✔ a         done" in text and "1 so far" in text and "✘ b         stopped" in text and "○ c" in text
    assert "sum 1" in text
    running = state | {"steps": [{**state["steps"][0], "state": "running"}]}
    write_json(running, three.folder / "flows" / "sum" / "chain.json")
    assert chain_state(three.folder / "flows" / "sum")["steps"][0]["state"] == "interrupted"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "name must be letters"),
        ('name = "a b"', "name must be letters"),
        ('name = "a"\ndir = 3', "dir must be a directory, not 3"),
        ('name = "a"\nadd = 1', "the setting add is not known"),
        ('name = "a"\n[cc]', r"the setting cc is not known; did you mean c\?"),
        ('name = "a"\nb = 1', "b must be a table, not 1"),
        ('name = "a"\n[b]\nnumbr = 1', r"the setting b.numbr is not known; did you mean b.number\?"),
        ('name = "a"\n[b]\nnumber = "x"', "b.number must be a whole number, not 'x'"),
        ("name = ", "is not TOML"),
    ],
)
def test_errors_of_a_file_name_the_key(three, text: str, message: str) -> None:
    (three.folder / "flow.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        three.chain()


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.prove)])
def test_a_kill_at_any_write_changes_no_result(tmp_path, stride: int) -> None:
    """``killed_flows.py``: all steps but training and measuring are the shipped ones, the server is a small one."""
    script = Path(killed_flows.__file__)
    command = [sys.executable, script, tmp_path, str(stride)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["writes"] > 60 and found["kills"] >= found["writes"] // stride and not found["different"]
    assert [state for _, state, _ in found["steps"]] == ["done"] * 7
