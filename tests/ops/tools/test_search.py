"""The search of a launcher's knobs: what is tried, what is rejected, what each knob is worth, what is kept."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from transect.costs.work import Cost
from transect.ops import tuning
from transect.ops.registry import Case, Knobs
from transect.ops.tools import search, under_load

RUNS: list[Mapping[str, Any]] = []
SPEED = {"block": {1: 4.0, 2: 1.0, 4: 2.0}, "warps": {4: 1.0, 8: 1.5}}


def _launch(x: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Doubles x; some configurations fail, are wrong, or give another result in every run."""
    RUNS.append(config)
    if config["block"] == 8:
        raise RuntimeError("out of resources")
    if config["block"] == 16:
        return 2 * x + 1
    if config["block"] == 32:
        return 2 * x + len(RUNS) % 2 * 5e-7
    return 2 * x


def _timer(calls: Any, replays: int) -> list[float]:
    """Pretends that a configuration takes the product of its knobs' speeds."""
    config = calls[0].keywords["config"]
    return [SPEED["block"].get(config["block"], 0.1) * SPEED["warps"][config["warps"]]] * replays


def _knobs(**more: Any) -> Knobs:
    fields: dict[str, Any] = {
        "name": "double",
        "choices": {"block": (1, 2, 4, 8, 16, 32), "warps": (4, 8), "unused": (1, 2)},
        "heuristic": lambda size: {"block": 4, "warps": 8},
        "launch": _launch,
        "prepare": dict,
        "size": lambda arguments: (3, arguments["x"].numel()),
    }
    return Knobs(**{**fields, **more})


CASE = Case("one", lambda device, seed: {"x": torch.ones(1000) + seed}, "float32")


def test_best_worth_and_rejections() -> None:
    found = search.search(_knobs(), CASE, "cpu", timer=_timer)
    assert found.trials[0].config == found.default == {"block": 4, "warps": 8}
    assert len(found.trials) == 12 and found.left == 0 and found.bucket == "4x1024"
    assert found.best.config == {"block": 2, "warps": 4} and found.best.seconds == 1.0
    assert found.gain == 3.0
    assert found.worth() == {"block": 2.0, "warps": 1.5}
    reasons = {trial.config["block"]: trial.reason for trial in found.trials if trial.reason}
    assert reasons[8] == "RuntimeError: out of resources"
    assert "away from that of the heuristic's" in reasons[16]
    assert reasons[32] == "its result is not the same in every run"
    assert set(reasons) == {8, 16, 32}


def test_what_gains_next_to_nothing_is_not_kept() -> None:
    def nearly(calls: Any, replays: int) -> list[float]:
        return [1.0 if calls[0].keywords["config"] == {"block": 4, "warps": 8} else 0.995] * replays

    found = search.search(_knobs(), CASE, "cpu", timer=nearly)
    assert found.best.config != found.default and found.choice == found.default
    assert search.search(_knobs(), CASE, "cpu", timer=_timer).choice == {"block": 2, "warps": 4}


def test_the_fastest_are_timed_again_beside_the_heuristic_s() -> None:
    seen: list[dict[str, int]] = []

    def lucky(calls: Any, replays: int) -> list[float]:
        config = calls[0].keywords["config"]
        seen.append(config)
        once = seen.count(config) == 1
        return [{1: 0.5 if once else 4.0, 2: 2.0, 4: 3.0}.get(config["block"], 9.0)] * replays

    found = search.search(_knobs(choices={"block": (1, 2, 4)}), CASE, "cpu", timer=lucky)
    assert sorted(trial.config["block"] for trial in found.finals) == [1, 2, 4]
    assert found.finals[0].config == found.default
    assert found.best.config["block"] == 2 and found.gain == 1.5
    assert len(seen) == 3 + 3 * under_load.ROUNDS


def test_what_runs_by_the_rule_is_raced_though_it_won_at_the_full_clock() -> None:
    trials, under_load = {1: 9.0, 2: 1.1, 4: 1.0}, {2: 1.2, 4: 1.3}
    found = search.search(
        _knobs(choices={"block": (1, 2, 4)}),
        CASE,
        "cpu",
        timer=lambda calls, replays: [trials[calls[0].keywords["config"]["block"]]],
        race=lambda contenders: [under_load[calls[0].keywords["config"]["block"]] for calls in contenders],
    )
    assert [(trial.config["block"], trial.seconds) for trial in found.finals] == [(4, 1.3), (2, 1.2)]
    assert found.choice == {"block": 2} and found.gain == 1.3 / 1.2


