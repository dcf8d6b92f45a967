"""From engine outputs to updates: text, logprobs, ends. The engine is played by plain objects with its field names."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transect.text import output_processor
from transect.text.output_processor import OutputProcessor, Update, together
from transect.text.outputs import Logprob
from transect.text.stop import StopMatcher


@dataclass
class Position:
    token_id: int
    logprob: float
    rank: int = 1
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Step:
    new_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    index: int = 0
    request_id: str = "r"
    logprobs: list[Position] | None = None
    prompt_logprobs: list[Position | None] | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None


class TickingClock:
    """One second later each time it is asked."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        self.time += 1.0
        return self.time


@pytest.fixture
def processor(toy) -> OutputProcessor:
    return OutputProcessor(toy, TickingClock())


def spell(tokenizer, text: str) -> list[int]:
    """One token for each byte of an ASCII text."""
    by_byte = {tokenizer.token_bytes(token): token for token in range(3, 259)}
    return [by_byte[bytes([byte])] for byte in text.encode()]


def run(processor: OutputProcessor, steps: list[Step]) -> list[Update]:
    return [update for step in steps if (update := processor.process(step)) is not None]


def test_deltas_add_up_and_the_last_event_carries_the_whole(processor, toy):
    ids = spell(toy, "hello")
    processor.add("r", "say hello", [7, 8])
    updates = run(processor, [Step(ids[:2], num_cached_tokens=1), Step(ids[2:4]), Step([ids[4]], "length")])
    assert [update.text for update in updates] == ["he", "ll", "o"]
    assert [update.finish_reason for update in updates] == [None, None, "length"]
    assert not any(update.aborts for update in updates)
    final = updates[-1].final
    assert final is not None and final.finished
    assert (final.prompt, final.prompt_token_ids, final.num_cached_tokens) == ("say hello", [7, 8], 1)
    assert (final.outputs[0].text, final.outputs[0].token_ids) == ("hello", ids)
    assert final.outputs[0].logprobs is None and final.outputs[0].cumulative_logprob is None
    assert final.num_output_tokens == 5
    times = final.metrics
    assert (times.arrival_time, times.first_token_time, times.last_token_time, times.finished_time) == (
        101,
        102,
        104,
        105,
    )
    assert "r" not in processor and len(processor) == 0


def test_the_end_of_sequence_token_is_charged_for_but_not_shown(processor, toy):
    ids = [*spell(toy, "ok"), 2]
    for skip, include, text in [(True, False, "ok"), (False, False, "ok"), (False, True, "ok<|im_end|>")]:
        processor.add("r", None, [7], skip_special_tokens=skip, include_stop=include)
        update = run(processor, [Step(ids, "stop")])[-1]
        assert (update.text, update.token_ids, update.finish_reason, update.stop_reason) == (text, ids, "stop", None)


def test_a_stop_token_is_reported(processor, toy):
    ids = spell(toy, "ok.")
    processor.add("r", None, [7])
    update = run(processor, [Step(ids, "stop", stop_reason=ids[-1])])[-1]
    assert (update.text, update.token_ids, update.stop_reason) == ("ok", ids, ids[-1])


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_choice_and_aborts_it_in_the_engine(processor, toy, include):
    ids = spell(toy, "so END and more")
    processor.add("r", None, [7], stop=("END",), include_stop=include)
    first, second = run(processor, [Step(ids[:4]), Step(ids[4:8])])
    assert first.text == "so " and not first.finished
    assert second.text == ("END" if include else "")
    assert second.token_ids == ids[4:6], "the token that completes the stop string is the last"
    assert (second.finish_reason, second.stop_reason, second.aborts) == ("stop", "END", [("r", 0)])
    assert second.final is not None and second.final.outputs[0].token_ids == ids[:6]
    assert processor.process(Step(ids[8:10])) is None, "what the engine had under way comes late"


def test_no_abort_where_the_engine_has_ended_the_choice_itself(processor, toy):
    processor.add("r", None, [7], stop=("b",))
    update = run(processor, [Step(spell(toy, "abc"), "length")])[-1]
    assert (update.text, update.finish_reason, update.stop_reason, update.aborts) == ("a", "stop", "b", [])


def test_held_back_text_comes_out_at_the_end(processor, toy):
    processor.add("r", None, [7], stop=("END",))
    updates = run(processor, [Step(spell(toy, "the EN")), Step([2], "stop")])
    assert [update.text for update in updates] == ["the ", "EN"]


def test_an_unfinished_character_becomes_a_replacement_at_the_end(processor, toy):
    lead = next(token for token in range(toy.vocab_size) if toy.token_bytes(token) == b"\xe6")
    processor.add("r", None, [7])
    updates = run(processor, [Step([lead]), Step([lead], "length")])
    assert [update.text for update in updates] == ["", "\ufffd\ufffd"]


