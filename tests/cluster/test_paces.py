"""Relative speeds of replicas from their step times."""

import random

from transect.cluster.paces import Paces


def steps_of(paces, replica, tokens, seconds):
    for each in tokens:
        paces.learn(replica, 20, 20 * each, 20 * seconds(each))


def test_a_replica_with_small_batches_is_not_a_slow_one():
    rng, paces = random.Random(1), Paces()
    for _ in range(10):
        steps_of(paces, "small", [rng.uniform(1, 2)], lambda tokens: 0.01 + 0.001 * tokens)
        steps_of(paces, "large", [rng.uniform(8, 60)], lambda tokens: 0.01 + 0.001 * tokens)
    assert paces.pace("small") == paces.pace("large") == 1.0


def test_a_slow_replica_is_found_whatever_its_work():
    rng, paces = random.Random(2), Paces()
    for _ in range(20):
        steps_of(paces, "fast", [rng.uniform(1, 40)], lambda tokens: 0.01 + 0.001 * tokens)
        steps_of(paces, "slow", [rng.uniform(1, 20)], lambda tokens: 3 * (0.01 + 0.001 * tokens))
    assert 2.3 < paces.pace("slow") / paces.pace("fast") < 3.7
    paces.forget("slow")
    assert paces.pace("slow") == 1.0 == paces.pace("fast")


def test_a_pace_needs_steps_and_a_constant_batch_is_enough():
    paces = Paces()
    paces.learn("new", 5, 5, 1.0)
    assert paces.pace("new") == paces.pace("never seen") == 1.0
    steps_of(paces, "a", [4, 4, 4], lambda tokens: 0.01)
    steps_of(paces, "b", [4, 4, 4], lambda tokens: 0.02)
    assert 1.5 < paces.pace("b") / paces.pace("a") < 2.5
