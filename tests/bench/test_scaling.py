"""Floors and predictions of tensor parallelism, by hand."""

import pytest

from transect.bench.scaling import (
    Links,
    batch_rank_floor,
    exchange_seconds,
    predicted_batch,
    predicted_shares,
    predicted_stages,
    predicted_step,
    rank_floor,
)
from transect.costs.floors import Rates, step_floor
from transect.costs.model import Row
from transect.spec.shapes import PRESETS

RATES = Rates(4e12, 700e12)
LINKS = Links({1024: 4e-6, 2048: 6e-6})
LLAMA = PRESETS["llama-3.1-8b"]


def test_a_rank_has_its_share_of_the_work():
    rows = [Row(1, 100)] * 4
    whole, half = step_floor(LLAMA, rows, RATES), rank_floor(LLAMA, rows, RATES, 2)
    assert rank_floor(LLAMA, rows, RATES, 1) == whole
    assert half.flops == pytest.approx(whole.flops / 2)
    assert whole.bytes / 2 < half.bytes < 0.51 * whole.bytes  # inputs of products are on every rank
    with pytest.raises(ValueError, match="cannot be cut for 3"):
        rank_floor(LLAMA, rows, RATES, 3)


def test_sums_between_measured_sizes_and_on_more_ranks():
    assert LINKS.pair(8) == 4e-6 and LINKS.pair(1536) == pytest.approx(5e-6) and LINKS.pair(4096) == 12e-6
    assert LINKS.sum(1, 4096) == 0 and LINKS.sum(2, 1536) == pytest.approx(5e-6)
    assert LINKS.sum(4, 4096) == pytest.approx(3 * 6e-6)  # six messages of a quarter, where two ranks have two halves
    assert LINKS.gather(2, 2048) == pytest.approx(3e-6)


def test_a_step_is_its_floor_and_what_is_exchanged():
    rows = [Row(1, 100)]
    exchanged = exchange_seconds(LLAMA, 1, 1, 2, LINKS)
    assert exchanged == pytest.approx(65 * 2 * 4096 / 2048 * 6e-6 + 2 * 128256 / 2048 * 6e-6 / 2)
    assert predicted_step(LLAMA, rows, RATES, 1, LINKS, 0.9) == pytest.approx(
        step_floor(LLAMA, rows, RATES).seconds / 0.9
    )
    two = predicted_step(LLAMA, rows, RATES, 2, LINKS, 0.9)
    assert two == pytest.approx(rank_floor(LLAMA, rows, RATES, 2).seconds / 0.9 + exchanged)


def test_logits_that_are_read_where_they_lie_take_a_small_sum():
    shared = Links(LINKS.seconds, shared=True)
    hidden = 65 * 2 * 4096 / 2048 * 6e-6
    assert exchange_seconds(LLAMA, 1, 1, 2, shared) == pytest.approx(hidden + 2 * 4 * 1002 / 2048 * 6e-6)
    assert exchange_seconds(LLAMA, 1, 1, 1, shared) == 0


def test_stages_read_weights_for_each_part_of_the_sequences_and_shares_take_one_part():
    lengths = [(10, 3), (10, 3)]
    one = predicted_batch(LLAMA, lengths, RATES, 1, LINKS, 1.0)
    half = predicted_batch(LLAMA, lengths[:1], RATES, 1, LINKS, 0.5)
    assert predicted_shares(LLAMA, lengths, RATES, 2, 0.5) == pytest.approx(half)
    # Two sequences: every stage reads its half of the weights for each of them in turn, as one GPU does for one.
    prefill, decode = batch_rank_floor(LLAMA, lengths, RATES, 1)
    single = batch_rank_floor(LLAMA, lengths[:1], RATES, 1)[1]
    assert predicted_stages(LLAMA, lengths, RATES, 2, 1.0) == pytest.approx(prefill / 2 + single)
    assert one == pytest.approx(prefill + decode)


def test_a_batch_is_prefill_and_a_step_for_each_token():
    lengths = [(10, 3), (20, 2)]
    one = predicted_batch(LLAMA, lengths, RATES, 1, LINKS, 1.0)
    steps = [[Row(10, 10), Row(20, 20)], [Row(1, 11), Row(1, 21)], [Row(1, 12)]]
    assert one == pytest.approx(sum(step_floor(LLAMA, rows, RATES).seconds for rows in steps))
    two = predicted_batch(LLAMA, lengths, RATES, 2, LINKS, 1.0)
    parts = sum(rank_floor(LLAMA, rows, RATES, 2).seconds for rows in steps)
    sums = sum(exchange_seconds(LLAMA, tokens, drawn, 2, LINKS) for tokens, drawn in ((30, 16), (2, 2), (1, 1)))
    assert two == pytest.approx(parts + sums)
