"""Measured runs are kept with all that predictions need to be made again."""

import gzip
from pathlib import Path

from benchmarks.plan.cells import crossing
from benchmarks.plan.kept_runs import LOG, KeptRuns, kept_runs
from transect.bench.levels import Level, Result
from transect.bench.load import Record, Run
from transect.bench.summary import summarize
from transect.plan.target import LatencyTarget


def _result(at: float) -> Result:
    records = [
        Record(at, at + 0.001, [at + 0.1, at + 0.15], at + 0.15, 20, 2),
        Record(at, at + 0.002, [], at + 0.2, 20, 0, "http 429"),
    ]
    return Result(Level("x trace", 1.0, []), summarize(Run(records, 1.5, 0.0, 7.0)), records, 7.0)


def test_runs_come_back_with_their_facts_and_records(tmp_path: Path) -> None:
    kept, results = KeptRuns(tmp_path / "kept", tmp_path / "log"), [_result(0.0), _result(1.0)]
    for number, result in enumerate(results):
        kept.add(result, kind="cell", rate=number)
    found = list(kept_runs(tmp_path / "kept"))
    assert [facts for facts, _ in found] == [{"kind": "cell", "rate": 0}, {"kind": "cell", "rate": 1}]
    for (_, back), result in zip(found, results, strict=True):
        assert back.records == result.records
        assert (back.began, back.summary["ttft"]) == (result.began, result.summary["ttft"])


def test_the_log_is_kept_as_it_grows(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "kept"
    kept = KeptRuns(folder, log)
    log.write_bytes(b"first")
    kept.add(_result(0.0), kind="sweep")
    log.write_bytes(b"first, second")
    kept.add_log()
    assert gzip.decompress((folder / LOG).read_bytes()) == b"first, second"


def test_nothing_is_kept_without_a_folder(tmp_path: Path) -> None:
    KeptRuns(None, tmp_path / "log").add(_result(0.0), kind="cell")
    assert not list(tmp_path.iterdir())


def test_the_knee_lies_where_the_target_begins_to_be_missed() -> None:
    target = LatencyTarget.parse("ttft.p99=1s")
    points = [(rate, {"ttft": {"p99": p99}}) for rate, p99 in ((1.0, 0.5), (2.0, 2.0), (3.0, 8.0))]
    found = crossing(points, target)
    assert found is not None
    assert abs(found - 1.5) < 1e-9
    assert crossing(points[1:], target) is None
