"""Requests that wait for their grammars: nothing else waits for them, and every way out of the queue."""

from concurrent.futures import Future

import pytest
from grammar_fakes import Steps
from kv_checker import VOCAB
from small_engine import make, request, tokens_of

from transect.engine.frontends.grammar_queue import GrammarQueue
from transect.engine.scheduling.waiting_queue import QueueFull
from transect.text.grammar.params import StructuredOutputsParams

FORM = StructuredOutputsParams(regex="a")


class Compiler:
    """Compiles when the test says so."""

    def __init__(self):
        self.futures = []

    def submit(self, params):
        assert params is FORM
        self.futures.append(Future())
        return self.futures[-1]


@pytest.fixture
def compiler():
    return Compiler()


def run(core):
    outputs = []
    while core.has_work:
        outputs += core.step()
    return outputs


def test_others_run_while_a_grammar_is_compiled(compiler):
    core = make(max_queue=4)
    queue = GrammarQueue(core, compiler)
    queue.add(request("late", structured_outputs=FORM, max_tokens=9))
    queue.add(request("free"))
    assert len(queue) == 1 and queue.admit() == []
    assert len(tokens_of(run(core), "free")) == 4
    core.scheduler.clock.advance(5.0)
    compiler.futures[0].set_result(Steps(1, VOCAB, 3))
    assert queue.admit() == [] and len(queue) == 0
    outputs = run(core)
    assert outputs[-1].finish_reason == "stop" and outputs[-1].times.arrival == 0.0
    assert outputs[-1].complete == (len(tokens_of(outputs, "late")) == 3)


def test_a_bad_grammar_is_a_refusal(compiler):
    core = make()
    queue = GrammarQueue(core, compiler)
    queue.add(request("bad", structured_outputs=FORM))
    error = ValueError("structured_outputs cannot be used")
    compiler.futures[0].set_exception(error)
    assert queue.admit() == [("bad", error)] and not core.has_work and len(queue) == 0


def test_what_never_fits_is_refused_before_its_grammar_is_compiled(compiler):
    queue = GrammarQueue(make(), compiler)
    with pytest.raises(ValueError, match="context length"):
        queue.add(request("long", prompt=500, structured_outputs=FORM))
    queue.add(request("twice", structured_outputs=FORM))
    with pytest.raises(ValueError, match="in use"):
        queue.add(request("twice", structured_outputs=FORM))
    assert len(compiler.futures) == 1


def test_those_that_wait_here_count_for_the_bound_of_the_queue(compiler):
    queue = GrammarQueue(make(max_queue=2), compiler)
    queue.add(request("a", structured_outputs=FORM))
    queue.add(request("b"))
    with pytest.raises(QueueFull) as full:
        queue.add(request("c", structured_outputs=FORM))
    assert full.value.waiting == 2


def test_an_abort_takes_it_out(compiler):
    core = make()
    queue = GrammarQueue(core, compiler)
    queue.add(request("a", structured_outputs=FORM))
    queue.add(request("b", structured_outputs=FORM, n=2))
    queue.abort("a")
    queue.abort("b", 1)
    assert len(queue) == 1 and compiler.futures[0].cancelled()
    queue.add(request("free"))
    queue.abort("free")
    assert [output.finish_reason for output in core.step()] == ["abort"]


def test_a_request_that_was_taken_is_not_refused_by_those_that_came_later(compiler):
    core = make(max_queue=2)
    queue = GrammarQueue(core, compiler)
    queue.add(request("late", structured_outputs=FORM))
    queue.add(request("a"))
    with pytest.raises(QueueFull) as full:
        queue.add(request("b"))
    assert full.value.waiting == 2
    with pytest.raises(ValueError, match="in use"):
        queue.add(request("late"))
    compiler.futures[0].set_result(Steps(1, VOCAB, 3))
    assert queue.admit() == [] and core.scheduler.waiting.num_new == 2
    outputs = run(core)
    assert {output.request_id for output in outputs if output.finish_reason} == {"late", "a"}


@pytest.mark.parametrize("way_out", ["abort", "refusal"])
def test_a_place_that_was_kept_is_free_again(compiler, way_out):
    queue = GrammarQueue(make(max_queue=1), compiler)
    queue.add(request("late", structured_outputs=FORM))
    if way_out == "abort":
        queue.abort("late")
    else:
        compiler.futures[0].set_exception(ValueError("bad"))
        assert len(queue.admit()) == 1
    queue.add(request("next"))
    with pytest.raises(QueueFull):
        queue.add(request("one too many"))
