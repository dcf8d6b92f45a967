"""Exports of Nsight Systems are read as traces are."""

import sqlite3

import pytest

from transect.costs.presets import preset
from transect.explain.program.explain import explain_trace
from transect.explain.program.trace_file import read_trace

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL,
    srcKind INTEGER, dstKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER, callchainId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    text TEXT, globalTid INTEGER, textId INTEGER);
"""
NAMES = ["void gemm_bf16(int)", "gemm_bf16", "cudaLaunchKernel_v7000", "cudaStreamSynchronize_v3020", "train step"]
THREAD = (7 << 24) | 9


@pytest.fixture
def export(tmp_path):
    """Twenty steps of 100 us: a product of 40 us, a copy of 10 from pageable memory, and nothing for 50."""
    path = tmp_path / "report.sqlite"
    database = sqlite3.connect(path)
    database.executescript(SCHEMA)
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(NAMES))
    for step in range(20):
        at, call = 100_000 * step + 1_000_000, 10 * step + 1
        ranges = [
            (at, at + 95_000, 59, 0, None, THREAD, 4),
            (at + 1000, at + 9000, 59, 0, "aten::mm, seq = 3, sizes = [[512, 512], [512, 512]]", THREAD, None),
        ]
        database.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?, ?)", ranges)
        calls = [
            (at + 2000, at + 7000, 0, THREAD, call, 2, 0, 0),
            (at + 30_000, at + 85_000, 0, THREAD, call + 1, 3, 0, 0),
        ]
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?, ?, ?, ?)", calls)
        kernel = (at + 8000, at + 48_000, 0, 1, 7, call, 7 << 24, 0, 1)
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", kernel)
        copy = (at + 48_000, at + 58_000, 0, 7, call + 1, 4, 2, 2, 0)
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", copy)
    database.commit()
    database.close()
    return path


def test_an_export_is_explained_like_a_trace(export):
    found = explain_trace(read_trace(export), preset("h200").ceilings())
    parts = {name: round(1e6 * seconds) for name, seconds in found.split.parts.items() if seconds > 1e-9}
    assert found.split.on_gpu and sum(found.split.parts.values()) == pytest.approx(found.split.wall)
    assert parts["copies"] == 200 and parts["unrated"] == 800  # an export has no types of numbers: no floors
    assert "sync" in parts
    (kernel,) = [op for op in found.split.ops if op.operator]
    assert (kernel.name, kernel.calls, kernel.key.shapes) == ("aten::mm", 20, [[512, 512], [512, 512]])
    assert any(op.key.name == "Memcpy DtoH (Device -> Pageable)" and op.key.bytes == 4 for op in found.split.ops)
    assert found.findings[0].kind == "sync", str(found)


def test_tables_that_are_missing_had_no_events(export):
    with sqlite3.connect(export) as database:
        database.executescript("DROP TABLE NVTX_EVENTS; DROP TABLE CUPTI_ACTIVITY_KIND_MEMCPY")
    found = explain_trace(read_trace(export), preset("h200").ceilings())
    assert found.split.on_gpu and found.split.parts["copies"] == 0


@pytest.mark.parametrize(
    ("schema", "why"),
    [("CREATE TABLE other (x INTEGER)", "--trace=cuda,nvtx"), (None, "is not an export of Nsight Systems")],
)
def test_other_databases_are_refused(tmp_path, schema, why):
    path = tmp_path / "other.sqlite"
    if schema is None:
        path.write_bytes(b"SQLite format 3\0" + b"x" * 2000)
    else:
        with sqlite3.connect(path) as database:
            database.executescript(schema)
    with pytest.raises(ValueError, match=why):
        read_trace(path)
