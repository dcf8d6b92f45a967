"""An exception of a step, Ctrl-C among them: the engine takes the steps in flight back, and goes on."""

import contextlib
import signal

import msgspec
import pytest
from grammar_fakes import Steps
from kv_checker import VOCAB, Broken
from small_engine import make, recorded_batches, request, tokens_of
from tiny_llm import save_tiny_llm

from transect import LLM, SamplingParams
from transect.engine.executors.gpu.runner import GPURunner
from transect.engine.executors.runner import Runner
from transect.engine.scheduling.clock import VirtualClock
from transect.engine.scheduling.core import EngineCore
from transect.explain.engine.log import build
from transect.explain.engine.replay import replay

PROMPTS = [[5, 6, 7], list(range(40, 90)), [1], [9] * 33, list(range(100, 117))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PLACES = ("submit", "submitted", "draw", "result")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(directory)
    return directory


def make_llm(tiny, lag=False, **settings):
    settings = {"dtype": "float32", "native": False, "num_kv_blocks": 96, "threads": 1, "max_num_seqs": 16} | settings
    return LLM(str(tiny), async_scheduling=lag, **settings)


def tokens(results):
    return [[choice.token_ids for choice in result.outputs] for result in results]


class Failing:
    """An executor whose third step fails. ``where``: "submit" before the step, "result" after it."""

    def __init__(self, inner, where, fail):
        self.inner, self.where, self.fail, self.steps = inner, where, fail, 0

    def submit(self, batch):
        self.steps += 1
        if self.steps == 3 and self.where == "submit":
            self.fail()
        handle = self.inner.submit(batch)
        return FailingHandle(handle, self.fail) if self.steps == 3 and self.where == "result" else handle


class FailingHandle:
    def __init__(self, inner, fail):
        self.draw, self.inner, self.fail = inner.draw, inner, fail

    def result(self):
        self.inner.result()
        self.fail()


def twice_ctrl_c():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def out_of_memory():
    raise MemoryError("no memory for step 3")


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("where", ["submit", "result"])
@pytest.mark.parametrize("fail, error", [(twice_ctrl_c, KeyboardInterrupt), (out_of_memory, MemoryError)])
def test_the_first_call_says_why_and_the_next_one_works(tiny, lag, where, fail, error):
    llm = make_llm(tiny, lag)
    expected = tokens(llm.generate(PROMPTS, GREEDY))
    llm._core.executor = Failing(llm._core.executor, where, fail)
    with pytest.raises(error):
        llm.generate(PROMPTS, GREEDY)
    assert llm._core.executor.steps <= 3 + lag, "it did not wait for another step"
    assert not llm.has_work and llm.stats().kv_blocks_used == 0
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("lag", [False, True])
def test_step_by_step_nothing_is_lost(tiny, lag):
    """Submitted requests stay, and get the tokens that they would have got."""
    llm = make_llm(tiny, lag)
    params = GREEDY.with_(bad_words_token_ids=tuple((token,) for token in range(0, 200, 3)), repetition_penalty=1.3)
    expected = tokens(llm.generate(PROMPTS, params))
    llm._core.executor = Failing(llm._core.executor, "result", out_of_memory)
    names = [llm.submit(prompt, params) for prompt in PROMPTS]
    found = {name: [] for name in names}
    errors = 0
    while llm.has_work:
        try:
            for output in llm.step():
                found[output.request_id] += output.new_token_ids
        except MemoryError:
            errors += 1
    assert errors == 1 and [[found[name]] for name in names] == expected


def test_ctrl_c_between_two_steps_loses_no_tokens(tiny):
    llm = make_llm(tiny)
    (expected,) = tokens(llm.generate([PROMPTS[0]], GREEDY))[0]
    name = llm.submit(PROMPTS[0], GREEDY)
    commit = llm._core.scheduler.commit

    def interrupted(batch, result):
        llm._core.scheduler.commit = commit
        twice_ctrl_c()  # not within the bookkeeping
        return commit(batch, result)

    llm._core.scheduler.commit = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    found = []
    while llm.has_work:
        found += [token for output in llm.step() if output.request_id == name for token in output.new_token_ids]
    assert found == expected


def grammar_request(name, seed=1, **params):
    return msgspec.structs.replace(request(name, **params), constraint=Steps(seed, VOCAB, 9))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("step", [1, 2, 5])
def test_grammars_and_choices_go_on_where_they_were(lag, where, step):
    def all_of(core):
        core.add(grammar_request("grammar", max_tokens=12))
        core.add(request("choices", n=2, first=3, max_tokens=9))
        return core

    _, undisturbed = recorded_batches(all_of(make(lag, max_num_seqs=8)))
    core = all_of(make(lag, max_num_seqs=8))
    planned = [Broken("once")]
    core.executor.breaks = lambda at, place: planned.pop() if planned and (at, place) == (step, where) else None
    outputs, failed = [], 0
    while core.has_work:
        try:
            outputs += core.step()
        except Broken:
            failed += 1
            assert core.stats().kv_blocks_used == 0
    assert failed == 1
    for name, index in (("grammar", 0), ("choices", 0), ("choices", 1)):
        assert tokens_of(outputs, name, index) == tokens_of(undisturbed, name, index) != []


def test_a_choice_that_is_half_changed_ends_with_the_cause():
    """The grammar's library raises after the token was taken: nobody knows in which state it is."""
    core = make()
    core.add(request("before", first=4))
    core.add(grammar_request("broken"))
    core.add(request("after", first=5, logprobs=0))
    outputs = core.step()
    grammar = core.scheduler.requests["broken"].leader.constraint

    def forced():
        raise OSError("the library is gone")

    grammar.forced = forced
    with pytest.raises(OSError, match="the library is gone"):
        core.step()
    while core.has_work:
        outputs += core.step()
    ends = {output.request_id: (output.finish_reason, output.error) for output in outputs if output.finish_reason}
    assert ends["broken"] == ("error", "a step of the engine failed: OSError: the library is gone")
    assert ends["before"] == ends["after"] == ("length", None)
    assert [len(tokens_of(outputs, name)) for name in ("before", "after")] == [4, 4]
    assert core.stats().kv_blocks_used == 0


def test_what_was_interrupted_while_it_was_taken_back_is_taken_back_by_the_next_call():
    core = make(lag=1)
    core.add(request("a"))
    core.executor.breaks = lambda step, where: Broken("planned") if (step, where) == (2, "submit") else None
    abandon, calls = core.executor.abandon, []

    def interrupted():
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt
        abandon()

    core.executor.abandon = interrupted
    core.step()  # two steps are planned: one ahead
    with pytest.raises(KeyboardInterrupt):
        while True:
            core.step()
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert len(tokens_of(outputs, "a")) == 4 and len(calls) == 2


def test_a_device_that_is_lost_says_so_beside_the_cause():
    core = make()
    core.add(request("a"))
    core.executor.breaks = lambda step, where: Broken("planned")

    def abandon():
        raise RuntimeError("no device")

    core.executor.abandon = abandon
    with pytest.raises(Broken, match="planned") as found:
        core.step()
    assert found.value.__notes__ == ["The device could not be brought to rest either: no device"]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_log_with_a_broken_step_is_run_again(lag):
    from transect.engine.scheduling.decisions import FORMAT, DecisionLog, Header, read_records

    core = make(lag)
    config = core.scheduler.config
    plain = {name: getattr(config, name) for name in config.__dataclass_fields__}
    written = []
    clock = VirtualClock()
    header = Header(FORMAT, plain, lag, 0.0)
    core.decisions = DecisionLog(core.scheduler, header, sink=written.append, now=clock.now)
    planned = [Broken("once")]
    core.executor.breaks = lambda step, where: planned.pop() if planned and (step, where) == (3, "result") else None
    core.add(request("a", prompt=30, max_tokens=8))
    core.add(request("b", first=3, max_tokens=9))
    while core.has_work:
        clock.advance(1.0)
        with contextlib.suppress(Broken):
            core.step()
    log = build(read_records(b"".join(written)))
    found = replay(log)
    assert found.difference is None and found.decisions > 8
    assert all(step.at is not None for step in log.steps)


def test_the_runners_forget_what_was_under_way():
    """What the engine calls after a failure is there in production too."""
    assert callable(Runner.abandon) and callable(GPURunner.abandon)


def test_ranks_of_several_processes_are_not_used_out_of_step():
    from transect.engine.leading import LeadingCore

    class Ranks:
        failure = None

        def check(self):
            pass

        def explain(self, error):
            return error

        @property
        def world(self):
            return self

        def announce(self, orders):
            pass

    core = make()
    core.executor.breaks = lambda step, where: Broken("planned")
    leading = LeadingCore(EngineCore(core.scheduler, core.executor), Ranks())
    leading.add(request("a"))
    with pytest.raises(Broken):
        leading.step()
    for again in (leading.step, lambda: leading.add(request("b"))):
        with pytest.raises(RuntimeError, match=r"was interrupted \(Broken\).*create another engine"):
            again()
