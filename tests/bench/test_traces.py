"""Traces: recorded ones in the formats of others, generated ones, and the tokens that they stand for."""

import json
import statistics
from itertools import pairwise

import pytest

from transect.bench.lengths import Lengths
from transect.bench.levels import WorkSource, trace_level
from transect.bench.traces.asked import Asked, Piece, faster, rate_of, warped, work_of
from transect.bench.traces.json_lines import write_lines
from transect.bench.traces.mix import Mix
from transect.bench.traces.reading import read_trace

SHORT = {"prompt": Lengths.parse("uniform:5-9"), "output": Lengths.parse("uniform:2-4")}


def test_a_trace(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": 12.5, "output_tokens": 3, "prompt": "hello"},
        {"arrival_s": 10.0, "output_tokens": 2, "prompt_token_ids": [1, 2]},
        {"timestamp": 11000, "input_length": 4, "output_length": 5},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second, third = work_of(read_trace(file))
    assert (first.at, first.prompt, first.output_tokens) == (0.0, (1, 2), 2)
    assert (second.at, len(second.prompt), second.output_tokens) == (1.0, 4, 5)
    assert (third.at, third.prompt) == (2.5, "hello")
    level = trace_level(WorkSource(Lengths.parse("1"), None), file, speed=2.0, limit=2)
    assert [each.at for each in level.work] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"arrival_s": 1, "output_tokens": 1}', "line 1: 'prompt_tokens' is missing"),
        ('{"arrival_s": 1, "prompt_tokens": 0, "output_tokens": 1}', "lengths are whole numbers from 1 on, not 0"),
        ("{", "neither JSON nor JSON lines"),
        ("7", "expected a JSON object"),
        ("", "holds no request"),
    ],
)
def test_a_trace_that_is_none(tmp_path, text, words):
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_trace(file)


def test_azure(tmp_path):
    """Both years: time stamps with seven digits, and with a time zone."""
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:59.6805900,374,44\n2023-11-16 18:16:00.0951690,396,0\n"
    )
    first, second = read_trace(file)
    assert (first.at, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at == pytest.approx(0.414579) and second.output_tokens == 1
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n")
    assert read_trace(file)[0].prompt_tokens == 2162
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10,many,5\n")
    with pytest.raises(ValueError, match="line 2"):
        read_trace(file)


def test_mooncake_prompts_share_what_their_hashes_share(tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [0, 9]},
    ]
    (tmp_path / "mooncake.jsonl").write_text("\n".join(map(json.dumps, lines)))
    asked = read_trace(tmp_path / "mooncake.jsonl")
    assert asked[0].pieces == (Piece("0", 512), Piece("1", 512), Piece("2", 76)) and asked[1].at == 3.0
    first, second = (each.prompt for each in work_of(asked))
    assert (len(first), len(second)) == (1100, 600) and first[:512] == second[:512] and first[512:600] != second[512:]


def test_servegen_clients(tmp_path):
    """Rates, burstiness and lengths of each client; the busiest window is taken."""
    (tmp_path / "chunk-0-trace.csv").write_text("0,0,0,,0,0\n600,2.0,1.0,Gamma,1.0,0.5\n1200,0.1,1.0,Gamma,1.0,0.5\n")
    (tmp_path / "chunk-7-trace.csv").write_text("600,1.5,3.0,Weibull,0.5,0.1\n")
    lengths = {"0": {"input_tokens": "{}", "output_tokens": "{}"}}
    for client, size in ((0, 100), (7, 200)):
        known = lengths | {"600": {"input_tokens": f"{{{size}: 1.0}}", "output_tokens": "{5: 0.5, 6: 0.5}"}}
        (tmp_path / f"chunk-{client}-dataset.json").write_text(json.dumps(known))
    asked = read_trace(tmp_path)
    by_client = {name: [each for each in asked if each.client == name] for name in ("0", "7")}
    assert len(by_client["0"]) == pytest.approx(1200, rel=0.1) and len(by_client["7"]) == pytest.approx(900, rel=0.25)
    assert {each.prompt_tokens for each in by_client["7"]} == {200} and {each.output_tokens for each in asked} == {5, 6}
    assert _burstiness(by_client["7"]) > 2 * _burstiness(by_client["0"])
    assert read_trace(tmp_path) == asked != read_trace(tmp_path, seed=1)
    assert len(read_trace(tmp_path, start=1300)) < 120
    with pytest.raises(ValueError, match="ServeGen"):
        read_trace(tmp_path.parent / tmp_path.name / "..")


