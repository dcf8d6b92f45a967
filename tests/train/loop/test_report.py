"""What a run says of its speed."""

import io
import resource
import signal

from rich.console import Console

from transect.train.loop.report import MatrixRate, RunLog, Terminal, read_log
from transect.train.loop.trainer import StepRecord

RATE = MatrixRate(1e9, "float32", "measured on 2026-01-02 with torch 2.0 while the machine was 85% busy")


def record(step, flops, seconds=2.0):
    return StepRecord(step, 1.0, 0.5, 1e-3, 100, 90, seconds, 0, flops=flops)


def shown(tmp_path, flops, rate=RATE):
    output = io.StringIO()
    log = RunLog(tmp_path, rate=rate, tensorboard=False)
    with Terminal(len(flops), 0, log, Console(file=output, width=300)) as terminal:
        for step, each in enumerate(flops, 1):
            log.step(record(step, each))
            terminal.step(record(step, each))
    log.close()
    return output.getvalue(), read_log(tmp_path)


def test_mfu_is_of_the_recent_steps(tmp_path):
    text, lines = shown(tmp_path, [0.5e9, 1.5e9])
    assert "MFU 25%" in text and "MFU 50%" in text and "above" not in text
    assert [line["mfu"] for line in lines] == [0.25, 0.75]


def test_more_than_all_is_explained_once(tmp_path):
    text, lines = shown(tmp_path, [2.6e9, 2.6e9])
    assert "130%  " not in text and text.count("MFU above 100%, see above") == 2
    why = "MFU of 130% means that the device's measured rate is too low: 0.001 TFLOP/s of float32, measured on 2026-01-"
    assert text.count(why) == 1 and "85% busy; measure it again with `transect hardware --again`" in text
    assert lines[0]["mfu"] == 1.3


def test_without_a_rate_there_is_no_mfu(tmp_path):
    text, lines = shown(tmp_path, [1e9], rate=None)
    assert "MFU" not in text and "mfu" not in lines[0]


def test_a_full_disk_costs_lines_of_the_log_and_no_run(tmp_path, caplog):
    log = RunLog(tmp_path, tensorboard=False)
    log.step(record(1, 1e9))
    size = log.path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size * 3 // 2, limits[1]))  # a part of the next line fits
        log.step(record(2, 1e9))
        log.step(record(3, 1e9))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    log.step(record(4, 1e9))
    log.close()
    assert [line["step"] for line in read_log(tmp_path)] == [1, 4]
    assert caplog.text.count("cannot write to") == 1
