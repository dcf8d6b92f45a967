"""Random workloads through the shipping scheduler; helpers/engine_workloads.py checks every promise on the way."""

from engine_workloads import Workload, run, workloads
from hypothesis import given, settings


def examples(number: int) -> settings:
    return settings(max_examples=number, print_blob=True)


@examples(800)
@given(workloads(lag=0))
def test_tokens_at_once(workload: Workload):
    run(workload)


@examples(1000)
@given(workloads(lag=1))
def test_tokens_one_step_late(workload: Workload):
    run(workload)


@examples(350)
@given(workloads(lag=0, storm=True))
def test_preemption_storm_with_tokens_at_once(workload: Workload):
    run(workload)


@examples(450)
@given(workloads(lag=1, storm=True))
def test_preemption_storm_with_tokens_one_step_late(workload: Workload):
    run(workload)


@examples(150)
@given(workloads(lag=0, policy="static"))
def test_static_batches_with_tokens_at_once(workload: Workload):
    run(workload)


@examples(150)
@given(workloads(lag=1, policy="static"))
def test_static_batches_with_tokens_one_step_late(workload: Workload):
    run(workload)
