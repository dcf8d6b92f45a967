"""The block pool and the prefix cache by themselves."""

import pytest

from transect.engine.scheduling.kv_cache import ROOT_HASH, KVCache, chain_hash


def chain(*blocks: tuple[int, ...]) -> list[bytes]:
    hashes = [ROOT_HASH]
    for block in blocks:
        hashes.append(chain_hash(hashes[-1], block))
    return hashes[1:]


def take(cache: KVCache, number: int) -> list[int]:
    taken = [cache.allocate() for _ in range(number)]
    assert None not in taken
    return [block for block in taken if block is not None]


def test_blocks_are_handed_out_once_and_run_out():
    cache = KVCache(3)
    assert sorted(take(cache, 3)) == [0, 1, 2]
    assert cache.num_free == 0
    assert cache.allocate() is None
    cache.release([1])
    assert cache.allocate() == 1


def test_a_shared_block_is_free_after_its_last_release():
    cache = KVCache(1)
    (block,) = take(cache, 1)
    cache.share([block])
    cache.release([block])
    assert cache.num_free == 0
    assert cache.ref_count(block) == 1
    cache.release([block])
    assert cache.num_free == 1


def test_releasing_too_often_is_caught():
    cache = KVCache(1)
    blocks = take(cache, 1)
    cache.release(blocks)
    with pytest.raises(AssertionError, match="more often than taken"):
        cache.release(blocks)


def test_the_hash_depends_on_everything_before():
    assert chain((1, 2), (3, 4))[1] != chain((9, 2), (3, 4))[1]
    assert chain((1, 2), (3, 4))[1] != chain((3, 4))[0]
    assert chain((1, 2, 3, 4))[0] != chain((1, 2), (3, 4))[1]
    assert chain((1, 2), (3, 4)) == chain((1, 2), (3, 4))


def test_match_finds_the_longest_prefix_and_stops_at_the_first_gap():
    cache = KVCache(4)
    hashes = chain((1,), (2,), (3,))
    blocks = take(cache, 3)
    for block, key in zip(blocks, hashes, strict=True):
        cache.register(block, key)
    assert cache.match(hashes) == blocks
    assert cache.match(chain((1,), (2,), (4,))) == blocks[:2]
    assert cache.match(chain((5,), (2,), (3,))) == []


def test_contents_outlive_their_owner_until_the_block_is_taken():
    cache = KVCache(2)
    (key,) = chain((1,))
    blocks = take(cache, 1)
    cache.register(blocks[0], key)
    cache.release(blocks)
    assert cache.num_free == 2
    assert cache.num_cached == 1
    found = cache.match([key])
    assert found == blocks
    assert cache.count_unused(found) == 1
    cache.share(found)
    assert cache.num_free == 1
    assert cache.count_unused(found) == 0
    cache.release(found)
    take(cache, 2)
    assert cache.match([key]) == []


def test_the_block_unused_for_the_longest_time_goes_first_and_ends_of_prefixes_before_beginnings():
    cache = KVCache(4)
    old, new = chain((1,), (2,)), chain((3,), (4,))
    old_blocks, new_blocks = take(cache, 2), take(cache, 2)
    for block, key in zip(old_blocks + new_blocks, old + new, strict=True):
        cache.register(block, key)
    cache.release(old_blocks)
    cache.release(new_blocks)
    assert take(cache, 3) == [old_blocks[1], old_blocks[0], new_blocks[1]]
    assert cache.match(new) == new_blocks[:1]


def test_the_first_block_with_some_contents_keeps_the_name():
    cache = KVCache(2)
    (key,) = chain((1,))
    first, second = take(cache, 2)
    cache.register(first, key)
    cache.register(second, key)
    assert cache.match([key]) == [first]
    cache.release([first, second])
    assert cache.num_cached == 1


def test_forgotten_contents_are_not_found():
    cache = KVCache(1)
    (key,) = chain((1,))
    blocks = take(cache, 1)
    cache.register(blocks[0], key)
    cache.forget(blocks)
    cache.release(blocks)
    assert cache.match([key]) == []
    assert cache.num_cached == 0


def test_nothing_is_found_with_caching_off():
    cache = KVCache(1, enable_prefix_caching=False)
    (key,) = chain((1,))
    cache.register(take(cache, 1)[0], key)
    assert cache.match([key]) == []


def test_clear_forgets_contents_and_leaves_blocks_with_who_uses_them():
    cache = KVCache(4)
    used, free = cache.allocate(), cache.allocate()
    cache.register(used, b"a")
    cache.register(free, b"b")
    cache.release([free])
    cache.clear()
    assert cache.match([b"a"]) == cache.match([b"b"]) == []
    assert cache.num_cached == 0 and cache.num_free == 3 and cache.ref_count(used) == 1
    cache.release([used])
    assert cache.num_free == 4 and len({cache.allocate() for _ in range(4)}) == 4
