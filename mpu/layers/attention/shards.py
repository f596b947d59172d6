# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a row each context-parallel rank holds, and which attention blocks it computes.

A late token of a document attends to more keys than an early one. So each document is cut into
2 cp equal chunks, and rank r holds chunks r and 2 cp - 1 - r: every rank has the same number of
tokens and the same work. (The head-tail, or zig-zag, order of Megatron's context parallelism.)

    one document of 8 tokens, cp 2        documents of 5 and 3, cp 2

    0 . . . . . . .                       1 . . . . . . .      queries down, keys to the right,
    0 0 . . . . . .                       0 0 . . . . . .      each with the rank that holds
    1 1 1 . . . . .                       1 1 1 . . . . .      the query
    1 1 1 1 . . . .                       1 1 1 1 . . . .
    1 1 1 1 1 . . .                       0 0 0 0 0 . . .
    1 1 1 1 1 1 . .                       . . . . . 0 . .
    0 0 0 0 0 0 0 .                       . . . . . 1 1 .
    0 0 0 0 0 0 0 0                       . . . . . 0 0 0

The n mod 2 cp tokens that do not fill a document's chunks are its first ones, which have the least
work. The leftover tokens of all documents are dealt out, one per rank in each round, so a row needs
no padding; in short rows ranks then exchange some. Everything here is arithmetic on positions, used
by the batch, attention, the plan and the picture (benchmarks/draw_attention.py).
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from mpu.layers.attention.blocks import Block, document_blocks

Ranges = tuple[range, ...]
EVEN = 0.05  # accepted excess of the busiest rank's work, as a fraction of the mean


@lru_cache(maxsize=64)
def shards(cp: int, documents: tuple[int, ...]) -> tuple[Ranges, ...]:
    """Return, for each of cp ranks, the ranges of a row's positions that it holds, ascending.

    documents: lengths, which fill the row. Each rank holds 1 / cp of the tokens. Raises ValueError
    if the row is not divisible by cp.
    """
    total = sum(documents)
    if total % cp:
        raise ValueError(
            f"a row of {total} tokens does not divide over {cp} context-parallel ranks"
        )
    of_ranks = [list[range]() for _ in range(cp)]
    over = list[tuple[int, int]]()  # (minus the number of keys of a token, its position)
    begin = 0
    for length in documents:
        chunk, rest = divmod(length, 2 * cp)
        over += [(-1 - i, begin + i) for i in range(rest)]
        for rank in range(cp) if chunk else ():
            for number in (rank, 2 * cp - 1 - rank):
                first = begin + rest + number * chunk
                of_ranks[rank].append(range(first, first + chunk))
        begin += length
    over.sort()  # the most work first
    dealt, work = [list[tuple[int, int]]() for _ in range(cp)], [0] * cp
    for first in range(0, len(over), cp):
        idlest = sorted(range(cp), key=work.__getitem__)
        for rank, token in zip(idlest, over[first : first + cp], strict=True):
            work[rank] -= token[0]
            dealt[rank].append(token)
    enough = sum(work) + EVEN * sum(n * (n + 1) // 2 for n in documents)
    while max(work) * cp > enough and _exchange(dealt, work):
        pass
    for mine, tokens in zip(of_ranks, dealt, strict=True):
        mine += [range(position, position + 1) for _, position in tokens]
    return tuple(joined(ranges) for ranges in of_ranks)


def _exchange(dealt: list[list[tuple[int, int]]], work: list[int]) -> bool:
    """Swap a token of the busiest rank for a lighter one of another rank, so as to minimise the
    work of the busier of the two; return whether that reduces it.
    """
    busiest = work.index(max(work))
    best = (work[busiest], 0, 0, 0)  # work of the busier rank; the other rank; the tokens' indices
    for other, tokens in enumerate(dealt):
        for i, (mine, _) in enumerate(dealt[busiest]):
            for j, (theirs, _) in enumerate(tokens):
                less = theirs - mine  # the counts are negative
                best = min(best, (max(work[busiest] - less, work[other] + less), other, i, j))
    after, other, i, j = best
    if after == work[busiest]:
        return False
    a, b = dealt[busiest], dealt[other]
    less = b[j][0] - a[i][0]
    a[i], b[j] = b[j], a[i]
    work[busiest] -= less
    work[other] += less
    return True


def joined(ranges: Sequence[range]) -> Ranges:
    """Return ranges in ascending order, with adjacent ones merged."""
    found = list[range]()
    for each in sorted(ranges, key=lambda r: r.start):
        if found and found[-1].stop == each.start:
            found[-1] = range(found[-1].start, each.stop)
        else:
            found.append(each)
    return tuple(found)


@lru_cache(maxsize=64)
def documents_of_rows(lengths: tuple[int, ...], rows: int) -> tuple[tuple[int, ...], ...]:
    """Split the documents of a micro-batch (PackedSeqParams.lengths) by row.

    Raises ValueError if a document crosses the end of a row.
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
    """Return `shards` of a micro-batch of consecutive rows, each of which is cut separately."""
    size, of_ranks = sum(rows[0]), [list[range]() for _ in range(cp)]
    for i, documents in enumerate(rows):
        for own, ranges in zip(of_ranks, shards(cp, documents), strict=True):
            own += [range(r.start + i * size, r.stop + i * size) for r in ranges]
    return tuple(tuple(ranges) for ranges in of_ranks)


def context_blocks(
    rank: int, cp: int, documents: tuple[int, ...], window: int = 0
) -> tuple[Block, ...]:
    """Return the blocks of a rank's queries, by position: see mpu/layers/attention/blocks.py.

    Over all ranks, each allowed pair of query and key is in exactly one block.
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
    """Return the busiest rank's number of query-key pairs over the mean of all ranks; 1.0: even."""
    work = [pairs(context_blocks(rank, cp, documents, window)) for rank in range(cp)]
    return max(work) * cp / sum(work)


def pairs(found: Sequence[Block]) -> int:
    """Return the number of query-key pairs in blocks: attention's FLOPs over 4 a d."""
    count = 0
    for q, kv, part in found:
        n = len(q)
        count += n * len(kv) if part == "all" else n * (n + 1) // 2
    return count


@lru_cache(maxsize=64)
def halves(found: tuple[Block, ...]) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Divide blocks into two parts with about equally many pairs, in any order.

    A causal square with more than half of all pairs is cut into two half-size squares and a
    rectangle.
    """
    every, half = list[Block](), pairs(found) / 2
    for q, kv, part in found:
        n = len(q) // 2
        if part == "tril" and n and pairs([Block(q, kv, part)]) > half:
            every += [Block(q[:n], kv[:n], "tril"), Block(q[n:], kv[n:], "tril")]
            every.append(Block(q[n:], kv[:n], "all"))
        else:
            every.append(Block(q, kv, part))
    parts, work = (list[Block](), list[Block]()), [0, 0]
    for count, block in sorted(((pairs([b]), b) for b in every), key=lambda x: x[0], reverse=True):
        least = work.index(min(work))
        parts[least].append(block)
        work[least] += count
    return tuple(parts[0]), tuple(parts[1])


@lru_cache(maxsize=64)
def ring_blocks(
    rank: int, ranges: tuple[Ranges, ...], documents: tuple[int, ...], window: int = 0
) -> tuple[tuple[Block, ...], ...]:
    """Return the blocks of a rank's queries, separately for each rank that holds the keys.

    ranges: the positions of each rank, in the order of its memory. The blocks' ranges are indices
    into that memory. A rank's own blocks begin with every "tril", so process its own keys first.
    """
    found = sorted(_blocks(ranges[rank], documents, window), key=lambda block: block.part != "tril")
    return tuple(local_blocks(found, ranges[rank], keys) for keys in ranges)


class GatherBlocks(NamedTuple):
    """The blocks of a rank's queries, if all keys are in order of position.

    near: the "tril" blocks, by index into this rank's own keys. far: all other blocks, keys by
    position. pieces: `far` again, cut into cp equal ranges of the row's keys, by index into each.
    """

    near: tuple[Block, ...]
    far: tuple[Block, ...]
    pieces: tuple[tuple[Block, ...], ...]


@lru_cache(maxsize=64)
def gather_blocks(
    rank: int, ranges: tuple[Ranges, ...], documents: tuple[int, ...], window: int = 0
) -> GatherBlocks:
    """Return a rank's blocks. ranges, documents: see `ring_blocks`."""
    found, mine = tuple(_blocks(ranges[rank], documents, window)), ranges[rank]
    near = [block for block in found if block.part == "tril"]
    far = [block for block in found if block.part != "tril"]
    size, piece = sum(documents), sum(documents) // len(ranges)
    return GatherBlocks(
        local_blocks(near, mine, mine),
        local_blocks(far, mine, (range(size),)),
        tuple(local_blocks(far, mine, (range(i, i + piece),)) for i in range(0, size, piece)),
    )


def local_blocks(found: Sequence[Block], queries: Ranges, keys: Ranges) -> tuple[Block, ...]:
    """Return the parts of blocks whose keys are in `keys`, by index in memory, not by position.

    queries, keys: the positions in memory, in order. Each block's queries are in one range of
    `queries`. Whole rectangles that are adjacent in memory are merged.
    """
    places = _Places(queries), _Places(keys)
    local = list[Block]()
    for block in found:
        for q, kv, part in _within(block, places[1]):
            block = Block(places[0].of(q), places[1].of(kv), part)
            while local and (both := _as_one(local[-1], block)):
                local.pop()
                block = both
            local.append(block)
    return tuple(local)


class _Places:
    """Maps positions to indices in memory that holds some ranges of them, ascending."""

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self.stops = [each.stop for each in ranges]
        self.begins = [0, *accumulate(map(len, ranges))]

    def of(self, positions: range) -> range:
        number = bisect_right(self.stops, positions.start)
        first = self.begins[number] + positions.start - self.ranges[number].start
        return range(first, first + len(positions))

    def overlaps(self, positions: range) -> Iterator[range]:
        """Yield the parts of `positions` that are in memory."""
        number = bisect_right(self.stops, positions.start)
        while number < len(self.ranges) and self.ranges[number].start < positions.stop:
            each = self.ranges[number]
            yield range(max(each.start, positions.start), min(each.stop, positions.stop))
            number += 1


def _within(block: Block, places: _Places) -> Iterator[Block]:
    """Yield the parts of a block whose keys are in memory: again rectangles and squares."""
    q, kv, part = block
    for some in places.overlaps(kv):
        if part == "all" or some == kv:
            yield Block(q, some, part)
            continue
        assert part == "triu", "a rank holds the keys of its own queries"
        # queries before `inside` attend to all keys of `some`, those inside to its triangle
        inside = range(q.start + some.start - kv.start, q.start + some.stop - kv.start)
        if q.start < inside.start:
            yield Block(range(q.start, inside.start), some, "all")
        yield Block(inside, some, "triu")


def _as_one(a: Block, b: Block) -> Block | None:
    """Merge two adjacent whole rectangles into one; return None if they do not form one."""
    if (a.part, b.part) != ("all", "all"):
        return None
    if a.q == b.q and a.kv.stop == b.kv.start:
        return Block(a.q, range(a.kv.start, b.kv.stop), "all")
    if a.kv == b.kv and a.q.stop == b.q.start:
        return Block(range(a.q.start, b.q.stop), a.kv, "all")
    return None