def test_stop_strings_are_ignored_until_min_tokens(processor, toy):
    ids = spell(toy, "a.b.c.d")
    processor.add("r", None, [7], stop=(".",), min_tokens=3)
    updates = run(processor, [Step([token]) for token in ids])
    final = updates[-1].final
    assert final is not None
    assert (final.outputs[0].text, final.outputs[0].token_ids) == ("a.b", ids[:4])
    assert [update.text for update in updates] == ["a", ".", "b", ""]


def test_min_tokens_within_one_step(processor, toy):
    processor.add("r", None, [7], stop=("aa",), min_tokens=2)
    update = run(processor, [Step(spell(toy, "aaaaa"))])[-1]
    assert (update.text, len(update.token_ids)) == ("aa", 4), "the text of the first two is not searched"


def test_logprobs_stay_beside_their_tokens(processor, toy):
    a, b, c = spell(toy, "abc")
    positions = [Position(a, -0.5, 2, ((b, -0.25), (a, -0.5))), Position(b, -1.0), Position(c, -2.0)]
    processor.add("r", None, [7], stop=("b",))
    update = run(processor, [Step([a, b, c], logprobs=positions)])[-1]
    assert update.token_ids == [a, b]
    assert update.logprobs is not None and [next(iter(entry)) for entry in update.logprobs] == [a, b]
    first = update.logprobs[0]
    assert [(token, entry.logprob, entry.rank, entry.decoded_token) for token, entry in first.items()] == [
        (a, -0.5, 2, "a"),
        (b, -0.25, 1, "b"),
    ]
    assert update.final is not None
    assert update.final.outputs[0].cumulative_logprob == -1.5
    assert update.final.outputs[0].logprobs == update.logprobs


def test_prompt_logprobs_come_once(processor, toy):
    a, b = spell(toy, "ab")
    processor.add("r", None, [a, b], n=2)
    run(processor, [Step([a], prompt_logprobs=[None, Position(b, -3.0, 9, ((a, -0.1),))]), Step([b], index=1)])
    snapshot = processor.snapshot("r")
    assert snapshot.prompt_logprobs is not None and snapshot.prompt_logprobs[0] is None
    second = snapshot.prompt_logprobs[1]
    assert second is not None and {token: entry.rank for token, entry in second.items()} == {b: 9, a: 1}


def test_choices_end_one_by_one_and_the_request_with_the_last(processor, toy):
    a, b = spell(toy, "ab")
    processor.add("r", None, [7], n=2)
    updates = run(processor, [Step([a], "length", 1), Step([b], None, 0), Step([a], None, 1), Step([], "abort", 0)])
    assert [(update.index, update.finish_reason) for update in updates] == [(1, "length"), (0, None), (0, "abort")]
    assert [update.final is not None for update in updates] == [False, False, True]
    final = updates[-1].final
    assert final is not None and [choice.text for choice in final.outputs] == ["b", "a"]
    assert [choice.finish_reason for choice in final.outputs] == ["abort", "length"]


def test_an_error_is_reported_with_its_words(processor, toy):
    processor.add("r", None, [7])
    update = run(processor, [Step([], "error", error="logits are not finite")])[-1]
    assert (update.finish_reason, update.error) == ("error", "logits are not finite")
    assert update.final is not None and update.final.outputs[0].error == "logits are not finite"


def test_finish_ends_what_still_runs(processor, toy):
    processor.add("r", None, [7], n=3, stop=("xyz",))
    run(processor, [Step(spell(toy, "wx"), index=0), Step([2], "stop", index=1)])
    updates = processor.finish("r", "error", "the engine is gone")
    assert [(update.index, update.text, update.finish_reason, update.error) for update in updates] == [
        (0, "x", "error", "the engine is gone"),
        (2, "", "error", "the engine is gone"),
    ]
    assert [update.aborts for update in updates] == [[("r", 0)], [("r", 2)]]
    assert updates[-1].final is not None and updates[-1].final.outputs[1].finish_reason == "stop"
    assert processor.finish("r") == []
    assert processor.process(Step([5])) is None


def test_a_snapshot_does_not_change_afterwards(processor, toy):
    a, b = spell(toy, "ab")
    processor.add("r", "p", [7])
    processor.process(Step([a], logprobs=[Position(a, -1.0)]))
    snapshot = processor.snapshot("r")
    processor.process(Step([b], logprobs=[Position(b, -1.0)]))
    choice = snapshot.outputs[0]
    assert (choice.text, choice.token_ids, len(choice.logprobs or [])) == ("a", [a], 1)
    assert not snapshot.finished and processor.request_ids == ["r"]


