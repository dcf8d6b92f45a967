"""Answers with drafts are the answers without, whatever a request asks for."""

import pytest
from effort import proving
from tiny_llm import save_tiny_llm

from transect import LLM, SamplingParams, StructuredOutputsParams
from transect.engine.executors.drafted import Drafted
from transect.engine.scheduling.batch import Draw, ScheduledBatch, ScheduledRow, StepResult

SETTINGS = {"dtype": "float32", "threads": 1, "num_kv_blocks": 60, "max_num_seqs": 24, "seed": 3}
FORM = StructuredOutputsParams(regex="([a-b]{3}-[0-9]{2};){6}")
OPTIONS = [
    {"temperature": 0.0},
    {"n": 2, "temperature": 0.5},
    {"temperature": 0.3, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.2, "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    {"temperature": 0.5, "top_k": 3, "min_p": 0.01, "logit_bias": {65: 3.0}},
    {"temperature": 0.0, "min_tokens": 30, "stop_token_ids": [97]},
    {"temperature": 0.3, "structured_outputs": FORM, "ignore_eos": False},
    {"temperature": 0.0, "bad_words": ["ab"]},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(directory)
    return str(directory)


def answers(llm: LLM):
    """Tokens, logprobs and ends of all choices, all requests together and then one alone."""
    params = [SamplingParams(**{"max_tokens": 48, "seed": 1, "ignore_eos": True} | each) for each in OPTIONS]
    prompts = ["abcabcabcab", "Hello Hello Hello", "x1 x2 x3", "aaaa", "ababab", "zz", "q", "abab"]
    outputs = [*llm.generate(prompts, params), *llm.generate(prompts[0], params[0])]
    return [
        (choice.token_ids, choice.finish_reason, choice.stop_reason, choice.logprobs)
        for output in outputs
        for choice in output.outputs
    ]


@pytest.mark.parametrize("native", [False, None], ids=["torch", "C++"])
@pytest.mark.parametrize("lag", [False, True], ids=["lag 0", "lag 1"])
def test_answers_are_the_same_with_drafts(directory, native: bool | None, lag: bool):
    """Any three of method, length, stack and lag meet in every way; all four with ``--prove``."""
    plain = answers(LLM(directory, async_scheduling=lag, native=native, **SETTINGS))
    for method in ("ngram", "suffix"):
        for adaptive in (False, True):
            if (method == "ngram") ^ adaptive ^ lag ^ (native is None) and not proving():
                continue
            spec = {"method": method, "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": adaptive}
            llm = LLM(directory, async_scheduling=lag, native=native, speculative_config=spec, **SETTINGS)
            assert answers(llm) == plain
            stats = llm.stats()
            if not adaptive:
                assert stats.drafted_tokens > sum(stats.accepted_at.values()) > 0


class Recorded:
    """Gives each row the next of these tokens, and keeps the batches."""

    def __init__(self, tokens: dict[int, int], errors: dict[int, str]) -> None:
        self.tokens, self.errors = tokens, errors
        self.batches: list[ScheduledBatch] = []

    def submit(self, batch: ScheduledBatch):
        self.batches.append(batch)
        result = StepResult({})
        for row in batch.rows:
            for draw in row.draws:
                if row.end in self.errors:
                    result.errors[draw.seq_id] = self.errors[row.end]
                else:
                    result.tokens[draw.seq_id] = self.tokens[row.end]

        class Handle:
            def draw(self) -> None: ...

            def result(self) -> StepResult:
                return result

        return Handle()


def batch_with(drafts: tuple[int, ...]) -> ScheduledBatch:
    prompt = (5, 6, 7)
    draw = Draw(4, 0, 1, SamplingParams(), prompt, [8])
    row = ScheduledRow(4, 3, 1 + len(drafts), prompt, [8], [0, 1], (draw,), drafts=drafts)
    return ScheduledBatch(1, (row,))


@pytest.mark.parametrize(
    ("drafts", "accepted", "last"),
    [((1, 2, 3), [1, 2, 3], 4), ((1, 2, 9), [1, 2], 3), ((9, 2, 3), [], 1), ((1,), [1], 2)],
)
def test_leading_drafts_that_equal_the_draws_are_accepted(drafts, accepted, last):
    executor = Recorded({4: 1, 5: 2, 6: 3, 7: 4}, {})
    result = Drafted(executor).submit(batch_with(drafts)).result()
    assert result.accepted == {4: accepted} and result.tokens == {4: last}
    rows = executor.batches[0].rows
    assert [row.token_ids for row in rows] == [[8], *([draft] for draft in drafts)]
    assert [(row.start, row.end) for row in rows] == [(3 + i, 4 + i) for i in range(len(rows))]
    assert len({row.seq_id for row in rows}) == len(rows)


def test_an_error_counts_only_if_the_drafts_before_it_are_right():
    error = {5: "not finite"}
    result = Drafted(Recorded({4: 1, 6: 3}, error)).submit(batch_with((1, 2))).result()
    assert result.accepted == {4: [1]} and result.errors == {4: "not finite"} and not result.tokens
    result = Drafted(Recorded({4: 3, 6: 3}, error)).submit(batch_with((1, 2))).result()
    assert result.accepted == {4: []} and result.tokens == {4: 3} and not result.errors


def test_rows_of_drafts_have_other_numbers_in_the_next_step():
    """A GPU reads the token that a sequence drew in the step before on the device; a draft is not that token."""
    executor = Recorded({4: 1, 5: 2}, {})
    drafted = Drafted(executor)
    batch = batch_with((1,))
    drafted.submit(batch)
    drafted.submit(ScheduledBatch(2, batch.rows))
    first, second = ({row.seq_id for row in each.rows[1:]} for each in executor.batches)
    assert not first & second
