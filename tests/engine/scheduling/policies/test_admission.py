"""Bounds of the queue: bytes, predicted wait, and what one client may hold."""

import pytest
from msgspec import structs
from small_engine import make, recorded_batches, request

from transect.engine.scheduling.policies.admission import Admission, Claim, Ledger, Pace, QueueFull


def ledger(*claims):
    found = Ledger()
    for each in claims:
        found.add(each)
    return found


def test_bytes_are_bounded_and_one_client_has_half_of_them():
    admission = Admission(max_bytes=1000)
    waiting = ledger(Claim("a", 400, 1))
    admission.check(Claim("b", 400, 1), waiting, 1.0, 5.0)
    with pytest.raises(QueueFull, match="the most that one client may have; try again in 5 s") as full:
        admission.check(Claim("a", 200, 1), waiting, 1.0, 5.0)
    assert full.value.own
    waiting.add(Claim("b", 500, 1))
    with pytest.raises(QueueFull, match="2 requests with 0 MiB wait already") as full:
        admission.check(Claim("c", 200, 1), waiting, 1.0, 5.0)
    assert not full.value.own
    admission.check(Claim("c", 5000, 1), Ledger(), 0.0, 5.0)  # one alone always may


def test_ledgers_forget_clients_that_have_nothing():
    waiting = ledger(Claim("a", 3, 4), Claim("a", 1, 1))
    waiting.add(Claim("a", 3, 4), -1)
    assert waiting.of("a") == (1, 1, 1) and waiting.of("b") == (0, 0, 0)
    waiting.add(Claim("a", 1, 1), -1)
    assert not waiting.by_client and waiting == Ledger()


def test_the_wait_is_predicted_from_the_pace_and_the_place():
    admission = Admission(max_wait=10.0)
    for second in range(5):
        admission.pace.left(100, float(second), crowded=True)
    assert admission.pace.known == pytest.approx(100, rel=0.3)
    waiting = ledger(Claim("a", 1, 3000))
    with pytest.raises(QueueFull, match="would wait for about") as full:
        admission.check(Claim("b", 1, 1), waiting, 1.0, 1.0)
    assert not full.value.own and 10 < full.value.retry_after <= 60
    with pytest.raises(QueueFull) as full:
        admission.check(Claim("a", 1, 1), waiting, 1.0, 1.0)
    assert full.value.own
    admission.check(Claim("b", 1, 1), waiting, 0.1, 1.0)  # goes before the backlog of the other


def test_nothing_is_predicted_from_little_or_from_idle_time():
    pace = Pace()
    pace.left(100, 0.0, crowded=False)
    pace.left(100, 1000.0, crowded=True)
    pace.left(100, 1001.0, crowded=True)
    assert pace.known is None
    pace.left(100, 1003.0, crowded=True)
    assert pace.known == pytest.approx(66, rel=0.3)


def of(client, name, **options):
    return structs.replace(request(name, **options), client=client)


def test_the_scheduler_refuses_by_bytes():
    one = request("x").nbytes
    core = make(max_num_seqs=1, max_queue_bytes=4 * one)
    core.add(of("a", "runs"))
    core.step()
    core.add(of("a", "a1"))
    core.add(of("a", "a2"))
    with pytest.raises(QueueFull) as full:
        core.add(of("a", "a3"))
    assert full.value.own
    core.add(of("b", "b1"))
    core.add(of("b", "b2"))
    with pytest.raises(QueueFull) as full:
        core.add(of("c", "c1"))
    assert not full.value.own
    core.abort("a1")
    core.add(of("c", "c1"))
    recorded_batches(core)
    assert core.scheduler.waiting.new == Ledger()


def test_the_scheduler_refuses_by_the_predicted_wait_of_a_client_s_own_place():
    core = make(max_num_seqs=1, max_queue_wait=30.0)
    clock = core.scheduler.clock
    for number in range(30):
        core.add(of("a", f"a{number}", max_tokens=1))
    for _ in range(5):
        core.step()
        clock.advance(5.0)
    with pytest.raises(QueueFull) as full:
        core.add(of("a", "late", max_tokens=1))
    assert full.value.own and full.value.retry_after > 1
    core.add(of("b", "other", max_tokens=1))
    core.step()
    core.step()
    assert "other" not in core.scheduler.requests or core.scheduler.requests["other"].first_scheduled is not None
