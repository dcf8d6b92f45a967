"""A request's bill adds up, and names what happened to it."""

import json

import msgspec
import pytest
from commands import run_here
from decision_logs import log_for
from small_engine import make, recorded_batches, request

from transect.explain.engine.bill import bill
from transect.explain.engine.log import build, load
from transect.explain.engine.work import StepWork


class Ticking:
    """A clock on which every look takes a moment, so that no piece is empty."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        self.time += 1.0
        return self.time


def run(requests, file=None, **limits):
    """The log of these requests on a small engine."""
    core = make(**limits)
    core.scheduler.clock = Ticking()
    core.decisions = log_for(core, file=file)
    for each in requests:
        core.add(each)
    recorded_batches(core)
    core.decisions.close()
    return build(core.decisions.ring.records())


def bills(log):
    work = StepWork.of(log.header, None)
    return {name: bill(log, name, work) for name in log.requests}


def test_the_parts_add_up_for_every_request():
    log = run([request(name, prompt=20, first=ord(name), max_tokens=6) for name in "abcdefgh"], num_blocks=24)
    for found in bills(log).values():
        for span in (found.ttft, found.decode):
            assert sum(span.parts.values()) == pytest.approx(span.seconds)
            assert span.seconds > 0
        assert found.output_tokens == 6 and found.finish_reason == "length"
        assert found.ttft.tokens >= 20


def test_who_waits_for_a_place_is_told_so():
    log = run([request(name, first=ord(name), max_tokens=8) for name in "ab"], max_num_seqs=1)
    parts = bills(log)["b"].ttft.parts
    assert max(parts, key=parts.get) == "queue: places"


def test_who_waits_for_blocks_is_told_so():
    log = run([request(name, prompt=12, first=ord(name), max_tokens=8) for name in "ab"], num_blocks=5)
    parts = bills(log)["b"].ttft.parts
    assert max(parts, key=parts.get) == "queue: kv"


def test_long_prompts_of_others_are_on_the_bill():
    log = run([request("a", prompt=4, max_tokens=3), request("b", prompt=40, first=9)], max_num_batched_tokens=16)
    parts = bills(log)["a"].ttft.parts
    assert parts["others"] > parts["compute"]  # 12 of the 16 tokens of its step


def test_what_preemption_costs_is_on_the_bill():
    log = run(
        [request(name, prompt=8, first=ord(name), max_tokens=16) for name in "ab"],
        num_blocks=7,
        enable_prefix_caching=False,
    )
    parts = bills(log)["b"].decode.parts
    assert parts["preempted"] > 0 and parts["recompute"] > 0


def continued(given, steps, **limits):
    """The logs of two engines, the first of which ends after some steps of a request; and the tokens that it gave."""
    clock, logs = Ticking(), []
    tokens = [[] for _ in range(given.params.n)]
    for begun in (False, True):
        core = make(**limits)
        core.scheduler.clock = clock
        core.decisions = log_for(core)
        core.add(request("other", prompt=30, first=9, max_tokens=12))
        known = None if not begun else tuple(tuple(each) if len(each) < MOST else None for each in tokens)
        core.add(msgspec.structs.replace(given, output_token_ids=known, arrival_time=clock.time if not begun else 2.5))
        for choice in core.scheduler.requests[given.request_id].choices:
            core.executor.begun[choice.seq_id] = tuple(choice.output_token_ids)
        count = 0
        while core.has_work and (begun or count < steps):
            count += 1
            for output in core.step():
                if output.request_id == given.request_id:
                    tokens[output.index] += output.new_token_ids
        logs.append(build(core.decisions.ring.records()))
    assert all(len(each) == MOST for each in tokens)
    return logs


MOST = 9


@pytest.mark.parametrize("steps", [1, 4, 6, 9])
def test_a_request_that_two_engines_had_has_one_bill(steps):
    first, second = continued(request("a", prompt=20, max_tokens=MOST), steps)
    work = StepWork.of(first.header, None)
    whole, alone, begun = (
        bill(second, "a", work, earlier=[(first, work)]),
        bill(second, "a", work),
        bill(first, "a", work),
    )
    assert (whole.engines, alone.engines, whole.output_tokens, whole.finish_reason) == (2, 1, MOST, "length")
    for found in (whole, alone):
        for span in (found.ttft, found.decode):
            assert span is None or sum(span.parts.values()) == pytest.approx(span.seconds)
    assert alone.ttft.parts["earlier"] > 0
    late = whole.ttft if begun.output_tokens == 0 else whole.decode
    assert late.parts["hand-over"] > 0 and "earlier" not in late.parts
    if begun.output_tokens:
        assert whole.ttft == begun.ttft and late.parts["recompute"] > 0
        assert whole.decode.tokens == begun.output_tokens - 1 + 20 + MOST - 1
    assert "in 2 engines one after another" in whole.lines()[0]


def test_a_choice_that_ended_in_the_first_engine_has_its_bill_there():
    params = {"n": 2, "max_tokens": MOST, "seed": 3}
    logs = continued(request("a", prompt=5, **params), 5)
    work = StepWork.of(logs[0].header, None)
    life = logs[1].life("a")
    life.added.known[1] = -1  # as if a stop string had ended it
    found = [bill(logs[1], "a", work, choice, [(logs[0], work)]) for choice in (0, 1)]
    assert [each.engines for each in found] == [2, 1]
    assert found[1] == bill(logs[0], "a", work, 1)


def test_the_command_reads_a_file(tmp_path):
    file = tmp_path / "log.bin"
    run([request("abc", max_tokens=3)], file=file)
    done = run_here("explain", "request", str(file), "abc")
    assert done.returncode == 0 and done.stdout.splitlines()[1].startswith("TTFT ")
    as_json = json.loads(run_here("explain", "request", str(file), "abc", "--json").stdout)
    assert sum(as_json["ttft"]["parts_ms"].values()) == pytest.approx(as_json["ttft"]["ms"])
    assert "no request 'zzz'" in run_here("explain", "request", str(file), "zzz").stderr
    assert "choices 0 to 0" in run_here("explain", "request", str(file), "abc", "--choice", "1").stderr
    assert "all the same" in run_here("explain", "replay", str(file)).stdout


def test_what_is_no_log_is_refused(tmp_path):
    for content in (b"", b"hello world, this is text", b"\x05\x00\x00\x00\x01\x02\x03\x04\x05"):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(ValueError, match="not a decision log"):
            load(tmp_path / "x")
    assert "cannot be read" in run_here("explain", "replay", str(tmp_path / "none")).stderr


def test_a_torn_end_is_left_out(tmp_path):
    file = tmp_path / "log.bin"
    whole = run([request("abc", max_tokens=3)], file=file)
    file.write_bytes(file.read_bytes()[:-3])
    assert len(load(file).events) == len(whole.events) - 1


def test_drafts_are_on_the_bill_and_no_rejected_one_counts_as_lost():
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3, "adaptive": False}
    log = run([request("a", max_tokens=50)], max_num_seqs=8, speculation=drafts)
    (found,) = bills(log).values()
    assert found.drafted_tokens > found.accepted_tokens > 0
    assert found.output_tokens == 50 and found.decode.tokens == 49 + found.drafted_tokens - found.accepted_tokens
    assert not {"preempted", "recompute"} & set(found.decode.parts)
    assert f"drafts: {found.drafted_tokens} tokens, {found.accepted_tokens} of them accepted" in found.lines()[-1]
