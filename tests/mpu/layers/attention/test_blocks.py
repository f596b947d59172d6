# SPDX-License-Identifier: Apache-2.0
"""The list of blocks covers each allowed pair of positions once, for any documents and windows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mpu.layers.attention.blocks import Block, blocks

LENGTHS = st.lists(st.integers(1, 12) | st.just(1), min_size=1, max_size=8).map(tuple)


def allowed(documents: tuple[int, ...], window: int) -> np.ndarray:
    """Return bool [s, s]: position i may look at position j."""
    ids = np.repeat(np.arange(len(documents)), documents)
    at = np.arange(len(ids))
    back = at[:, None] - at
    return (ids[:, None] == ids) & (back >= 0) & (back < (window or len(at)))


def covered(found: tuple[Block, ...], size: int) -> np.ndarray:
    """Return int [s, s]: how many blocks hold a pair."""
    count = np.zeros((size, size), int)
    for q, kv, part in found:
        whole = np.ones((len(q), len(kv)), int)
        drawn = {"all": whole, "tril": np.tril(whole), "triu": np.triu(whole)}[part]
        count[q.start : q.stop, kv.start : kv.stop] += drawn
    return count


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(0, 14), st.integers(0, 30), st.integers(1, 100))
def test_each_allowed_pair_is_in_one_block(documents, window, first, count):
    """For all queries, and for a range of them, which may begin and end inside documents."""
    size = sum(documents)
    first %= size
    queries = range(first, min(first + count, size))
    found = blocks(queries, documents, window)
    want = allowed(documents, window)
    want[: queries.start] = want[queries.stop :] = False
    assert (covered(found, size) == want).all()
    seen = set()
    for block in found:
        assert len(block.q) and len(block.kv)
        assert block.part == "all" or len(block.q) == len(block.kv), "a triangle that is no square"
        assert block.part == "tril" or seen.issuperset(block.q), "first a query looks at itself"
        assert block.part != "tril" or not seen & set(block.q)
        seen |= set(block.q)
