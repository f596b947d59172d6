# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a row each context-parallel rank holds, and which blocks of attention it does.

A late token of a document looks at more keys than an early one. So each document is cut into
2 cp equal chunks, and rank r holds chunks r and 2 cp - 1 - r: every rank has the same tokens and the
same work. (The head-tail, or zig-zag, order of Megatron's context parallelism.)

    one document of 8 tokens, cp 2        documents of 5 and 3, cp 2

    0 . . . . . . .                       1 . . . . . . .      queries down, keys to the right,
    0 0 . . . . . .                       0 0 . . . . . .      each with the rank that holds
    1 1 1 . . . . .                       1 1 1 . . . . .      the query
    1 1 1 1 . . . .                       1 1 1 1 . . . .
    1 1 1 1 1 . . .                       0 0 0 0 0 . . .
    1 1 1 1 1 1 . .                       . . . . . 0 . .
    0 0 0 0 0 0 0 .                       . . . . . 1 1 .
    0 0 0 0 0 0 0 0                       . . . . . 0 0 0

The n mod 2 cp tokens that a document's chunks leave over are its first ones, which have the least
work. Those of all documents together are dealt out, one a rank in each round, so a row needs no
padding. Everything here is arithmetic on positions: it serves the batch, attention, the plan and
the picture (tools/draw_attention.py).
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

from mpu.layers.attention_blocks import Block, document_blocks

Ranges = tuple[range, ...]


@lru_cache(maxsize=64)
def shards(cp: int, documents: tuple[int, ...]) -> tuple[Ranges, ...]:
    """Return, for each of cp ranks, the ranges of a row's positions that it holds, ascending.

    documents: lengths, which fill the row. Each rank holds 1 / cp of the tokens. Raises ValueError
    where the row does not divide by cp.
    """
    total = sum(documents)
    if total % cp:
        raise ValueError(
            f"a row of {total} tokens does not divide over {cp} context-parallel ranks"
        )
    held = [list[range]() for _ in range(cp)]
    over = list[tuple[int, int]]()  # (keys that it looks at, negative; position)
    begin = 0
    for length in documents:
        chunk, rest = divmod(length, 2 * cp)
        over += [(-1 - i, begin + i) for i in range(rest)]
        for rank in range(cp) if chunk else ():
            for number in (rank, 2 * cp - 1 - rank):
                first = begin + rest + number * chunk
                held[rank].append(range(first, first + chunk))
        begin += length
    over.sort()  # the most work first
    work = [0] * cp
    for first in range(0, len(over), cp):
        idlest = sorted(range(cp), key=work.__getitem__)
        for rank, (keys, position) in zip(idlest, over[first : first + cp], strict=True):
            work[rank] -= keys
            held[rank].append(range(position, position + 1))
    return tuple(joined(ranges) for ranges in held)


def joined(ranges: Sequence[range]) -> Ranges:
    """Return ranges in ascending order, those that touch as one."""
    found = list[range]()
    for each in sorted(ranges, key=lambda r: r.start):
        if found and found[-1].stop == each.start:
            found[-1] = range(found[-1].start, each.stop)
        else:
            found.append(each)
    return tuple(found)


@lru_cache(maxsize=64)
def documents_of_rows(lengths: tuple[int, ...], rows: int) -> tuple[tuple[int, ...], ...]:
    """Cut the documents of a micro-batch (PackedSeqParams.lengths) into those of each row.

    Raises ValueError where a row does not end with a document.
    """
    size, rest = divmod(sum(lengths), rows)
    every, row, filled = list[tuple[int, ...]](), list[int](), 0
    for length in lengths:
        row.append(length)
        filled += length
        if filled == size:
            every.append(tuple(row))
            row, filled = [], 0
    if rest or len(every) != rows:
        raise ValueError(f"{len(lengths)} packed documents do not fill {rows} equal rows")
    return tuple(every)


@lru_cache(maxsize=64)
def batch_shards(cp: int, rows: tuple[tuple[int, ...], ...]) -> tuple[Ranges, ...]:
    """Return `shards` of a micro-batch whose rows follow one another: each row cut for itself."""
    size, held = sum(rows[0]), [list[range]() for _ in range(cp)]
    for i, documents in enumerate(rows):
        for mine, ranges in zip(held, shards(cp, documents), strict=True):
            mine += [range(r.start + i * size, r.stop + i * size) for r in ranges]
    return tuple(tuple(ranges) for ranges in held)


def context_blocks(
    rank: int, cp: int, documents: tuple[int, ...], window: int = 0
) -> tuple[Block, ...]:
    """Return what a rank's queries look at, by position: see mpu/layers/attention_blocks.py.

    Over the ranks, each allowed pair of query and key is in one block.
    """
    return tuple(_blocks(shards(cp, documents)[rank], documents, window))


def _blocks(queries: Ranges, documents: tuple[int, ...], window: int) -> Iterator[Block]:
    begins = [0, *accumulate(documents)]
    number = 0
    for each in queries:  # ascending, as documents are
        while begins[number + 1] <= each.start:
            number += 1
        at = number
        while at < len(documents) and begins[at] < each.stop:
            yield from document_blocks(each, begins[at], documents[at], window)
            at += 1


def balance(cp: int, documents: tuple[int, ...], window: int = 0) -> float:
    """Return the pairs of query and key of the busiest rank over the mean of all: 1.0 is even."""
    work = [pairs(context_blocks(rank, cp, documents, window)) for rank in range(cp)]
    return max(work) * cp / sum(work)


def pairs(found: Sequence[Block]) -> int:
    """Return the pairs of query and key in blocks: attention's FLOPs over 4 a d."""
    count = 0
    for q, kv, part in found:
        n = len(q)
        count += n * len(kv) if part == "all" else n * (n + 1) // 2
    return count
