"""An answer that is cut after any token continues in another engine like an undisturbed one.

A workload has twenty and more cut requests, so ``make prove`` continues over 100,000 of them.
"""

import pytest
from continuations import continuations
from effort import examples
from engine_workloads import Workload, run, workloads
from hypothesis import HealthCheck, given
from small_engine import make, request, tokens_of

from transect.engine.scheduling.policies.admission import QueueFull
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams

LARGE = {"suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]}


@examples(12, 1200, print_blob=True, **LARGE)
@given(continuations(workloads(lag=0)))
def test_every_cut_with_tokens_at_once(workload: Workload):
    run(workload)


@examples(12, 1200, print_blob=True, **LARGE)
@given(continuations(workloads(lag=1)))
def test_every_cut_with_tokens_one_step_late(workload: Workload):
    run(workload)


@examples(8, 900, print_blob=True, **LARGE)
@given(continuations(workloads(lag=1, storm=True)))
def test_every_cut_where_sequences_drive_each_other_out(workload: Workload):
    run(workload)


@examples(8, 500, print_blob=True, **LARGE)
@given(continuations(workloads(lag=0, batching="static")))
def test_every_cut_in_static_batches(workload: Workload):
    run(workload)


@examples(8, 600, print_blob=True, **LARGE)
@given(continuations(workloads(lag=2, depth=3)))
def test_every_cut_in_a_pipeline(workload: Workload):
    run(workload)


@examples(8, 600, print_blob=True, **LARGE)
@given(continuations(workloads(lag=1, breaking=True)))
def test_every_cut_where_steps_raise(workload: Workload):
    run(workload)


def drawn(core, name):
    outputs = []
    while core.has_work:
        outputs += core.step()
    return tokens_of(outputs, name)


def test_a_continued_request_is_not_kept_out_by_a_full_queue_and_goes_first():
    whole = make()
    whole.add(request("a", first=5))
    answer = drawn(whole, "a")
    core = make(max_queue=1, max_num_seqs=1)
    core.add(request("b"))
    with pytest.raises(QueueFull):
        core.add(request("c"))
    core.add(Request("a", (5, *range(1, 6)), request("a").params, output_token_ids=(tuple(answer[:1]),)))
    core.executor.begun[1] = tuple(answer[:1])
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert tokens_of(outputs, "a") == answer[1:]
    assert [each.request_id for each in outputs if each.finish_reason] == ["a", "b"]
    assert core.stats().prompt_tokens == 6, "the prompt of a continued request was counted where it began"


@pytest.mark.parametrize(
    ("params", "given", "message"),
    [
        ({"n": 2, "seed": 1}, ((1,),), "tokens of 2 choices"),
        ({"seed": 1}, (None,), "one of which is unfinished"),
        ({}, ((1,),), "a seed that is not known"),
        ({"seed": 1, "max_tokens": 2}, ((1, 2),), "all of its 2 tokens"),
    ],
)
def test_output_tokens_that_cannot_be_continued(params, given, message):
    with pytest.raises(ValueError, match=message):
        Request("a", (1, 2), SamplingParams(**params), output_token_ids=given)


def test_an_answer_that_has_reached_the_context_of_this_engine():
    core = make(max_model_len=12)
    params = SamplingParams(seed=1, max_tokens=None)
    with pytest.raises(ValueError, match="a context as long as that of the first"):
        core.add(Request("a", (1, 2, 3, 4), params, output_token_ids=(tuple(range(8)),)))
    assert not core.has_work
