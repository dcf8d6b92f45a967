"""Philox against the published known answers, and the Gumbel noise made of it."""

import math

import numpy as np
import pytest
import torch

from transect.ops.lang import philox

KNOWN_ANSWERS = [  # counter, key, output: the test vectors published with Random123 for philox4x32-10
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter,key,expected", KNOWN_ANSWERS)
def test_known_answers_numpy_and_torch(counter, key, expected):
    as_numpy = philox.philox4x32(
        tuple(np.array([c], dtype=np.uint64) for c in counter), tuple(np.array([k], dtype=np.uint64) for k in key)
    )
    as_torch = philox.philox4x32(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(int(w[0]) for w in as_numpy) == expected
    assert tuple(int(w[0]) for w in as_torch) == expected


def test_torch_and_numpy_paths_agree_to_the_bit():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 200_000, (5, 333), generator=generator)
    seeds = [0, 1, -1, 2**64 - 1, 0x123456789ABCDEF0]
    choices, positions = [0, 1, 2, 127, 3], [0, 5, 4095, 2**20, 7]
    columns = ([s & philox.WORD for s in seeds], [(s >> 32) & philox.WORD for s in seeds], positions, choices)
    numpy_words = philox._words_numpy(columns, ids, philox.GROUP_STREAM)
    torch_words = philox._words_torch(columns, ids, philox.GROUP_STREAM)
    assert torch.equal(philox.random_words(seeds, choices, positions, ids, philox.GROUP_STREAM), numpy_words)
    assert torch.equal(numpy_words, torch_words)
    assert int(numpy_words.min()) >= 0 and int(numpy_words.max()) < 2**32


def test_first_word_of_each_lane_is_the_known_answer():
    words = philox.random_words([0], [0], [0], torch.tensor([[0, 1, 2, 3]]))
    assert words.tolist() == [list(KNOWN_ANSWERS[0][2])]


def test_each_part_of_the_key_matters_and_rows_are_independent():
    ids = torch.arange(64)[None]
    base = philox.random_words([7], [0], [3], ids)
    for changed in (([8], [0], [3]), ([7 + 2**32], [0], [3]), ([7], [1], [3]), ([7], [0], [4])):
        assert not torch.equal(base, philox.random_words(*changed, ids))
    assert not torch.equal(base, philox.random_words([7], [0], [3], ids, philox.GROUP_STREAM))
    together = philox.random_words([9, 7, 1], [4, 0, 2], [1, 3, 9], ids.expand(3, -1).contiguous())
    assert torch.equal(together[1], base[0])


def test_gumbel_has_the_mean_and_variance_of_the_distribution():
    noise = philox.gumbel([11] * 40, [0] * 40, list(range(40)), torch.arange(5000).expand(40, -1).contiguous())
    assert noise.dtype == torch.float64
    assert abs(float(noise.mean()) - 0.5772156649) < 0.01  # 200k draws: standard error 0.003
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.04
    assert bool(torch.isfinite(noise).all())


def test_extreme_words_stay_finite():
    for word in (0, 2**32 - 1):
        uniform = (word + 0.5) * 2.0**-32
        assert 0.0 < uniform < 1.0 and math.isfinite(-math.log(-math.log(uniform)))
