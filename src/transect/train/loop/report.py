"""The logs of a run: a line of JSON for each step, TensorBoard if it is installed, progress in the terminal."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .samples import SampleRecord
from .trainer import EvalRecord, StepRecord

log = logging.getLogger(__name__)

LOG = "log.jsonl"


@dataclass(frozen=True, slots=True)
class MatrixRate:
    """Rate that MFU is a share of: FLOP/s of matrix products in ``dtype``, and its origin."""

    flops_per_second: float
    dtype: str
    origin: str

    def too_low(self, mfu: float) -> str:
        """Explain in one sentence why a share can be above 1."""
        return (
            f"MFU of {mfu:.0%} means that the device's measured rate is too low: "
            f"{self.flops_per_second / 1e12:.3g} TFLOP/s of {self.dtype}, {self.origin}; "
            "measure it again with `transect hardware --again` while nothing else runs"
        )


class RunLog:
    """``RUN/log.jsonl``: one object a line, ``{"kind": "step" | "evaluation", "step": ..., ...}``.

    A run that resumes at step n drops the lines of later steps first, so a curve has every step once.

    Args:
        resumed_at: the step of the checkpoint; 0 begins a new file.
        rate: for MFU; None leaves it out.
    """

    def __init__(
        self,
        run_dir: str | Path,
        resumed_at: int = 0,
        *,
        rate: MatrixRate | None = None,
        tensorboard: bool = True,
    ) -> None:
        directory = Path(run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / LOG
        kept = [line for line in read_log(directory) if line["step"] <= resumed_at] if resumed_at else []
        part = self.path.with_suffix(".part")
        part.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        part.replace(self.path)
        self._file = self.path.open("ab", buffering=0)
        self._lost = False
        self.rate = rate
        self._board = _tensorboard(directory, resumed_at) if tensorboard else None

    def step(self, record: StepRecord) -> None:
        """Write one step."""
        values = asdict(record) | {"tokens_per_second": record.tokens_per_second}
        values |= values.pop("extra")
        if (mfu := self.mfu([record])) is not None:
            values["mfu"] = mfu
        self._write("step", values)

    def evaluation(self, record: EvalRecord) -> None:
        """Write one measurement of the validation loss."""
        values = asdict(record)
        self._write("evaluation", values | values.pop("extra"))

    def sample(self, record: SampleRecord) -> None:
        """Write one answer."""
        self._write("sample", asdict(record))

    def mfu(self, records: Sequence[StepRecord]) -> float | None:
        """Return MFU: the steps' useful FLOP/s over the device's matrix rate; None if one is unknown."""
        flops = sum(record.flops for record in records)
        if self.rate is None or not flops:
            return None
        return flops / sum(record.seconds for record in records) / self.rate.flops_per_second

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        self._append(json.dumps({"kind": kind, "time": time.time(), **values}).encode() + b"\n")
        if self._board is not None:
            for name, value in values.items():
                if name != "step" and isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, values["step"])

    def _append(self, line: bytes) -> None:
        """Append a line, completely or not at all. If the disk is full, lines of the log are lost, and the run
        continues."""
        end = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) or 0 :]
        except OSError as error:
            self._file.truncate(end)
            if not self._lost:
                log.warning("cannot write to %s (%s): steps are missing there", self.path, error.strerror)
            self._lost = True


def read_log(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log; a last line that was cut off by a kill is left out.

    Raises:
        ValueError: a line in the middle is not JSON.
    """
    path = Path(run_dir) / LOG
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is not JSON: remove it") from None
    return found


class Terminal:
    """A progress bar with loss, speed, MFU, memory and remaining time; plain lines outside of terminals."""

    def __init__(self, steps: int, done: int, run_log: RunLog, console: Console | None = None) -> None:
        self._log = run_log
        self._console = console or Console()
        self._recent: deque[StepRecord] = deque(maxlen=20)
        self._steps = steps
        self._explained = False
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[line]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=steps, completed=done, line="")

    def __enter__(self) -> Terminal:
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()

    def step(self, record: StepRecord) -> None:
        """Show a step."""
        self._recent.append(record)
        speed = sum(r.tokens for r in self._recent) / sum(r.seconds for r in self._recent)
        line = f"loss {record.loss:.4f}  {speed:,.0f} tok/s"
        line += "".join(f"  {name} {value:.3f}" for name, value in record.extra.items())
        if (mfu := self._log.mfu(self._recent)) is not None:
            line += f"  MFU {mfu:.0%}" if mfu <= 1 else "  MFU above 100%, see above"
            self._explain(mfu)
        if record.peak_bytes:
            line += f"  {record.peak_bytes / 2**30:.1f} GiB"
        self._progress.update(self._task, completed=record.step, line=line)
        every = max(1, self._steps // 20)
        if not self._console.is_terminal and (record.step % every == 0 or record.step == self._steps):
            left = (self._steps - record.step) * sum(r.seconds for r in self._recent) / len(self._recent)
            self._console.print(f"step {record.step}/{self._steps}  {line}  {left:.0f} s left", highlight=False)

    def _explain(self, mfu: float) -> None:
        """Print once the reason for a share above 1."""
        if mfu > 1 and not self._explained and self._log.rate is not None:
            self._explained = True
            self._progress.console.print(f"transect: {self._log.rate.too_low(mfu)}", highlight=False)

    def evaluation(self, record: EvalRecord) -> None:
        """Show a validation loss."""
        bits = "" if record.bits_per_byte is None else f", {record.bits_per_byte:.3f} bits per byte"
        bits += "".join(f", {name} {value:.3f}" for name, value in record.extra.items())
        self._progress.console.print(
            f"step {record.step}: validation loss {record.loss:.4f}{bits} ({record.labels} labels)", highlight=False
        )

    def sample(self, record: SampleRecord) -> None:
        """Show an answer."""
        text = f"step {record.step}: {record.prompt!r} -> {record.answer!r}"
        self._progress.console.print(text, highlight=False, markup=False)


def _tensorboard(directory: Path, resumed_at: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.info("TensorBoard is not installed, so the log is %s alone; pip install tensorboard adds it", LOG)
        return None
    return SummaryWriter(str(directory / "tensorboard"), purge_step=resumed_at + 1)  # type: ignore[no-untyped-call]
