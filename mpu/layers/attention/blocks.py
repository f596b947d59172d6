# SPDX-License-Identifier: Apache-2.0
"""Which keys a query looks at, as a list of rectangles: there is no mask.

    two documents,    a window of 3     queries 2 and 3,
    of 2 and 3                          keys 0 to 3

    l . . . .         l . . . . .       a a l .          queries down, keys to the right
    l l . . .         l l . . . .       a a l l          a    in a block of part "all"
    . . l . .         l l l . . .                        l    "tril"
    . . l l .         . u u l . .                        u    "triu"
    . . l l l         . . u l l .                        .    not looked at
                      . . . l l l
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

Part = Literal["all", "tril", "triu"]


class Block(NamedTuple):
    """Queries that look at keys, by position.

    part: of the rectangle, as torch names it. "all": each query looks at each key. "tril": a
    square, in which query i looks at keys 0 to i (causal). "triu": a square, in which query i
    looks at keys i to the last.
    """

    q: range
    kv: range
    part: Part


@lru_cache(maxsize=32)
def blocks(queries: range, documents: tuple[int, ...], window: int = 0) -> tuple[Block, ...]:
    """Return what queries look at: each allowed pair of query and key is in one block, no other.

    queries: positions, one after another; for several ranges call it several times. documents:
    lengths, the first begins at position 0. window: a query looks at itself and the window - 1
    tokens before it; 0: at all before it. A query's first block is its "tril": it looks at itself
    there, so no row of a block is empty. A kernel need know whole rectangles and squares alone.
    """
    found, begin = list[Block](), 0
    for length in documents:
        found += document_blocks(queries, begin, length, window)
        begin += length
    return tuple(found)


def document_blocks(queries: range, begin: int, length: int, window: int) -> Iterator[Block]:
    """Yield the blocks of the queries in one document, which begins at position `begin`."""
    last = min(begin + length, queries.stop)
    # cut in steps of the window from where the document begins: then a window that begins
    # before its part begins inside the document, and each "triu" is a whole triangle
    step = window or length
    cuts = [*range(begin + max(0, queries.start - begin) // step * step, last, step), last]
    for first, end in pairwise(cuts):
        first = max(first, queries.start)
        if first >= end:
            continue
        yield Block(range(first, end), range(first, end), "tril")
        seen = max(begin, end - window) if window else begin  # by all queries of this part
        if seen < first:
            yield Block(range(first, end), range(seen, first), "all")
        if window and first - begin >= window and end - first > 1:
            yield Block(range(first, end - 1), range(first - window + 1, seen), "triu")
