"""Random workloads through the shipping scheduler; helpers/engine_workloads.py checks every promise on the way."""

from effort import examples
from engine_workloads import Arrival, Run, Workload, preempted_failures, run, workloads
from hypothesis import given

from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler_config import SchedulerConfig


@examples(40, 800, print_blob=True)
@given(workloads(lag=0))
def test_tokens_at_once(workload: Workload):
    run(workload)


@examples(40, 1000, print_blob=True)
@given(workloads(lag=1))
def test_tokens_one_step_late(workload: Workload):
    run(workload)


@examples(25, 350, print_blob=True)
@given(workloads(lag=0, storm=True))
def test_preemption_storm_with_tokens_at_once(workload: Workload):
    run(workload)


@examples(25, 450, print_blob=True)
@given(workloads(lag=1, storm=True))
def test_preemption_storm_with_tokens_one_step_late(workload: Workload):
    run(workload)


@examples(20, 150, print_blob=True)
@given(workloads(lag=0, batching="static"))
def test_static_batches_with_tokens_at_once(workload: Workload):
    run(workload)


@examples(20, 150, print_blob=True)
@given(workloads(lag=1, batching="static"))
def test_static_batches_with_tokens_one_step_late(workload: Workload):
    run(workload)


@examples(15, 800, print_blob=True)
@given(workloads(lag=1, crowd=True))
def test_short_prompts_behind_long_ones(workload: Workload):
    run(workload)


@examples(25, 500, print_blob=True)
@given(workloads(lag=2, depth=3))
def test_pipeline(workload: Workload):
    run(workload)


@examples(20, 350, print_blob=True)
@given(workloads(lag=1, depth=2, storm=True))
def test_preemption_storm_in_a_pipeline(workload: Workload):
    run(workload)


def test_forced_tokens_that_cross_a_block_while_none_is_free():
    """Two choices fork, and both have tokens to compute that need a copy of the shared block and another block; one
    block is free. What has room runs, so the copy that was planned is made."""
    params = SamplingParams(n=2, seed=1, max_tokens=4, ignore_eos=True)
    prompt = (0, 7, 6, 5, 4, 3, 2, 1, 0, 7, 6, 5, 0, 0, 0)
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 3, "max_model_len": 20, "enable_prefix_caching": False}
    for depth in (1, 2):
        config = SchedulerConfig(num_blocks=5, block_size=4, watermark=0.0, pipeline_depth=depth, seed=1, **limits)
        Run(Workload(config, (Arrival(0, prompt, params, grammar=(0, 4, None)),), lag=1)).finish()


@examples(30, 600, print_blob=True)
@given(workloads(lag=0, breaking=True))
def test_steps_that_raise_with_tokens_at_once(workload: Workload):
    run(workload)


@examples(30, 600, print_blob=True)
@given(workloads(lag=1, breaking=True))
def test_steps_that_raise_with_tokens_one_step_late(workload: Workload):
    run(workload)


@examples(20, 300, print_blob=True)
@given(workloads(lag=2, depth=3, breaking=True))
def test_steps_that_raise_in_a_pipeline(workload: Workload):
    run(workload)


@examples(20, 300, print_blob=True)
@given(workloads(lag=1, storm=True, breaking=True))
def test_steps_that_raise_in_a_preemption_storm(workload: Workload):
    run(workload)


@examples(30, 600, print_blob=True)
@given(preempted_failures())
def test_sequences_whose_logits_are_not_finite_while_they_are_preempted(workload: Workload):
    run(workload)


@examples(40, 4000, print_blob=True)
@given(workloads(lag=0, drafting=True))
def test_drafted_tokens(workload: Workload):
    run(workload)


@examples(30, 3000, print_blob=True)
@given(workloads(lag=1, drafting=True))
def test_drafted_tokens_of_an_engine_that_plans_ahead(workload: Workload):
    run(workload)


@examples(30, 3000, print_blob=True)
@given(workloads(lag=1, storm=True, drafting=True))
def test_drafted_tokens_in_a_preemption_storm(workload: Workload):
    run(workload)


@examples(20, 1000, print_blob=True)
@given(workloads(lag=1, drafting=True, breaking=True))
def test_drafted_tokens_in_steps_that_raise(workload: Workload):
    run(workload)


@examples(15, 1000, print_blob=True)
@given(workloads(lag=2, depth=3, drafting=True))
def test_drafted_tokens_in_a_pipeline(workload: Workload):
    run(workload)


@examples(15, 1000, print_blob=True)
@given(workloads(lag=1, depth=2, storm=True, drafting=True))
def test_drafted_tokens_in_a_preemption_storm_of_a_pipeline(workload: Workload):
    run(workload)


def test_choices_that_fork_after_another_request_failed_on_their_blocks():
    """A prompt fails on blocks that it shares with one whose second choice is not forked yet."""
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 3, "max_model_len": 8, "max_prefill_chunk": 1}
    config = SchedulerConfig(num_blocks=7, block_size=1, watermark=0.0, seed=1, **sizes)
    params = SamplingParams(seed=0)
    forks = Arrival(1, (0, 7, 6, 5, 4), params.with_(n=2))
    fails = Arrival(1, (0, 7, 6), params, fail=(-1, 0))
    Run(Workload(config, (Arrival(0, (1,), params), forks, fails), lag=1)).finish()
