"""The worked cases of explain: what they claim comes true, on a processor."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from planted_faults import ceilings, seconds
from undisturbed import undisturbed

from transect.explain.program.apply import apply
from transect.explain.program.explain import Explain, explain_script
from transect.explain.program.script import Script
from transect.explain.program.split import PARTS, Split
from transect.explain.program.trace import Trace

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "explain"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_recommender_is_slow_for_the_reasons_that_are_found():
    """Nearly all of its time is calling small operators."""

    def explained():
        return explain_script(Script(FOLDER / "recommender.py", ("slow",)), Explain(ceilings(), cores=1))

    def of_operators(found):
        # Threads and objects of the tests before this one are in the process too, and are found.
        kinds = [each.kind for each in found.findings if each.kind not in ("gil", "collection")]
        return {"launch", "sync"} & set(kinds[:2])

    found = undisturbed(explained, of_operators)
    assert of_operators(found), str(found)
    assert found.split.share("floor") < 0.1
    assert sum(found.split.parts.values()) == pytest.approx(found.split.wall)


@pytest.mark.prove
def test_one_batch_is_at_least_twenty_times_as_fast():
    """It is a hundred times on a quiet machine."""
    example = runpy.run_path(str(FOLDER / "recommender.py"))
    request = example["setting"]()
    assert example["slow"](*request) == example["fast"](*request)
    slow, fast = (
        min(seconds(lambda name=name: example[name](*request)) for _ in range(3)) for name in ("slow", "fast")
    )
    assert slow > 20 * fast


def test_gelu_in_one_kernel_has_fewer_operators(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gelu_mlp.py", "--json", str(tmp_path / "g.json")])
    monkeypatch.setattr("transect.explain.program.explain.machine_ceilings", ceilings)
    runpy.run_path(str(FOLDER / "gelu_mlp.py"), run_name="__main__")
    written, one = json.loads((tmp_path / "g.json").read_text())["rows"]
    assert written["operators"] > 2 * one["operators"] and written["floor_s"] > one["floor_s"]
    assert all(row["seconds"] > 0 and row["computing_s"] > 0 for row in (written, one))
    assert "one kernel" in capsys.readouterr().out


def test_what_can_be_applied_is_measured_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import torch\nw = torch.ones(4, requires_grad=True)\nfor _ in range(2000):\n    y = w * 2 + 1\n")
    found = explain_script(Script(script), Explain(ceilings(), cores=1))
    found.findings[:] = [each for each in found.findings if each.apply == "inference mode"]
    (done,) = apply(Script(script), found)
    assert done.before > 0 and done.after > 0 and "predicted" in str(done) and not done.failed
    script.write_text(script.read_text() + "y.sum().backward()\n")
    (broken,) = apply(Script(script), found)
    assert "left out" in str(broken)


def run_main(monkeypatch, name, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    monkeypatch.setattr("transect.explain.program.explain.machine_ceilings", ceilings)
    monkeypatch.setattr(
        "transect.ops.cpu.ceilings.device_measurement", lambda device: SimpleNamespace(ceilings=ceilings())
    )
    return runpy.run_path(str(FOLDER / name), run_name="__main__")


def test_a_product_on_one_roofline(monkeypatch, capsys, tmp_path):
    run_main(monkeypatch, "matmul.py", "--size", 64, "--json", tmp_path / "m.json", "--svg", tmp_path / "m.svg")
    (*_, host) = json.loads((tmp_path / "m.json").read_text())["products"]
    assert host["flops"] == 2 * 64**3 and host["seconds"] > 0
    assert host["floor_s"] == pytest.approx(max(2 * 64**3 / 100e9, 12 * 64**2 / 20e9))
    assert "TFLOP/s" in capsys.readouterr().out and "<svg" in (tmp_path / "m.svg").read_text()


@pytest.mark.prove
def test_small_examples_use_little_of_the_peak(monkeypatch, capsys, tmp_path):
    run_main(monkeypatch, "xor_to_llm.py", "--only", "xor", "--json", tmp_path / "x.json")
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert 0 < row["of_peak"] < 0.05 and row["at_the_floor"] < 0.2 and len(row["chief"]) == 2
    assert "of the peak" in capsys.readouterr().out


def test_a_token_is_divided_without_rest(capsys):
    """The measured time, by the proportions of a run under the profiler; the floor is taken out of what computes."""
    divided = runpy.run_path(str(FOLDER / "generate.py"))["divided"]
    parts = dict.fromkeys(PARTS, 0.0) | {"unrated": 0.5, "launch": 0.25, "sync": 0.15, "profiler": 0.1}
    found = divided("x", 2.0, 10, 0.05, SimpleNamespace(split=Split(1.0, 0.0, parts, [], [], True, 0, Trace())))
    assert sum(found["parts_ms"].values()) == pytest.approx(found["ms_a_token"]) == pytest.approx(200.0)
    assert found["parts_ms"]["floor"] == pytest.approx(50) and found["parts_ms"]["launch"] == pytest.approx(
        200 * 0.25 / 0.9
    )
