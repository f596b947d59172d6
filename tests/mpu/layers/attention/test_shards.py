# SPDX-License-Identifier: Apache-2.0
"""Ranks hold equal shares of a row, do equal work, and cover each allowed pair once."""

import random

import numpy as np
import pytest

from mpu.layers.attention import shards as context_shards
from mpu.layers.attention.shards import (
    balance,
    batch_shards,
    context_blocks,
    documents_of_rows,
    halves,
    pairs,
    shards,
)

SEED = 11


def documents(draw: random.Random, cp: int, tokens: int) -> tuple[int, ...]:
    """Return random lengths that fill a row of cp x tokens; some lists have one long document."""
    size = cp * tokens
    count = min(size, draw.choice([1, 2, 3, 5, 9, 17, 40]))
    low = draw.choice([1, 1 + size // 2, size - count]) if size > count else 1
    low = min(low, size - count + 1)
    cuts = sorted(draw.sample(range(low, size), count - 1)) if count > 1 else []
    lengths = [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    draw.shuffle(lengths)
    return tuple(lengths)


def lists(count: int, *tokens: int) -> list[tuple[int, tuple[int, ...]]]:
    draw = random.Random(SEED)
    cases = [(draw.choice([1, 2, 3, 4, 8, 16]), draw.choice(tokens)) for _ in range(count)]
    return [(cp, documents(draw, cp, each)) for cp, each in cases]


def allowed(documents: tuple[int, ...], window: int) -> np.ndarray:
    ids = np.repeat(np.arange(len(documents)), documents)
    at = np.arange(len(ids))
    back = at[:, None] - at
    return (ids[:, None] == ids) & (back >= 0) & (back < (window or len(at)))


def test_a_long_row_is_even_enough_as_it_is_dealt(monkeypatch):
    monkeypatch.setattr(context_shards, "_exchange", lambda *_: pytest.fail("exchanged"))
    assert shards.__wrapped__(2, (102,)) == (
        (range(1, 27), range(77, 102)),
        (range(0, 1), range(27, 77)),
    )


def check_cover(cp: int, lengths: tuple[int, ...], window: int) -> None:
    size = sum(lengths)
    holder = np.full(size, -1)
    for rank, ranges in enumerate(shards(cp, lengths)):
        assert sum(map(len, ranges)) == size // cp
        assert all(a.stop < b.start for a, b in zip(ranges, ranges[1:], strict=False))
        for each in ranges:
            assert (holder[each.start : each.stop] == -1).all()
            holder[each.start : each.stop] = rank
    count = np.zeros((size, size), int)
    for rank in range(cp):
        seen = set[int]()
        for q, kv, part in context_blocks(rank, cp, lengths, window):
            assert len(q) and len(kv)
            assert part == "all" or len(q) == len(kv), "a triangle that is no square"
            assert (part == "tril") != seen.issuperset(q), "first a query looks at itself"
            seen |= set(q)
            assert (holder[q.start : q.stop] == rank).all()
            whole = np.ones((len(q), len(kv)), int)
            drawn = {"all": whole, "tril": np.tril(whole), "triu": np.triu(whole)}[part]
            count[q.start : q.stop, kv.start : kv.stop] += drawn
    assert (count == allowed(lengths, window)).all()


@pytest.mark.parametrize("count", [150, pytest.param(400, marks=pytest.mark.prove)])
def test_each_token_has_a_rank_and_each_allowed_pair_a_block(count):
    draw = random.Random(SEED)
    for cp, lengths in lists(count, 1, 2, 3, 5, 8, 13):
        check_cover(cp, lengths, draw.choice([0, 0, 1, 3, 7]))


def drawn_pairs(found: tuple) -> list[tuple[int, int]]:
    return [
        (a, b)
        for q, kv, part in found
        for i, a in enumerate(q)
        for j, b in enumerate(kv)
        if part == "all" or (j <= i if part == "tril" else j >= i)
    ]


def test_halves_are_all_of_the_blocks_and_about_as_much_work():
    draw = random.Random(SEED)
    for cp, lengths in lists(100, 2, 5, 13):
        found = context_blocks(draw.randrange(cp), cp, lengths, draw.choice([0, 0, 4]))
        parts = halves(found)
        every = drawn_pairs(parts[0] + parts[1])
        assert len(every) == len({*every}) and {*every} == {*drawn_pairs(found)}
        largest = max(pairs([block]) for part in parts for block in part)
        assert abs(pairs(parts[0]) - pairs(parts[1])) <= largest
    whole = halves(context_blocks(0, 1, (64,)))  # one causal square
    assert [pairs(part) for part in whole] == [32 * 32, 32 * 33]


@pytest.mark.parametrize("cp", [4, 8, 16])
def test_one_document_is_even_and_head_to_tail(cp):
    assert balance(cp, (2 * cp * 96,)) == 1.0
    ends = [(each[0].start // 96, each[-1].start // 96) for each in shards(cp, (2 * cp * 96,))]
    middle = (cp - 1, cp)  # two chunks that touch: one range
    assert ends[:-1] == [(r, 2 * cp - 1 - r) for r in range(cp - 1)] and len(ends) == cp
    assert shards(cp, (2 * cp * 96,))[-1] == (range(middle[0] * 96, (middle[1] + 1) * 96),)
    assert balance(cp, (cp * 97,)) < 1.01  # a row that does not divide by 2 cp


def bound(cp: int, lengths: tuple[int, ...]) -> float:
    """Return a balance below which no way to give each rank m = s / cp tokens can come.

    Let w be the tokens' work in falling order. (1) Of the first (k - 1) cp + 1 tokens some rank has
    k. They are no less than the last k of these, and its other m - k no less than the m - k
    smallest of all. (2) The first i tokens are on j of the ranks, ceil(i / m) <= j <= i. These hold
    j m tokens: the first i, and others no less than the j m - i smallest of all; the busiest of the
    j has no less than their mean. (3) The busiest has no less than the mean of all.
    """
    work = sorted((i + 1 for n in lengths for i in range(n)), reverse=True)
    size, m = len(work), len(work) // cp
    first = np.concatenate([[0], np.cumsum(work)])
    last = first[size] - first[::-1]  # last[k]: the k smallest together
    found = [first[size] / cp]
    for k in range(1, m + 1):
        some = (k - 1) * cp + 1
        found.append(first[some] - first[some - k] + last[m - k])
    for i in range(1, cp + 1):
        found.append(min((first[i] + last[j * m - i]) / j for j in range(-(-i // m), i + 1)))
    return float(max(found) * cp / first[size])


@pytest.mark.parametrize("count", [50, pytest.param(400, marks=pytest.mark.prove)])
@pytest.mark.parametrize("cp", [4, 8, 16])
def test_documents_are_balanced(cp, count):
    """Within 1.25, or the best that can be: of every list. From 3 tokens a rank on 1.05 on average,
    from 8 on all within 1.25.
    """
    draw, found = random.Random(SEED + cp), []
    fewest = 3 if count >= 400 else 8  # the mean of a few lists varies
    for _ in range(count):
        tokens = draw.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64])
        lengths = documents(draw, cp, tokens)
        got = balance(cp, lengths)
        assert got <= 1.25 or (tokens < 8 and got <= bound(cp, lengths) + 1e-9), lengths
        found += [got] * (tokens >= fewest)
    assert np.mean(found) <= 1.05


def test_rows_follow_one_another():
    rows = documents_of_rows((5, 3, 8), 2)
    assert rows == ((5, 3), (8,))
    first, second = shards(2, (5, 3)), shards(2, (8,))
    for rank, ranges in enumerate(batch_shards(2, rows)):
        moved = tuple(range(r.start + 8, r.stop + 8) for r in second[rank])
        assert ranges == (*first[rank], *moved)
    with pytest.raises(ValueError, match="3 packed documents do not fill 2 equal rows"):
        documents_of_rows((5, 6, 5), 2)
    with pytest.raises(ValueError, match="a row of 9 tokens does not divide over 2"):
        shards(2, (5, 4))