def test_mistakes_of_the_caller(processor):
    processor.add("r", None, [7])
    with pytest.raises(ValueError, match="'r' is already running"):
        processor.add("r", None, [7])
    with pytest.raises(ValueError, match="n must be at least 1"):
        processor.add("s", None, [7], n=0)
    with pytest.raises(ValueError, match="non-empty"):
        processor.add("s", None, [7], stop=("",))
    with pytest.raises(ValueError, match="'s' is not running"):
        processor.snapshot("s")
    assert processor.request_ids == ["r"]


@settings(max_examples=400)
@given(data=st.data())
def test_any_stream_gives_the_cut_of_its_whole_text_and_one_end(toy, data):
    """Random bytes as tokens, cut into steps at random, and late output after the end, as async scheduling sends."""
    letters = [*spell(toy, "ab."), 2, *(token for token in range(3, 259) if toy.token_bytes(token)[0] > 0xDF)]
    draw: Any = data.draw
    letter = st.sampled_from(letters)
    groups = [*draw(st.lists(st.lists(letter, max_size=4), max_size=8)), draw(st.lists(letter, min_size=1, max_size=4))]
    stops = draw(st.lists(st.text("ab.\ufffd", min_size=1, max_size=3), max_size=3))
    include, minimum = draw(st.booleans()), draw(st.integers(0, 6))
    ending = draw(st.sampled_from(["stop", "length"]))
    processor = OutputProcessor(toy, TickingClock())
    processor.add("r", None, [7], stop=tuple(stops), include_stop=include, min_tokens=minimum)

    steps = [Step(group, logprobs=[Position(token, -1.0) for token in group]) for group in groups]
    steps[-1].finish_reason = ending
    updates = run(processor, [*steps, Step([5, 5]), Step([5], "length")])

    taken = [token for update in updates for token in update.token_ids]
    text = "".join(update.text for update in updates)
    assert [update.finished for update in updates].count(True) == 1 and updates[-1].finished
    final = updates[-1].final
    assert final is not None
    choice = final.outputs[0]
    assert (choice.text, choice.token_ids) == (text, taken)
    assert choice.logprobs is not None and [next(iter(entry)) for entry in choice.logprobs] == taken
    assert choice.cumulative_logprob == -float(len(taken))

    everything = [token for step in steps for token in step.new_token_ids]
    shown = everything[:-1] if ending == "stop" and not include else everything
    whole = toy.decode(shown)
    free = len(whole if len(everything) <= minimum else free_text(toy, shown[:minimum]))
    matcher = StopMatcher(stops, include)
    emitted, stopped = matcher.push(whole[free:])
    assert text == whole[:free] + emitted + matcher.flush()
    assert choice.finish_reason == ("stop" if stopped else ending)
    assert choice.stop_reason == stopped
    if stopped is None:
        assert taken == everything
    else:
        assert updates[-1].aborts == ([] if len(updates) == len(steps) else [("r", 0)])


def free_text(tokenizer, ids: list[int]) -> str:
    """The text that these tokens complete, without what is still a part of a character."""
    from transect.text.detokenizer import IncrementalDetokenizer

    return IncrementalDetokenizer(tokenizer).push(ids)


def test_updates_that_wait_together_become_one():
    first = Update("r", 0, text="a", token_ids=[1], num_cached_tokens=4)
    second = Update("r", 0, text="b", token_ids=[2, 3], finish_reason="stop", stop_reason=9, aborts=[("r", 0)])
    other = Update("r", 1, text="x", token_ids=[5], logprobs=[{5: Logprob(-1.0)}])
    more = Update("r", 1, text="y", token_ids=[6], logprobs=[{6: Logprob(-2.0)}])
    error = RuntimeError("gone")
    merged = together([first, second, other, more, error])
    assert merged[0] == Update(
        "r", 0, "ab", [1, 2, 3], None, "stop", stop_reason=9, aborts=[("r", 0)], num_cached_tokens=4
    )
    assert (merged[1].text, merged[1].token_ids, len(merged[1].logprobs)) == ("xy", [5, 6], 2)
    assert merged[2] is error and len(merged) == 3
    assert [update.index for update in together([Update("r", 0), Update("r", 1), Update("r", 0)])] == [0, 1, 0]


def test_all_choices_and_prompts_of_a_request_share_one_automaton(toy, monkeypatch):
    built = []

    class Counted(output_processor.StopAutomaton):
        def __init__(self, stops=()):
            built.append(tuple(stops))
            super().__init__(stops)

    monkeypatch.setattr(output_processor, "StopAutomaton", Counted)
    processor = OutputProcessor(toy)
    for prompt in range(8):
        processor.add(f"r{prompt}", None, [1], n=128, stop=("END", "STOP"))
    assert built == [("END", "STOP")]
    processor.add("other", None, [1], stop=("else",))
    assert built == [("END", "STOP"), ("else",)]
    for name in processor.request_ids:
        processor.finish(name)
    gc.collect()
    processor.add("again", None, [1], stop=("END", "STOP"))
    assert len(built) == 3, "an automaton lives as long as the requests that use it"
