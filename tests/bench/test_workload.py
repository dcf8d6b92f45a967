"""What is asked and when: draws from seeds, files, and the protocol that other engines publish figures for."""

import json
import math
import random
import statistics
from itertools import pairwise

import pytest

from transect.bench.lengths import Lengths
from transect.bench.levels import WorkSource, concurrency_levels, random_arrivals, rate_levels
from transect.bench.workload import random_work, read_conversations, throughput_protocol


def test_the_throughput_protocol_has_the_published_token_counts():
    work = throughput_protocol()
    assert len(work) == 256
    assert sum(len(each.prompt) for each in work) == 142_827
    assert sum(each.output_tokens for each in work) == 133_966
    assert max(max(each.prompt) for each in work) <= 10_000
    assert all(100 <= len(each.prompt) <= 1024 and 100 <= each.output_tokens <= 1024 for each in work)


@pytest.mark.parametrize("text", ["512", "uniform:100-1024", "lognormal:400,0.8,4096"])
def test_lengths_read_back_as_written(text):
    assert str(Lengths.parse(text)) == text


def test_lengths_are_distributed_as_they_say():
    rng = random.Random(1)
    uniform = [Lengths.parse("uniform:3-5").draw(rng) for _ in range(300)]
    assert set(uniform) == {3, 4, 5}
    lognormal = [Lengths.parse("lognormal:400,0.5,900").draw(rng) for _ in range(4000)]
    assert statistics.median(lognormal) == pytest.approx(400, rel=0.05)
    logs = [math.log(each) for each in lognormal if each < 400]
    assert statistics.quantiles(logs, n=100)[-1] < math.log(400) and max(lognormal) == 900


@pytest.mark.parametrize(
    "text", ["0", "x", "uniform:5", "uniform:9-3", "lognormal:0,1", "lognormal:5,-1", "normal:1,2"]
)
def test_lengths_that_are_none(text):
    with pytest.raises(ValueError, match="not a distribution of lengths: give a number"):
        Lengths.parse(text)


def test_poisson_arrivals():
    arrivals = random_arrivals(4000, 50.0, seed=3)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert arrivals[0] == 0 and statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.1)  # an exponential's deviation is its mean
    assert arrivals == random_arrivals(4000, 50.0, seed=3) != random_arrivals(4000, 50.0, seed=4)


def test_other_arrivals():
    assert random_arrivals(3, 4.0, burstiness=0.0) == [0, 0.25, 0.5]
    assert random_arrivals(3, math.inf) == [0, 0, 0]
    gaps = [later - earlier for earlier, later in pairwise(random_arrivals(4000, 1.0, burstiness=4.0))]
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(2, rel=0.1)
    for rate, burstiness in ((0.0, 1.0), (math.nan, 1.0), (1.0, -1.0)):
        with pytest.raises(ValueError, match="must be"):
            random_arrivals(1, rate, burstiness=burstiness)


def test_random_work_does_not_depend_on_its_count():
    lengths = Lengths.parse("uniform:1-9")
    few, many = (random_work(count, lengths, lengths, vocab=(5, 7), seed=1) for count in (3, 30))
    assert many[:3] == few
    assert {token for each in many for token in each.prompt} == {5, 6, 7}


def test_levels_have_prompts_of_their_own():
    source = WorkSource(Lengths.parse("8"), Lengths.parse("4"), seed=1)
    slow, fast = rate_levels(source, 10, [20.0, 2.0])
    assert (slow.value, fast.value) == (2.0, 20.0) and slow.work[-1].at > fast.work[-1].at
    (sixteen,) = concurrency_levels(source, 10, [16])
    assert len(sixteen.work) == 16
    prompts = [each.prompt for level in (slow, fast, sixteen) for each in level.work]
    assert len(set(prompts)) == len(prompts)


def test_conversations(tmp_path):
    file = tmp_path / "chats.json"
    chats = [
        {"conversations": [{"from": "human", "value": f"q{i}"}, {"from": "gpt", "value": "a" * 40}]} for i in range(3)
    ]
    chats.append({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "only a question"}]})
    file.write_text(json.dumps(chats))
    work = read_conversations(file, 5, seed=1)
    assert {each.prompt for each in work} == {"q0", "q1", "q2"} and {each.output_tokens for each in work} == {10}
    assert read_conversations(file, 2, output=Lengths.parse("7"))[0].output_tokens == 7
    file.write_text("[]")
    with pytest.raises(ValueError, match="no conversation"):
        read_conversations(file, 1)
