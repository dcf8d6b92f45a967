"""A grammar that cannot go on: the answer is not complete then, wherever that shows."""

import ctypes

import pytest
from tiny_llm import VOCAB, save_tiny_llm

from transect import LLM, SamplingParams, StructuredOutputsParams
from transect.text.grammar.constraint import GrammarConstraint

FORCED = [7, 8, 9, 10]


class Matcher:
    """Forces ``FORCED`` after any first token, and gives up at the last of them, as one that meets a limit does."""

    def __init__(self, seen=()):
        self.seen, self.error = list(seen), False

    def deep_copy(self):
        return Matcher(self.seen)

    def is_stopped(self):
        return self.error

    def is_error(self):
        return self.error

    def is_accepting(self):
        return False

    def get_error(self):
        return "too many items"

    def consume_token(self, token):
        self.error = self.error or len(self.seen) == len(FORCED)
        self.seen.append(token)
        return not self.error

    def compute_ff_tokens(self):
        return FORCED[len(self.seen) - 1 :] if self.seen else []

    def unsafe_compute_mask_ptr(self, address, nbytes):
        ctypes.memset(address, 0xFF, nbytes)


def test_a_failed_grammar_is_not_complete():
    constraint = GrammarConstraint(Matcher(), "json")
    assert [constraint.accept(token) for token in (1, 7, 8, 9)] == [None] * 4
    complaint = "the answer cannot go on under the grammar of json: it is too large or too complex: make it simpler"
    assert constraint.accept(10) == complaint and not constraint.terminated
    assert constraint.accept(11) == complaint


@pytest.mark.parametrize("lag", [False, True])
def test_giving_up_within_forced_tokens_is_an_error_not_a_stop(tmp_path, lag):
    save_tiny_llm(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", native=False, num_kv_blocks=32, threads=1, async_scheduling=lag)
    llm._grammars.compile = lambda params: GrammarConstraint(Matcher(), params.field)
    params = SamplingParams(max_tokens=20, ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="a+"))
    (choice,) = llm.generate([[5, 6]], params)[0].outputs
    assert choice.finish_reason == "error"
    assert choice.token_ids[1:] == FORCED[:3] and choice.token_ids[0] < VOCAB
