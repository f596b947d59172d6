# SPDX-License-Identifier: Apache-2.0
"""Which keys a query looks at, as a list of rectangles: there is no mask.

    one document      two documents     a window of 3
    \\                 \\                 \\              \\  a block of part "tril"
    # \\               # \\               # \\            #  a block of part "all"
    # # \\                 \\             - # \\          -  a block of part "triu"
    # # # \\               # \\               - # \\
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

    queries: positions of those that a rank has, one after another. documents: lengths, the first
    begins at position 0. window: a query looks at itself and the window - 1 tokens before it; 0:
    at all before it. A query's first block is its "tril": it looks at itself there, so no row of
    a block is empty. Squares and whole rectangles are all that a kernel need know.
    """
    return tuple(_blocks(queries, documents, window))


def _blocks(queries: range, documents: tuple[int, ...], window: int) -> Iterator[Block]:
    begin = 0
    for length in documents:
        last = min(begin + length, queries.stop)
        # parts of a window's length, cut from where the document begins: the first part sees all
        # before it, each other one ends where the window of its last query begins a new part
        cuts = [*range(begin, last, window or length), last]
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
        begin += length
