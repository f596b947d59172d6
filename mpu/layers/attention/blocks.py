# SPDX-License-Identifier: Apache-2.0
"""Which keys a query attends to, as a list of rectangles instead of a mask.

    two documents,    a window of 3     queries 2 and 3,
    of 2 and 3                          keys 0 to 3

    l . . . .         l . . . . .       a a l .          queries down, keys to the right
    l l . . .         l l . . . .       a a l l          a    in a block of part "all"
    . . l . .         l l l . . .                        l    "tril"
    . . l l .         . u u l . .                        u    "triu"
    . . l l l         . . u l l .                        .    not attended to
                      . . . l l l
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

Part = Literal["all", "tril", "triu"]


class Block(NamedTuple):
    """Queries that attend to keys, by position.

    part: the part of the rectangle, in torch's terms. "all": each query attends to each key.
    "tril": a square, in which query i attends to keys 0 to i (causal). "triu": a square, in which
    query i attends to keys i to the last.
    """

    q: range
    kv: range
    part: Part


@lru_cache(maxsize=32)
def blocks(queries: range, documents: tuple[int, ...], window: int = 0) -> tuple[Block, ...]:
    """Return the blocks of the queries: each allowed pair of query and key is in exactly one.

    queries: consecutive positions; for several ranges call it several times. documents: lengths,
    the first begins at position 0. window: a query attends to itself and the window - 1 tokens
    before it; 0: to all tokens before it. A query's first block is its "tril", in which it attends
    to itself, so no row of a block is empty. A kernel only has to support whole rectangles and
    squares.
    """
    found, begin = list[Block](), 0
    for length in documents:
        found += document_blocks(queries, begin, length, window)
        begin += length
    return tuple(found)


def document_blocks(queries: range, begin: int, length: int, window: int) -> Iterator[Block]:
    """Yield the blocks of the queries in one document, which begins at position `begin`."""
    last = min(begin + length, queries.stop)
    # cut in steps of the window from the start of the document: then a window that begins
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
