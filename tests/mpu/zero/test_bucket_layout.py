# SPDX-License-Identifier: Apache-2.0
"""Which parameters share a bucket, in which order the buckets leave, and where padding lies."""

import pytest

from mpu.zero.bucket_layout import BLOCK, ParamEntry, gaps, make_buckets, sharing_of


def shared(ranks: int, zero_stage: int = 0) -> dict:
    return {"tp": sharing_of("tp", ranks, ranks, zero_stage)}


def names(layouts) -> list[list[str]]:
    return [[name for name, _, _ in layout.params] for layout in layouts]


def test_buckets_leave_in_reverse_order_and_hold_one_chunk():
    entries = [ParamEntry(f"p{i}", BLOCK, chunk=i // 3) for i in range(6)]
    pairs = names(make_buckets(entries, 2 * BLOCK, shared(1)))
    assert pairs == [["p5", "p4"], ["p3"], ["p2", "p1"], ["p0"]]
    assert names(make_buckets(entries, 1, shared(1))) == [[f"p{i}"] for i in range(5, -1, -1)]


def test_by_block_a_bucket_is_a_block_and_neighbours_outside_share_one():
    every = ["in.a", "in.b", "layers.0.w", "layers.0.v", "layers.1.w", "out"]
    found = names(make_buckets([ParamEntry(name, 5) for name in every], 1, shared(2, 3)))
    assert found == [["out"], ["layers.1.w"], ["layers.0.v", "layers.0.w"], ["in.b", "in.a"]]


def test_what_several_stages_hold_has_equal_shares_on_each():
    """A frozen tied weight and what stands beside it on one of the two stages alone."""
    tied = [ParamEntry(name, 5 * BLOCK, frozen=True, copies=True) for name in ("embedding", "head")]
    norm = ParamEntry("norm", 7, frozen=True)
    first, last = (make_buckets(each, 1, shared(2, 3)) for each in (tied[:1], [norm, tied[1]]))
    assert names(last) == [["head"], ["norm"]]
    assert first[0].own == last[0].own


@pytest.mark.parametrize("ends", ["ends", "embd", "zz"])
def test_buckets_over_extra_axes_are_last_and_those_over_tp_the_very_last(ends):
    """Whatever the other axis is called."""
    axes = {"norm": ("tp",), "tied": (ends,), "w": (), "both": ("tp", ends)}
    for order in (list(axes), list(reversed(axes))):
        entries = [ParamEntry(name, 9, axes=axes[name]) for name in order]
        layouts = make_buckets(entries, 1, shared(1))
        assert names(layouts) == [["w"], ["tied"], ["norm"], ["both"]]
        assert [layout.axes for layout in layouts] == [(), (ends,), ("tp",), ("tp", ends)]


def test_gaps_are_all_that_no_parameter_fills():
    entries = [ParamEntry("a", BLOCK), ParamEntry("b", BLOCK + 5), ParamEntry("c", 1)]
    (layout,) = make_buckets(entries, 10**9, shared(3))
    assert layout.length == 6 * BLOCK  # 4 blocks, rounded up to 3 ranks
    assert layout.params == (("c", 0, 1), ("b", BLOCK, BLOCK + 5), ("a", 3 * BLOCK, BLOCK))
    assert gaps(layout) == [(1, BLOCK), (2 * BLOCK + 5, 3 * BLOCK), (4 * BLOCK, 6 * BLOCK)]
