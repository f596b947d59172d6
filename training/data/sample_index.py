# SPDX-License-Identifier: Apache-2.0
"""Find in which document of a shuffled stream each training sample starts.

The C++ builder in csrc/sample_index.cpp does this in one pass. If the extension was not compiled,
numpy does the same block by block. A test checks that the two agree.
"""

import ctypes

import numpy as np

BLOCK = 1 << 20  # documents that numpy handles at a time


def sample_index(
    lengths: np.ndarray,
    order: np.ndarray,
    first: int,
    step: int,
    count: int,
    library: ctypes.CDLL | None,
) -> np.ndarray:
    """Return int32 [count, 2]: place in `order` and offset of tokens first, first + step, ...

    `lengths` is int32 [documents of the file]; `order` int32, the documents in the order in which
    they are read. Every token asked for must lie in the stream. `library`: mpu.native.load()'s.
    """
    build = getattr(library, "weft_sample_index", None)
    if build is None:
        return _sample_index_numpy(lengths, order, first, step, count)
    lengths = np.require(lengths, np.int32, ["C", "A"])
    order = np.require(order, np.int32, ["C", "A"])
    places = np.empty((count, 2), np.int32)
    build.restype = ctypes.c_int64
    build.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 4 + [ctypes.c_void_p]
    found = build(
        lengths.ctypes.data, order.ctypes.data, len(order), first, step, count, places.ctypes.data
    )
    assert found == count, f"{found} of {count} samples lie in the stream"
    return places


def _sample_index_numpy(
    lengths: np.ndarray, order: np.ndarray, first: int, step: int, count: int
) -> np.ndarray:
    places = np.empty((count, 2), np.int32)
    begin = found = 0
    for block in range(0, len(order), BLOCK):
        ends = begin + np.cumsum(lengths[order[block : block + BLOCK]], dtype=np.int64)
        last = max(found, min(count, -(-(int(ends[-1]) - first) // step)))
        tokens = first + np.arange(found, last, dtype=np.int64) * step
        place = np.searchsorted(ends, tokens, side="right")
        starts = np.concatenate(([begin], ends[:-1]))
        places[found:last, 0] = block + place
        places[found:last, 1] = tokens - starts[place]
        begin, found = int(ends[-1]), last
    assert found == count, f"{found} of {count} samples lie in the stream"
    return places
