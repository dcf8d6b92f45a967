"""Orders of 4-bit codes: what goes in comes out, and ``arrange`` puts everything where the kernels read it."""

import pytest
import torch

from transect.ops.linear.packed.int4 import int4_packing


@pytest.mark.parametrize("group", [32, 64, 128])
def test_codes_come_back(group: int) -> None:
    codes = torch.randint(0, 16, (5, 4 * group), dtype=torch.uint8, generator=torch.Generator().manual_seed(group))
    packed = int4_packing.pack(codes, group)
    assert packed.shape == (5, 2 * group)
    assert torch.equal(int4_packing.unpack(packed, group), codes)


@pytest.mark.parametrize(("group", "k"), [(48, 192), (64, 192)])
def test_pack_refuses_other_groups_and_half_pairs(group: int, k: int) -> None:
    with pytest.raises(ValueError, match="multiple of twice"):
        int4_packing.pack(torch.zeros(1, k, dtype=torch.uint8), group)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_arranged_words_hold_what_a_lane_feeds_to_a_product(group: int) -> None:
    n, k = 40, 256
    generator = torch.Generator().manual_seed(group)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
    scale, zero = torch.randn(2, n, k // group, generator=generator).to(torch.bfloat16)
    weight = int4_packing.arrange(int4_packing.pack(codes, group), scale, zero)
    assert weight.shape == (2, 3, 256 + 16 * (128 // group))
    words = weight[..., :256].view(2, 3, 2, 32, 4)
    for chunk, block, half, lane, sixteen in ((0, 0, 0, 0, 0), (1, 1, 1, 31, 3), (0, 2, 1, 13, 1), (1, 0, 0, 22, 2)):
        word = int(words[chunk, block, half, lane, sixteen]) & 0xFFFFFFFF
        row, first = block * 16 + lane // 4, chunk * 128 + half * 64 + sixteen * 16 + lane % 4 * 2
        for i, (below, right) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
            for odd in (0, 1):
                want = int(codes[row + below, first + right + odd]) if row + below < n else 0
                assert word >> (4 * i + 16 * odd) & 15 == want
    both = weight[..., 256:].contiguous().view(torch.bfloat16).view(2, 3, 128 // group, 8, 2, 2)
    for row, at in ((3, 0), (11, 255), (37, 128)):
        held = both[at // 128, row // 16, at % 128 // group, row % 8, row % 16 // 8]
        assert torch.equal(held, torch.stack((scale[row, at // group], zero[row, at // group])))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_an_arranged_weight_can_be_taken_apart(group: int) -> None:
    generator = torch.Generator().manual_seed(group)
    codes = torch.randint(0, 16, (40, 512), dtype=torch.uint8, generator=generator)
    scale, zero = torch.randn(2, 40, 512 // group, generator=generator).to(torch.bfloat16)
    weight = int4_packing.arrange(int4_packing.pack(codes, group), scale, zero)
    assert int4_packing.group_of(weight) == group
    for got, want in zip(int4_packing.taken_apart(weight, 40), (codes, scale, zero), strict=True):
        assert torch.equal(got, want)


def test_arrange_needs_whole_tiles() -> None:
    packed = int4_packing.pack(torch.zeros(16, 192, dtype=torch.uint8), 32)
    with pytest.raises(ValueError, match="multiple of 128"):
        int4_packing.arrange(packed, torch.ones(16, 6), torch.ones(16, 6))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_an_arranged_weight_is_told_from_others(group: int) -> None:
    codes = torch.zeros(40, 256, dtype=torch.uint8)
    weight = int4_packing.arrange(int4_packing.pack(codes, group), *torch.ones(2, 40, 256 // group))
    assert int4_packing.is_arranged(weight, 40, 256)
    assert int4_packing.is_arranged(weight, 33, 256)  # rows are filled up to sixteens
    assert not int4_packing.is_arranged(weight, 32, 256)
    assert not int4_packing.is_arranged(weight, 40, 128)
    assert not int4_packing.is_arranged(weight[..., :-1], 40, 256)
    assert not int4_packing.is_arranged(weight.float(), 40, 256)
    assert not int4_packing.is_arranged(weight[0], 40, 256)
