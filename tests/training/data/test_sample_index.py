# SPDX-License-Identifier: Apache-2.0
"""Three ways to cut a stream must agree: C++, numpy, and a walk token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpu import native
from training.data import sample_index as module
from training.data.sample_index import sample_index


def walk(lengths, order, first, step, count):
    """List the place of every token, then pick."""
    places = [
        (p, offset) for p, document in enumerate(order) for offset in range(lengths[document])
    ]
    return places[first : first + (count - 1) * step + 1 : step][:count]


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    step=st.integers(1, 20),
    first=st.integers(0, 10),
    block=st.integers(1, 6),
    data=st.data(),
)
def test_builders_agree_with_a_walk(lengths, step, first, block, data):
    order = data.draw(st.permutations(range(len(lengths))))
    count = max(0, -(-(sum(lengths) - first) // step))
    expected = walk(lengths, order, first, step, count)
    arrays = np.array(lengths, np.int32), np.array(order, np.int32)
    default, module.BLOCK = module.BLOCK, block
    try:
        assert list(map(tuple, sample_index(*arrays, first, step, count, None))) == expected
    finally:
        module.BLOCK = default
    library = native.load()
    if library is not None:
        assert list(map(tuple, sample_index(*arrays, first, step, count, library))) == expected


def test_compiled_and_numpy_agree_on_many_documents():
    library = native.load()
    if library is None:
        pytest.skip(native.reason())
    rng = np.random.RandomState(0)
    lengths = rng.poisson(30, size=200_001).astype(np.int32)
    # the reader's arrays start at byte 34 of a file: not aligned
    raw = np.frombuffer(b"xx" + lengths.tobytes(), np.uint8)[2:].view(np.int32)
    order = rng.permutation(len(lengths)).astype(np.int32)
    count = (int(lengths.sum()) - 1) // 7
    compiled = sample_index(raw, order, 0, 7, count, library)
    assert np.array_equal(compiled, sample_index(raw, order, 0, 7, count, None))


@pytest.mark.parametrize("library", [None, native.load()], ids=["numpy", "compiled"])
def test_a_stream_too_short_is_our_own_bug(library):
    with pytest.raises(AssertionError, match="2 of 3 samples"):
        sample_index(np.array([5], np.int32), np.array([0], np.int32), 0, 3, 3, library)
