# SPDX-License-Identifier: Apache-2.0
"""The simulation by which --ddp-bucket-size auto chooses, held to timelines worked out by hand."""

import pytest

from mpu.zero.layout import ParamEntry, make_buckets
from training.plan.bucket_size import (
    Cost,
    Costs,
    Timeline,
    candidates,
    choose,
    exposed,
    exposed_gathers,
    exposed_sums,
    seconds_of,
)

K = 1024
ENTRIES = [ParamEntry(name, 4 * K) for name in "abcd"]  # backward finishes d first
TIME = Timeline(
    used={"a": 0.0, "b": 1.0, "c": 2.0, "d": 3.0},
    ready={"d": 1.0, "c": 2.0, "b": 3.0, "a": 4.0},
    forward=4.0,
    backward=4.0,
)
EACH = make_buckets(ENTRIES, 1, 1)  # a bucket a parameter
ONE = make_buckets(ENTRIES, 1 << 30, 1)


def cost(seconds: float, start: float = 0.0) -> Cost:
    """Of 4 K elements."""
    return Cost(start, seconds / (4 * K))


def test_sums_by_hand() -> None:
    assert [len(bucket.params) for bucket in EACH + ONE] == [1, 1, 1, 1, 4]
    # each takes as long as a layer's backward: the last one is exposed
    assert exposed_sums(EACH, TIME, [cost(1.0)], True) == pytest.approx(1.0)
    assert exposed_sums(EACH, TIME, [cost(0.25)], True) == pytest.approx(0.25)
    # twice as long: d leaves at 1, over at 3; c at 2 waits for it, until 3; over at 5; b is ready
    # at 4 then and waits until 5; over at 7; a is ready at 6 and waits until 7; over at 9; 9 - 4
    assert exposed_sums(EACH, TIME, [cost(2.0)], True) == pytest.approx(5.0)
    assert exposed_sums(ONE, TIME, [cost(2.0)], True) == pytest.approx(8.0)
    # after backward nothing is hidden, and each bucket has a start
    assert exposed_sums(EACH, TIME, [cost(1.0)], False) == pytest.approx(4.0)
    assert exposed_sums(EACH, TIME, [cost(1.0, 0.5)], False) == pytest.approx(6.0)
    assert exposed_sums(ONE, TIME, [cost(1.0, 0.5)], False) == pytest.approx(4.5)


def test_sums_of_two_collectives_by_hand() -> None:
    """The second begins when the next bucket leaves; the last one's when backward is over."""
    both = [cost(0.25), cost(0.25)]
    # d: 1 to 1.25, then from 2 on, behind c's first: 2.25 to 2.5 ... a: 4 to 4.25, and b's second
    # 4.25 to 4.5, a's second 4.5 to 4.75
    assert exposed_sums(EACH, TIME, both, True) == pytest.approx(0.75)
    assert exposed_sums(ONE, TIME, both, True) == pytest.approx(2.0)


def test_what_is_summed_over_another_axis_leaves_last() -> None:
    entries = [ENTRIES[0]._replace(axes=("tp",)), *ENTRIES[1:]]
    buckets = make_buckets(entries, 1, 1)
    assert [bucket.params[0][0] for bucket in buckets] == ["d", "c", "b", "a"]
    # b: 3 to 3.5; a, though ready at 4 as the others' last, leaves at 4
    assert exposed_sums(buckets, TIME, [cost(0.5)], True) == pytest.approx(0.5)
    assert exposed_sums(buckets[3:] + buckets[:3], TIME, [cost(0.5)], True) == pytest.approx(2.0)


def test_gathers_by_hand() -> None:
    """a's comes first and is waited for; the others come while forward runs."""
    assert exposed_gathers(EACH, TIME, cost(1.0), True) == pytest.approx(1.0)
    assert exposed_gathers(EACH, TIME, cost(2.0), True) == pytest.approx(5.0)
    assert exposed_gathers(EACH, TIME, cost(0.5), False) == pytest.approx(2.0)
    assert exposed_gathers(ONE, TIME, cost(0.5), True) == pytest.approx(2.0)
    costs = Costs((cost(1.0),), cost(2.0))
    assert exposed(EACH, TIME, costs, sums=True, gathers=True) == pytest.approx(6.0)


def test_slow_starts_ask_for_large_buckets_and_slow_links_for_small_ones() -> None:
    entries = [ParamEntry(f"layers.{i}", 64 * K) for i in range(16)]
    times = {entry.name: 1.0 - i / 16 for i, entry in enumerate(entries)}
    time = Timeline({entry.name: i / 32 for i, entry in enumerate(entries)}, times, 0.5, 1.0)
    sizes = candidates(16 * 64 * K, 2)
    assert sizes[0] == 32 * K and sizes[-1] == 16 * 64 * K * 2 and sizes == sorted(set(sizes))

    def chosen(start: float, each: float) -> int:
        costs = Costs((Cost(start, each / (16 * 64 * K)),), None)
        found = seconds_of(entries, sizes, 2, 0, time, costs, sums=True, gathers=False)
        return choose(sizes, found, 1.5)

    fast, slow, costly = chosen(1e-5, 0.5), chosen(1e-5, 4.0), chosen(0.2, 0.5)
    assert fast <= 64 * K < costly
    assert slow >= fast


def test_of_sizes_that_are_as_good_the_largest_is_taken() -> None:
    assert choose([1, 2, 3, 4], [1.0, 0.5, 0.504, 0.6], 0.0) == 3
    assert choose([1, 2, 3, 4], [1.0, 0.5, 0.504, 0.51], 1.0) == 4  # within 1 % of a step
