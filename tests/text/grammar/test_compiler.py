"""Compiling beside the steps: what comes again is kept, what takes too long is ended, and masks of many answers."""

import random
import signal
import time
import tracemalloc

import numpy as np
import pytest
from byte_grammar import SIZE, constraint, random_answer, vocabulary

from transect.text.grammar import checker as checking
from transect.text.grammar.checker import Checker, trial
from transect.text.grammar.compiler import GrammarCompiler
from transect.text.grammar.constraint import MaskFiller
from transect.text.grammar.fair_pool import LIGHT_S
from transect.text.grammar.params import StructuredOutputsParams
from transect.text.grammar.sources import grammar_of

ENDLESS = {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(8, 24)]}


def grammar(**form) -> str:
    return grammar_of(StructuredOutputsParams(**form))


@pytest.fixture(autouse=True)
def busy(monkeypatch):
    """However busy the machine is that runs these."""
    monkeypatch.setattr(checking, "BUSY", 60)


@pytest.fixture(scope="module")
def checker():
    checker = Checker(vocabulary())
    yield checker
    checker.close()


def test_a_grammar_that_takes_too_long_is_ended_and_the_next_one_is_checked(checker):
    assert checker.check(grammar(regex="a+")) is None
    first = checker._process.pid
    assert "takes longer than 1.25 s" in checker.check(grammar(json=ENDLESS))
    assert checker.check(grammar(json={"type": "integer"})) is None and checker._process.pid != first
    assert "the type strange" in checker.check(grammar(json={"type": "strange"})).lower()


def test_a_grammar_that_takes_too_much_memory_is_ended(checker):
    small = Checker(vocabulary(), seconds=30, nbytes=2**23)
    try:
        assert "takes more than 8 MiB" in small.check(grammar(json=ENDLESS))
    finally:
        small.close()


class Waits:
    """A matcher whose masks take 20 ms, in which it works or waits for a processor."""

    def __init__(self, clock):
        self.clock = clock

    def unsafe_compute_mask_ptr(self, pointer, nbytes):
        end = self.clock() + 0.02
        while self.clock() < end:
            time.sleep(0.001 * (self.clock is time.perf_counter))

    def is_error(self):
        return False

    def is_stopped(self):
        return True


def test_a_mask_is_slow_by_the_work_that_it_is_and_not_by_what_else_runs(monkeypatch):
    monkeypatch.setattr(checking, "SLOWEST_MASK_S", 0.01)
    assert "takes too long to see" in trial(Waits(time.thread_time), 1)
    assert trial(Waits(time.perf_counter), 1) is None


def test_a_grammar_is_not_refused_for_good_because_the_machine_was_busy(monkeypatch):
    compiler = GrammarCompiler(vocabulary)
    try:
        compiler._threads = 0  # no process beside the spare
        compiler.compile(StructuredOutputsParams(regex="a"))
        (checker,) = compiler._checkers._all
        monkeypatch.setattr(checking, "BUSY", 0.01)
        checker._process.send_signal(signal.SIGSTOP)
        with pytest.raises(ValueError, match="guided_regex cannot be used: the machine is too busy"):
            compiler.compile(StructuredOutputsParams(regex="b", field="guided_regex"))
        monkeypatch.undo()
        assert compiler.compile(StructuredOutputsParams(regex="b")).accept(ord("b")) is None
    finally:
        compiler.close()


def test_ebnf_is_translated_where_it_can_be_ended(checker):
    assert 'start: "x"' in checker.translate('root ::= "x"')
    with pytest.raises(ValueError, match="cannot be compiled"):
        checker.translate("root ::= (")
    many = "".join(f'a{n} ::= "x" a{n + 1}\n' for n in range(200_000))
    with pytest.raises(ValueError, match="takes longer than"):
        checker.translate(f"root ::= a0\n{many}")
    assert checker.translate('root ::= "y"')


def test_a_process_that_was_killed_is_started_again(checker):
    assert checker.check(grammar(regex="b")) is None
    checker._process.kill()
    checker._process.wait()
    assert checker.check(grammar(regex="c")) is None


def test_grammars_are_compiled_once_and_refusals_are_remembered():
    compiled = []
    compiler = GrammarCompiler(vocabulary, checked=False)
    inner = compiler._compile
    compiler._compile = lambda *arguments: compiled.append(arguments[0]) or inner(*arguments)
    for _ in range(2):
        one, two = (compiler.compile(StructuredOutputsParams(regex="ab")) for _ in range(2))
        assert one.accept(ord("a")) is None and two.accept(ord("b")) is not None, "each has its own state"
        with pytest.raises(ValueError, match="guided_regex cannot be used"):
            compiler.compile(StructuredOutputsParams(regex="(", field="guided_regex"))
    assert len(compiled) == 2


