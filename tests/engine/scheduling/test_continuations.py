"""An answer that is cut after any token goes on in another engine as if nothing had happened."""

import pytest
from continuations import continuations
from effort import examples, proving
from engine_workloads import Workload, run, workloads
from hypothesis import HealthCheck, given
from small_engine import make, request, tokens_of

from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.engine.scheduling.waiting_queue import QueueFull

LARGE = {"suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]}


@examples(400, 2500, print_blob=True, **LARGE)
@given(continuations(workloads(lag=0)))
def test_every_cut_with_tokens_at_once(workload: Workload):
    run(workload)


@examples(400, 2500, print_blob=True, **LARGE)
@given(continuations(workloads(lag=1)))
def test_every_cut_with_tokens_one_step_late(workload: Workload):
    run(workload)


@examples(400, 2000, print_blob=True, **LARGE)
@given(continuations(workloads(lag=1, storm=True)))
def test_every_cut_where_sequences_drive_each_other_out(workload: Workload):
    run(workload)


@examples(400, 1000, print_blob=True, **LARGE)
@given(continuations(workloads(lag=0, policy="static")))
def test_every_cut_in_static_batches(workload: Workload):
    run(workload)


@examples(400, 1000, print_blob=True, **LARGE)
@given(continuations(workloads(lag=2, depth=3)))
def test_every_cut_in_a_pipeline(workload: Workload):
    run(workload)


@examples(400, 1000, print_blob=True, **LARGE)
@given(continuations(workloads(lag=1, breaking=True)))
def test_every_cut_where_steps_raise(workload: Workload):
    run(workload)
