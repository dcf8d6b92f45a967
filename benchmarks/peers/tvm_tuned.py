"""TVM: a matrix product as a tensor expression, its schedule found by MetaSchedule on this processor; and softmax with
a schedule written by hand, which ``compilers/follow.py`` shows.

The search wants ``xgboost-cpu`` (or ``xgboost``), ``psutil``, ``cloudpickle`` and ``tornado`` beside ``apache-tvm``.
Schedules stay in the folder of ``TVM_SCHEDULES``, or in a temporary one.
"""

from __future__ import annotations

import os
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compilers.operators import Arrays, Work
from benchmarks.peers.peer import Prepared


def processor(threads: int) -> dict[str, Any]:
    """Return the target: LLVM for the widest vectors of this processor that LLVM and the tuner both know."""
    flags = Path("/proc/cpuinfo").read_text()
    name = "skylake-avx512" if "avx512bw" in flags else "haswell" if "avx2" in flags else "x86-64"
    return {"kind": "llvm", "mcpu": name, "num-cores": threads}


def product(m: int, n: int, k: int) -> Any:
    """Return ``y[m, n] = sum over k of x[m, k] w[n, k]`` as a module without a schedule."""
    import tvm
    from tvm import te

    x, w = te.placeholder((m, k), "float32", "x"), te.placeholder((n, k), "float32", "w")
    axis = te.reduce_axis((0, k), "k")
    y = te.compute((m, n), lambda i, j: te.sum(x[i, axis] * w[j, axis], axis=axis), name="y")
    return tvm.IRModule({"main": te.create_prim_func([x, w, y])})


def softmax(rows: int, columns: int) -> Any:
    """Return softmax as TVM's library of operators writes it, without a schedule."""
    import tvm
    from tvm import te, topi

    x = te.placeholder((rows, columns), "float32", "x")
    return tvm.IRModule({"main": te.create_prim_func([x, topi.nn.softmax(x, axis=1)])})


def by_rows(module: Any, lanes: int = 16) -> Any:
    """Schedule softmax by hand: rows in parallel, all four loops of a row together, elements in vectors."""
    from tvm.s_tir import Schedule

    schedule = Schedule(module)
    stages = {name: schedule.get_sblock(f"T_softmax_{name}") for name in ("maxelem", "exp", "expsum", "norm")}
    for name in ("maxelem", "expsum"):  # a result of its own in each lane, then the result of these
        lane = schedule.split(schedule.get_loops(stages[name])[-1], [None, lanes])[1]
        stages[f"{name} by lane"] = schedule.rfactor(lane, 0)
    row, column = schedule.get_loops(stages["norm"])
    schedule.parallel(row)
    for name in ("expsum", "expsum by lane", "exp", "maxelem", "maxelem by lane"):
        schedule.compute_at(stages[name], row)
    for loop in (column, schedule.get_loops(stages["exp"])[-1]):
        schedule.vectorize(schedule.split(loop, [None, lanes])[1])
    for name in ("maxelem by lane", "expsum by lane"):
        _, lane, part = schedule.get_loops(stages[name])
        schedule.reorder(part, lane)
        schedule.vectorize(lane)
    return schedule.mod


def tuned(module: Any, target: Any, trials: int) -> Any:
    """Search for a schedule, and return the scheduled module."""
    from tvm.s_tir import meta_schedule

    folder = os.environ.get("TVM_SCHEDULES") or tempfile.mkdtemp()
    database = meta_schedule.tune_tir(
        mod=module,
        target=target,
        work_dir=folder,
        max_trials_global=trials,
        num_trials_per_iter=min(32, trials),
        seed=0,
    )
    schedule = meta_schedule.tir_integration.compile_tir(database, module, target)
    if schedule is None:
        raise RuntimeError(f"none of {trials} trials gave a schedule")
    return schedule.mod


class Tvm:
    """A tuned product."""

    def __init__(self, device: str, threads: int, tuning: int) -> None:
        os.environ["TVM_NUM_THREADS"] = str(threads)
        import tvm

        self.tvm, self.trials = tvm, tuning
        self.target = tvm.target.Target(processor(threads))

    def versions(self) -> dict[str, str]:
        return {name: metadata.version(name) for name in ("apache-tvm", "apache-tvm-ffi")}

    def lacks(self, work: Work) -> str | None:
        if work.operator == "softmax" and work.dtype == "float32":
            return None
        if work.operator != "matmul" or work.dtype != "float32":
            return "raced with the product and softmax in float32 only"
        return None if self.trials else "not tuned: --tuning 0"

    def prepare(self, work: Work, weights: Arrays, data: list[Arrays]) -> Prepared:
        tvm = self.tvm
        if work.operator == "softmax":
            return self._softmax(work, data)
        module = tuned(product(**{name: work.sizes[name] for name in "mnk"}), self.target, self.trials)
        run = tvm.compile(module, target=self.target)["main"]
        w = tvm.runtime.tensor(weights["w"])
        xs = [tvm.runtime.tensor(each["x"]) for each in data]
        y = tvm.runtime.tensor(np.zeros((work.sizes["m"], work.sizes["n"]), np.float32))

        def call(copy: int) -> Any:
            run(xs[copy], w, y)
            return y

        return Prepared(call, lambda: None, as_array, len(xs), f"product: {self.trials} trials")

    def _softmax(self, work: Work, data: list[Arrays]) -> Prepared:
        run = self.tvm.compile(by_rows(softmax(**work.sizes)), target=self.target)["main"]
        xs = [self.tvm.runtime.tensor(each["x"]) for each in data]
        y = self.tvm.runtime.tensor(np.zeros_like(data[0]["x"]))

        def call(copy: int) -> Any:
            run(xs[copy], y)
            return y

        return Prepared(call, lambda: None, as_array, len(xs), "softmax: a schedule by hand")


def as_array(result: Any) -> np.ndarray:
    """Convert a result to float64."""
    return result.numpy().astype(np.float64)


COMPILER = Tvm
