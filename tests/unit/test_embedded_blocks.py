"""The KV cache's blocks: reference counts, the prefix index, eviction."""

from __future__ import annotations

import random

from soakrig.engine.embedded.blocks import BlockPool, chain

SIZE = 4


def take(pool: BlockPool, count: int) -> list[int]:
    blocks: list[int] = []
    for _ in range(count):
        block = pool.take(after=blocks[-1] if blocks else None)
        assert block is not None
        blocks.append(block)
    return blocks


def test_a_chain_differs_from_the_first_different_token_on() -> None:
    one = chain([1, 2, 3, 4, 5, 6, 7, 8, 9], SIZE)
    other = chain([1, 2, 3, 4, 5, 6, 7, 99, 9], SIZE)
    assert len(one) == 2
    assert one[0] == other[0]
    assert one[1] != other[1]
    # The same block behind another prefix is another block.
    assert chain([9, 9, 9, 9, 5, 6, 7, 8], SIZE)[1] != one[1]
    assert chain([1, 2, 3, 4, 5, 6, 7, 8], SIZE, one[:1]) == one


def test_a_published_prefix_is_found_again_after_release() -> None:
    pool = BlockPool(8)
    digests = chain(list(range(12)), SIZE)
    blocks = take(pool, 3)
    for block, digest in zip(blocks, digests, strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    assert pool.available == 8
    assert pool.usage == 0.0
    assert pool.match(digests[:2]) == blocks[:2]
    assert pool.available == 6


def test_a_shared_block_stays_until_its_last_holder_is_gone() -> None:
    pool = BlockPool(2)
    digest = chain(list(range(4)), SIZE)
    held = take(pool, 1)
    pool.publish(held[0], digest[0])
    assert pool.match(digest) == held
    pool.release(held)
    assert pool.take() is not None
    assert pool.take() is None
    pool.release(held)
    assert pool.take() == held[0]


def test_eviction_takes_free_blocks_then_the_least_recently_used_tail_first() -> None:
    pool = BlockPool(4)
    digests = chain(list(range(12)), SIZE)
    blocks = take(pool, 3)
    for block, digest in zip(blocks, digests, strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    assert take(pool, 1) == [3]
    assert pool.take() == blocks[2]
    assert pool.match(digests) == blocks[:2]


def test_an_evicted_block_is_no_longer_found() -> None:
    pool = BlockPool(1)
    digest = chain(list(range(4)), SIZE)
    blocks = take(pool, 1)
    pool.publish(blocks[0], digest[0])
    pool.release(blocks)
    assert pool.take() == blocks[0]
    assert pool.match(digest) == []


def test_without_prefix_cache_nothing_is_found() -> None:
    pool = BlockPool(2, prefix_cache=False)
    digest = chain(list(range(4)), SIZE)
    blocks = take(pool, 1)
    pool.publish(blocks[0], digest[0])
    pool.release(blocks)
    assert pool.match(digest) == []


def test_blocks_lie_side_by_side_where_they_can() -> None:
    pool = BlockPool(8)
    first, second = take(pool, 2), take(pool, 2)
    assert first == [0, 1]
    assert second == [2, 3]
    pool.release(first)
    assert take(pool, 3) == [4, 5, 6]
    # Block 7 is the next free one; 1 is the one behind.
    assert pool.take(after=0) == 1


def test_no_block_has_two_owners_under_random_use() -> None:
    rng = random.Random(3)
    pool = BlockPool(16)
    owners: list[list[int]] = []
    texts = [[rng.randrange(3) for _ in range(16)] for _ in range(12)]
    for _ in range(3000):
        if owners and rng.random() < 0.5:
            pool.release(owners.pop(rng.randrange(len(owners))))
            continue
        digests = chain(rng.choice(texts), SIZE)
        blocks = pool.match(digests)
        shared = len(blocks)
        while len(blocks) < 4 and (block := pool.take(after=blocks[-1] if blocks else None)) is not None:
            # A new block is nobody's: neither another owner's nor matched just now.
            assert all(block not in owner for owner in owners)
            assert block not in blocks
            blocks.append(block)
        for number in range(shared, len(blocks)):
            pool.publish(blocks[number], digests[number])
        owners.append(blocks)
        assert pool.available == 16 - len({block for owner in owners for block in owner})
    for owner in owners:
        pool.release(owner)
    assert pool.available == 16