@pytest.mark.parametrize("checked", [True, False])
def test_compiled_grammars_are_kept_up_to_a_number_of_bytes(checked):
    compiler = GrammarCompiler(vocabulary, checked=checked, cache_bytes=400_000)
    try:
        for number in range(12):
            compiler.compile(StructuredOutputsParams(choice=[f"{number} {letter}" for letter in "abcdef"]))
            with pytest.raises(ValueError, match="cannot be used"):
                compiler.compile(StructuredOutputsParams(regex=f"{number}("))
            assert 0 < compiler.kept_bytes <= 400_000
        assert 4 < len(compiler._known) < 24
        assert sum(nbytes for _, nbytes in compiler._known.values()) == compiler.kept_bytes
    finally:
        compiler.close()


def test_a_refusal_keeps_no_text_of_the_grammar():
    """Hostile schemas fill no memory, and are not compiled again."""
    compiled, refused, size = [], 30, 100_000
    compiler = GrammarCompiler(vocabulary, checked=False)
    inner = compiler._compile
    compiler._compile = lambda *arguments: compiled.append(0) or inner(*arguments)

    def refuse_all():
        for number in range(refused):
            with pytest.raises(ValueError, match="it uses the rule nowhere"):
                compiler.compile(StructuredOutputsParams(grammar=f"start: nowhere // {number}{' ' * size}"))
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        compiler.compile(StructuredOutputsParams(regex="a"))
        before = tracemalloc.get_traced_memory()[0]
        kept = refuse_all() - before
        assert kept < refused * size / 10 and compiler.kept_bytes < refused * size / 10
        refuse_all()
        assert len(compiled) == 1 + refused
    finally:
        tracemalloc.stop()


def test_what_took_long_is_expected_to():
    """A text that was never seen is expected to take as long as others of its size."""
    compiler = GrammarCompiler(vocabulary, checked=False)
    short, long = (StructuredOutputsParams(json={"type": "object", "title": "x" * size}) for size in (1, 200_000))
    assert compiler._expect(short)[1] < LIGHT_S < compiler._expect(long)[1]
    compiler.submit(long).result(60)
    compiler._seconds[compiler._expect(short)[0]] = 3.0
    assert compiler._expect(long)[1] < LIGHT_S < compiler._expect(short)[1]
    unknown = StructuredOutputsParams(json={"type": "object", "x": {1, 2}})
    with pytest.raises(ValueError, match="is not a JSON Schema"):
        compiler.submit(unknown).result(60)
    compiler.close()


def test_compiling_in_a_thread():
    compiler = GrammarCompiler(vocabulary)
    try:
        futures = [compiler.submit(StructuredOutputsParams(choice=[str(n)])) for n in range(3)]
        bad = compiler.submit(StructuredOutputsParams(regex="("))
        assert [random_answer(each.result(60), random.Random(0)) for each in futures] == ["0", "1", "2"]
        with pytest.raises(ValueError, match="cannot be used"):
            bad.result(60)
    finally:
        compiler.close()


def test_masks_of_many_answers_are_those_of_each():
    forms = [{"regex": "[a-f]+"}, {"json": {"type": "integer"}}, {"choice": ["x", "y"]}, {"json_object": True}] * 3
    grammars = [constraint(**form) for form in forms]
    alone = np.zeros((len(grammars), -(-SIZE // 32)), np.int32)
    for each, words in zip(grammars, alone, strict=True):
        assert each.fill(words) is None
    for filler in (MaskFiller(), MaskFiller(alone_s=0.0)):  # one after another; by threads
        together = np.full_like(alone, -1)
        assert filler(grammars, together) == [None] * len(grammars)
        assert (together == alone).all()


@pytest.mark.parametrize("alone_s", [1.0, 0.0])
def test_a_grammar_that_has_failed_says_so_beside_others(alone_s):
    grammars = [constraint(choice=["x", "y"]) for _ in range(3)]
    assert "cannot go on" in grammars[1].accept(ord("q"))
    words = np.zeros((3, -(-SIZE // 32)), np.int32)
    problems = MaskFiller(alone_s)(grammars, words)
    assert problems[0] is None and problems[2] is None and "cannot go on under the grammar" in problems[1]
    assert words[0].any() and (words[2] == words[0]).all()


def test_forced_tokens():
    assert constraint(choice=["abc"]).forced() == list(b"abc")
    assert constraint(regex="a|b").forced() == []
