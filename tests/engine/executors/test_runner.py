"""``Runner`` on hand-made batches: late tokens, block copies, poisoned caches, prompt logprobs, failing rows."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runner_fuzz import VOCAB, random_model

from transect.engine.executors.gpu.pending_step import PendingStep
from transect.engine.executors.prompt_results import LOGPROB_ROWS
from transect.engine.executors.runner import CompletedStep, Runner, Waiting
from transect.engine.scheduling.batch import Draw, ScheduledBatch, ScheduledRow, StepResult
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.models.context import VarlenContext

BLOCK, BLOCKS = 4, 32
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.fixture
def runner(model):
    caches = model.new_kv_cache(BLOCKS, BLOCK, torch.float32)
    for cache in caches:
        cache.fill_(math.nan)
    return Runner(model, *caches)


def full_logits(model, tokens):
    context = VarlenContext(torch.tensor([0, len(tokens)], dtype=torch.int32), model.ops)
    return model.logits(model(torch.tensor(tokens), context.positions(), context))


class Choice:
    """A sequence as the scheduler would keep it."""

    def __init__(self, seq_id, prompt, blocks, params=GREEDY, choice=0):
        self.seq_id, self.prompt, self.blocks, self.params, self.choice = seq_id, tuple(prompt), blocks, params, choice
        self.output = []

    def draw(self):
        return Draw(self.seq_id, self.choice, 7, self.params, self.prompt, self.output)

    def row(self, start, count, draws=None, prompt_logprobs=None):
        draws = (self.draw(),) if draws is None else draws
        return ScheduledRow(
            self.seq_id, start, count, self.prompt, self.output, self.blocks, draws, prompt_logprobs=prompt_logprobs
        )


def run(runner, step, *rows, copies=()):
    return runner.submit(ScheduledBatch(step, rows, copies)).result()


def test_chunks_and_decodes_in_one_batch_draw_the_tokens_of_the_whole_sequence(model, runner):
    a = Choice(1, range(3, 14), [9, 2, 30, 5])
    b = Choice(2, [50, 51, 52], [11, 0])
    for step, (a_span, a_draws) in enumerate([((0, 5), ()), ((5, 2), ()), ((7, 4), None)]):
        b_span = (0, 3) if step == 0 else (2 + step, 1)
        result = run(runner, step, a.row(*a_span, draws=a_draws), b.row(*b_span))
        b.output.append(result.tokens[2])
        assert (1 in result.tokens) == (a_draws is None)
    a.output.append(result.tokens[1])
    for choice in (a, b):
        logits = full_logits(model, [*choice.prompt, *choice.output])
        first = len(choice.prompt) - 1
        assert choice.output == logits[first : first + len(choice.output)].argmax(-1).tolist()


def test_a_late_token_is_taken_from_the_step_before(model, runner):
    """Under lag 1 a row is planned before its input token is known; penalties count the late token too."""
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.5)
    prompt, tokens = [4, 5, 6, 7, 8], []
    settled = Choice(1, prompt, [0, 1, 2, 3], params)
    for step in range(8):
        span = (0, 5) if step == 0 else (4 + step, 1)
        tokens.append(run(runner, step, settled.row(*span)).tokens[1])
        settled.output.append(tokens[-1])
    late, drawn = Choice(2, prompt, [10, 11, 12, 13], params), []
    for step in range(8):
        span = (0, 5) if step == 0 else (4 + step, 1)
        row = late.row(*span)
        if step:
            assert row.token_ids == [-1]
        result = run(runner, step, row)
        if drawn:
            late.output.append(drawn[-1])  # what the scheduler learns one step late
        drawn.append(result.tokens[2])
    assert drawn == tokens


def test_choices_fork_with_a_copy_of_the_shared_block(model, runner):
    params = SamplingParams(temperature=2.0)
    prompt = [9, 8, 7, 6, 5, 4]
    choices = [Choice(i, prompt, [3, 20 + i], params, choice=i) for i in range(3)]
    choices[0].blocks[1] = 4
    leader = choices[0].row(0, 6, draws=tuple(choice.draw() for choice in choices))
    first = run(runner, 0, leader).tokens
    for choice in choices:
        choice.output.append(first[choice.seq_id])
    rows = [choice.row(6, 1) for choice in choices]
    copied = run(runner, 1, *rows, copies=((4, 21), (4, 22))).tokens
    for choice in choices:
        alone = Choice(50, prompt, [25, 26], params, choice=choice.choice)
        alone.output = list(choice.output)
        assert run(runner, 2, alone.row(0, 7)).tokens[50] == copied[choice.seq_id]


def test_prompt_logprobs_over_several_chunks_of_rows(model, runner):
    prompt = [(7 * i) % VOCAB for i in range(LOGPROB_ROWS + 9)]
    one = Choice(1, prompt, list(range(20)))
    entries = []
    for start, count in ((0, LOGPROB_ROWS + 3), (LOGPROB_ROWS + 3, 6)):
        draws = None if start else ()
        entries.extend(run(runner, 0, one.row(start, count, draws, prompt_logprobs=3)).prompt_logprobs[1])
    expected = torch.log_softmax(full_logits(model, prompt).double(), -1)
    assert [entry.token_id for entry in entries] == prompt[1:]
    for position, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-4)
        assert [token for token, _ in entry.top] == expected[position].topk(3).indices.tolist()


def test_a_row_whose_keys_are_not_finite_fails_alone(model, runner):
    good, bad = Choice(1, [3, 4, 5], [1]), Choice(2, [6, 7, 8], [2])
    run(runner, 0, good.row(0, 2, draws=()), bad.row(0, 2, draws=()))
    runner._k_cache[:, 2] = math.nan
    result = run(runner, 1, good.row(2, 1), bad.row(2, 1))
    assert result.tokens == {1: int(full_logits(model, [3, 4, 5])[-1].argmax())}
    assert set(result.errors) == {2} and "not finite" in result.errors[2]
    after = run(runner, 2, good.row(3, 1), bad.row(3, 1))  # planned before the failure was known
    assert 1 in after.tokens and 2 not in after.tokens


def test_logits_of_a_row_have_the_same_bits_alone_and_in_any_batch(model):
    """float32 on torch with batch-invariant operators: the promise behind "the same greedy tokens in any batch"."""

    def logprob(rows_before, rows_after):
        caches = model.new_kv_cache(BLOCKS, BLOCK, torch.float32)
        params = SamplingParams(temperature=0.0, logprobs=5)
        others = [Choice(10 + i, range(i, i + 3 + i), [8 + 3 * i, 9 + 3 * i, 10 + 3 * i]) for i in range(5)]
        one = Choice(1, range(20, 29), [0, 1, 2], params)
        rows = [other.row(0, len(other.prompt)) for other in others]
        batch = (*rows[:rows_before], one.row(0, 9), *rows[5 - rows_after :])
        return run(Runner(model, *caches), 0, *batch).logprobs[1]

    alone = logprob(0, 0)
    for before, after in ((1, 0), (0, 1), (2, 3), (0, 5)):
        assert logprob(before, after) == alone


def test_handles_know_if_the_device_is_done():
    """The engine asks them while it waits to plan the next step."""
    done, ready = CompletedStep(StepResult({})), SimpleNamespace(query=lambda: asked.pop())
    asked = [True, False]
    pending = PendingStep(ready, np.zeros(0, np.uint8), [], StepResult({}), 0, False)
    assert (pending.over, pending.over, done.over) == (False, True, True)
    waiting = Waiting(lambda: done)
    assert not waiting.over
    waiting.draw()
    assert waiting.over