def test_the_one_in_use_is_timed_again_though_others_were_faster_once() -> None:
    seen: list[int] = []

    def unlucky(calls: Any, replays: int) -> list[float]:
        block = calls[0].keywords["config"]["block"]
        seen.append(block)
        once = seen.count(block) == 1
        return [{4: 3.0, 64: 2.5 if once else 1.0}.get(block, 0.5 if once else 2.0)] * replays

    found = search.search(
        _knobs(choices={"block": (1, 2, 4, 64, 128)}),
        CASE,
        "cpu",
        timer=unlucky,
        in_use=lambda launcher, size: {"block": 64},
    )
    assert [trial.config["block"] for trial in found.finals[:2]] == [4, 64] and len(found.finals) == 5
    assert found.choice == {"block": 64}


def test_only_what_makes_sense_is_tried() -> None:
    default, others = search.configurations(_knobs(valid=lambda config, size: config["block"] < size[0]), (3, 1000))
    assert default == {"block": 4, "warps": 8}
    assert {config["block"] for config in others} == {1, 2} and len(others) == 4


def test_time_limit_leaves_the_heuristic_s() -> None:
    found = search.search(_knobs(), CASE, "cpu", seconds=0, timer=_timer)
    assert [trial.config for trial in found.trials] == [{"block": 4, "warps": 8}]
    assert found.left == 11 and found.worth() == {"block": 1.0, "warps": 1.0}


def test_nothing_runs() -> None:
    knobs = _knobs(choices={"block": (8,)}, heuristic=lambda size: {"block": 8})
    with pytest.raises(ValueError, match=r"double, one: no configuration ran; .*out of resources"):
        search.search(knobs, CASE, "cpu", timer=_timer)


def test_one_case_of_each_bucket() -> None:
    def of(n: int) -> Case:
        return Case(f"size {n}", lambda device, seed: {"x": torch.ones(n)}, "float32")

    knobs = _knobs(applies=lambda arguments: arguments["x"].numel() > 5)
    cases = [of(n) for n in (3, 9, 12, 16, 17)]
    assert [case.name for case in search.cases_of(knobs, cases, "cpu")] == ["size 9", "size 17"]
    assert [case.name for case in search.cases_of(knobs, cases, "cpu", "2")] == ["size 12"]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path))
    tuning.choices.cache_clear()
    yield tmp_path / "tuned"
    tuning.choices.cache_clear()


def test_choices_are_kept_for_each_device_and_bucket(cache: Path) -> None:
    tuning.save("Some GPU (TM)", {"double": {"4x1024": {"block": 2}}})
    path = tuning.save("Some GPU (TM)", {"double": {"8": {"block": 1}}, "other": {"8": {"warps": 4}}})
    assert path == cache / "some_gpu_tm.json" and [p.name for p in cache.iterdir()] == [path.name]
    known = tuning.choices("Some GPU (TM)")
    assert known == {"double": {"4x1024": {"block": 2}, "8": {"block": 1}}, "other": {"8": {"warps": 4}}}


def test_an_unknown_device_is_said_once(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert tuning.choices("Another GPU") == {}
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "no tuned kernel configurations for Another GPU"
    ]