def test_a_load_log_again(tmp_path):
    row = {"load": 2.0, "due": 0.5, "input_tokens": 30, "output_tokens": 4}
    failed = {"load": 2.0, "due": 0.7, "input_tokens": 0, "output_tokens": 0}
    (tmp_path / "load.json").write_text(json.dumps({"requests": [row, row | {"due": 1.5}, failed]}, indent=1))
    assert [(each.at, each.prompt_tokens) for each in read_trace(tmp_path / "load.json")] == [(0.0, 30), (1.0, 30)]
    (tmp_path / "load.json").write_text(json.dumps({"requests": [row, row | {"load": 4.0}]}, indent=1))
    with pytest.raises(ValueError, match=r"the levels 2\.0, 4\.0"):
        read_trace(tmp_path / "load.json")


def test_a_later_start_and_another_speed(tmp_path):
    write_lines([Asked(at, 5, 2) for at in (0.0, 4.0, 6.0)], tmp_path / "own.jsonl")
    asked = read_trace(tmp_path / "own.jsonl", start=3.0)
    assert [each.at for each in asked] == [0.0, 2.0] and rate_of(asked) == 0.5
    assert [each.at for each in faster(asked, 4.0)] == [0.0, 0.5]
    for call, words in (
        (lambda: faster(asked, 0.0), "above 0"),
        (lambda: read_trace(tmp_path / "own.jsonl", start=9.0), "lower"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def _burstiness(asked):
    gaps = [later.at - earlier.at for earlier, later in pairwise(asked)]
    return statistics.variance(gaps) / statistics.mean(gaps) ** 2


def test_bursts_and_clients():
    even, poisson, bursts = (Mix(**SHORT, burstiness=each).generate(10.0, 3000) for each in (0.0, 1.0, 4.0))
    assert _burstiness(even) < 1e-9 and rate_of(even) == pytest.approx(10)
    assert _burstiness(poisson) == pytest.approx(1, rel=0.2) and _burstiness(bursts) == pytest.approx(4, rel=0.3)
    asked = Mix(**SHORT, clients=4).generate(10.0, 2000)
    counts = [sum(each.client == str(client) for each in asked) for client in range(4)]
    assert counts[0] == pytest.approx(2 * counts[1], rel=0.2) and counts == sorted(counts, reverse=True)
    assert rate_of(asked) == pytest.approx(10, rel=0.1)
    assert all(earlier.at <= later.at for earlier, later in pairwise(asked))


def test_conversations_hold_their_beginnings(tmp_path):
    mix = Mix(**SHORT, turns=3.0, think=2.0, system=16, systems=2, longest=90)
    asked = mix.generate(5.0, 800, seed=1)
    assert rate_of(asked) == pytest.approx(5, rel=0.25)
    assert {each.pieces[0] for each in asked} == {Piece("system 0", 16), Piece("system 1", 16)}
    later = [each for each in asked if len(each.pieces) > 2]
    assert len(later) == pytest.approx(800 * 2 / 3, rel=0.25)
    known = {each.answer: each for each in asked if each.answer}
    for each in later:
        before = known[each.pieces[-2].key]
        assert before.at < each.at and each.pieces[: len(before.pieces)] == before.pieces
        assert each.pieces[-2].tokens == before.output_tokens and each.prompt_tokens + each.output_tokens <= 90
    write_lines(asked, tmp_path / "mix.jsonl")
    again = read_trace(tmp_path / "mix.jsonl")
    assert [each.pieces for each in again] == [each.pieces for each in asked]
    with pytest.raises(ValueError, match="turns must be"):
        Mix(**SHORT, turns=0.5)


def test_a_rate_that_changes_over_the_day():
    asked = warped((Asked(float(n), 5, 2) for n in range(100)), [1.0, 0.0, 2.0], 10.0)
    at = [each.at for each in asked]
    assert at == [*map(float, range(10)), *(20 + n / 2 for n in range(20))]
