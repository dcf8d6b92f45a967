"""Random workloads through the shipping scheduler; helpers/engine_workloads.py checks every promise on the way."""

from effort import examples
from engine_workloads import Workload, run, workloads
from hypothesis import given


@examples(200, 800, print_blob=True)
@given(workloads(lag=0))
def test_tokens_at_once(workload: Workload):
    run(workload)


@examples(250, 1000, print_blob=True)
@given(workloads(lag=1))
def test_tokens_one_step_late(workload: Workload):
    run(workload)


@examples(90, 350, print_blob=True)
@given(workloads(lag=0, storm=True))
def test_preemption_storm_with_tokens_at_once(workload: Workload):
    run(workload)


@examples(110, 450, print_blob=True)
@given(workloads(lag=1, storm=True))
def test_preemption_storm_with_tokens_one_step_late(workload: Workload):
    run(workload)


@examples(40, 150, print_blob=True)
@given(workloads(lag=0, policy="static"))
def test_static_batches_with_tokens_at_once(workload: Workload):
    run(workload)


@examples(40, 150, print_blob=True)
@given(workloads(lag=1, policy="static"))
def test_static_batches_with_tokens_one_step_late(workload: Workload):
    run(workload)


@examples(60, 500, print_blob=True)
@given(workloads(lag=2, depth=3))
def test_pipeline(workload: Workload):
    run(workload)


@examples(40, 350, print_blob=True)
@given(workloads(lag=1, depth=2, storm=True))
def test_preemption_storm_in_a_pipeline(workload: Workload):
    run(workload)