@pytest.mark.parametrize("text", ["", "[1]", '{"choices": {"double": 3}}'])
def test_a_damaged_file_is_left_aside_and_said(cache: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    cache.mkdir()
    (cache / "some_gpu.json").write_text(text)
    assert tuning.choices("Some GPU") == {}
    assert "cannot be read" in caplog.text
    path = tuning.save("Some GPU", {"double": {"8": {"block": 1}}})
    assert json.loads(path.read_text())["choices"] == {"double": {"8": {"block": 1}}}


def test_shipped_choices_name_launchers_that_exist() -> None:
    from transect.ops.registry import all_ops

    knobs = {k.name: k for op in all_ops() for k in op.knobs()}
    for file in tuning.SHIPPED.glob("*.json"):
        for launcher, buckets in json.loads(file.read_text())["choices"].items():
            assert launcher in knobs, f"{file.name}: {launcher}"
            for name, config in buckets.items():
                assert set(config) <= set(knobs[launcher].choices), f"{file.name}: {launcher} {name}"


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    from transect.cli import main

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for arguments, message in (
        (["softmax"], "tuning measures on the GPU, and torch finds none here"),
        (["softmax", "--launcher", "nothing"], "no knobs to tune in a launcher called 'nothing': softmax"),
        (
            ["nothing"],
            "'nothing' is neither an operator (`transect bench ops --list`) nor a model: unknown model 'nothing'",
        ),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["tune", *arguments])
        assert stop.value.code == 2 and message in capsys.readouterr().err


def test_the_configuration_in_use_is_tried_whatever_the_limit() -> None:
    def in_use(launcher: str, size: tuple[int, int]) -> dict[str, int]:
        assert (launcher, size) == ("double", (3, 1000))
        return {"block": 2, "warps": 4}

    found = search.search(_knobs(), CASE, "cpu", seconds=0, in_use=in_use, timer=_timer)
    assert [trial.config for trial in found.trials] == [{"block": 4, "warps": 8}, {"block": 2, "warps": 4}]
    assert found.best.config == {"block": 2, "warps": 4} and found.left == 10


def test_an_unknown_gpu_runs_by_the_rule(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A new GPU")
    place = torch.device("cuda", 7)
    assert tuning.choose("softmax", 4096, place, tuning.row_rule) == tuning.row_rule(4096)
    assert "no tuned kernel configurations for A new GPU: rules of thumb are used" in caplog.text
    tuning.choices.cache_clear()
    tuning.choose.cache_clear()
    tuning.save("A new GPU", {"softmax": {"4096": {"rows": 2, "warps": 1}}})
    assert tuning.choose("softmax", 3000, place, tuning.row_rule) == {"rows": 2, "warps": 1}
    tuning.choose.cache_clear()


def test_findings_of_this_machine_are_left_aside_where_bits_must_not_depend_on_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A shipped GPU")
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    tuning.save("A shipped GPU", {"rms_norm": {"4096": {"rows": 1, "warps": 2}}}, tmp_path / "shipped")
    tuning.save("A shipped GPU", {"rms_norm": {"4096": {"warps": 8}, "1024": {"rows": 4}}})
    place = torch.device("cuda", 7)
    tuning.choose.cache_clear()
    for width, own, shipped in ((4096, {"warps": 8}, {"warps": 2}), (1024, {"rows": 4}, {})):
        of_rule = tuning.row_rule(width)
        assert tuning.choose("rms_norm", width, place, tuning.row_rule) == of_rule | own
        assert tuning.choose("rms_norm", width, place, tuning.row_rule, own=False) == of_rule | shipped
    tuning.choose.cache_clear()


def test_findings_from_before_a_knob_was_there_are_of_use_still(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    tuning.save("A GPU", {"softmax": {"4096": {"rows": 7}}})
    config = tuning.choose("softmax", 4096, torch.device("cuda", 7), tuning.row_rule)
    assert config == {"rows": 7, "warps": tuning.row_rule(4096)["warps"]}
    tuning.choose.cache_clear()


def test_the_command_keeps_the_best_of_every_operator(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same as on a GPU, but with the pretended kernel above and times to match."""
    from functools import partial

    from transect.cli import main
    from transect.ops import registry

    for name in ("double", "twice"):
        op = registry.Op(
            name, _launch, lambda x: Cost(0, 0, 0), cases=lambda: [CASE], knobs=lambda name=name: [_knobs(name=name)]
        )
        monkeypatch.setitem(registry._OPS, name, op)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "A new GPU")
    monkeypatch.setattr(search, "cases_of", lambda knobs, cases, device, shapes: list(cases))
    monkeypatch.setattr(search, "search", partial(search.search, device="cpu", timer=_timer))
    trials = cache.parent / "trials.json"
    with pytest.raises(SystemExit) as stop:
        main(["tune", "double", "twice", "--json", str(trials)])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "3.000x the heuristic's speed" in said and "100.0%" in said and "rejected as a race" in said
    kept = json.loads((cache / "a_new_gpu.json").read_text())
    assert kept["choices"] == {name: {"4x1024": {"block": 2, "warps": 4}} for name in ("double", "twice")}
    written = json.loads(trials.read_text())
    assert [found["launcher"] for found in written["searches"]] == ["double", "twice"]
    assert written["searches"][0]["worth"] == {"block": 2.0, "warps": 1.5}
