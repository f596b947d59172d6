# SPDX-License-Identifier: Apache-2.0
"""The functions behind addresses and waits: every element once, and nothing read without a wait.

The kernels compile these very functions (mpu/kernels/signals.py: compiled), so there is no second
formula to compare with; test_overlap_kernels.py runs them on the interpreter's integers.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpu.kernels.tiles import chunks_of_tile, tile_at, tile_count, tiles_of_chunk

sizes = st.integers(1, 70)
blocks = st.sampled_from([1, 3, 8, 16, 32])


@st.composite
def shapes(draw):
    world = draw(st.integers(1, 9))
    rank = draw(st.integers(0, world - 1))
    m, n, block_m, block_n = draw(st.tuples(sizes, sizes, blocks, blocks))
    return world, rank, m, n, block_m, block_n, draw(st.integers(1, 9))


def visits(shape, start, stride, owners=None):
    world, rank, m, n, block_m, block_n, group = shape
    for index in range(tile_count(owners or world, m, n, block_m, block_n)):
        yield tile_at(index, rank, start, stride, world, m, n, block_m, block_n, group)


@settings(deadline=None)
@given(shapes(), st.sampled_from([(0, 1), (1, 1), (-1, -1)]))
def test_every_element_is_computed_once(shape, order):
    world, _, m, n, block_m, block_n, _ = shape
    start, stride = (step % world for step in order)
    seen = Counter(visits(shape, start, stride))
    tops, lefts = range(0, m, block_m), range(0, n, block_n)
    want = {(r, i, j) for r in range(world) for i in range(len(tops)) for j in range(len(lefts))}
    assert set(seen) == want and set(seen.values()) == {1}


@settings(deadline=None)
@given(shapes())
def test_the_order_of_owners(shape):
    world, rank, *_ = shape

    def owners(start, stride, count):
        return list(dict.fromkeys(owner for owner, _, _ in visits(shape, start, stride, count)))

    assert owners(0, 1, world) == [(rank + s) % world for s in range(world)]
    assert owners(1, 1, world) == [(rank + s) % world for s in range(1, world + 1)]
    if world > 1:  # whom rows are pushed to: each gets them in the order it multiplies in
        pushed = owners(world - 1, world - 1, world - 1)
        assert pushed == [(rank - s) % world for s in range(1, world)]


@settings(deadline=None)
@given(shapes(), st.integers(1, 80))
def test_waits_cover_the_rows_read_and_no_chunk_more(shape, chunk_rows):
    _, _, m, _, block_m, _, _ = shape
    for tile in range(tile_count(1, m, 1, block_m, 1)):
        rows = range(tile * block_m, min((tile + 1) * block_m, m))
        assert set(range(*chunks_of_tile(tile, m, block_m, chunk_rows))) == {
            row // chunk_rows for row in rows
        }


@settings(deadline=None)
@given(shapes(), st.integers(1, 80))
def test_a_chunk_is_complete_with_its_last_tile(shape, chunk_rows):
    """Counting tiles_of_chunk tiles that touch a chunk says that all its rows are written."""
    _, _, m, _, block_m, _, _ = shape
    touching = Counter(
        chunk
        for tile in range(tile_count(1, m, 1, block_m, 1))
        for chunk in range(*chunks_of_tile(tile, m, block_m, chunk_rows))
    )
    assert set(touching) == set(range(-(-m // chunk_rows)))
    for chunk, count in touching.items():
        assert tiles_of_chunk(chunk, m, block_m, chunk_rows) == count


@pytest.mark.parametrize("group", [1, 2, 3])
def test_a_group_of_rows_passes_through_the_columns(group):
    got = [(i, j) for _, i, j in visits((1, 0, 48, 32, 16, 16, group), 0, 1)]
    tops = [range(top, min(top + group, 3)) for top in range(0, 3, group)]
    assert got == [(i, j) for rows in tops for j in range(2) for i in rows]
