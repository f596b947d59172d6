# SPDX-License-Identifier: Apache-2.0
"""The cut of the layers: no layer is dropped, no other balance is better, mistakes are refused."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpu.pipeline.schedules import stage_of
from mpu.pipeline.stage_layout import Stage, read_layout, stages


def equal(num_layers, *args, **options):
    """Cut equal layers."""
    return stages((1.0,) * num_layers, *args, **options)


def counts(*args, **options):
    return [len(stage.layers) for stage in equal(*args, **options)]


def check_whole(cut, num_layers):
    """Every layer stands once, in order, and each end where it belongs."""
    assert [i for stage in cut for i in stage.layers] == list(range(num_layers))
    assert [stage.embedding for stage in cut] == [True] + [False] * (len(cut) - 1)
    assert [stage.loss for stage in cut] == [False] * (len(cut) - 1) + [True]


def work_of_ranks(layers, p, v, v_shape, head):
    work = [
        sum(layers[stage_of(rank, chunk, p, v_shape)] for chunk in range(v)) for rank in range(p)
    ]
    work[0 if v_shape else p - 1] += head
    return work


def test_one_rank_holds_everything():
    assert equal(5, 1) == (Stage(0, 5, embedding=True, loss=True),)


@pytest.mark.parametrize(
    "args,head,expected",
    [
        ((8, 2), 0.0, [4, 4]),
        ((8, 2, 2), 0.0, [2, 2, 2, 2]),
        ((8, 2, 2, True), 0.0, [2, 2, 2, 2]),
        ((7, 2), 0.0, [3, 4]),  # between equals the later rank, which keeps less in flight
        ((8, 2), 1.5, [5, 3]),
        ((2, 2), 5.0, [2, 0]),  # a head that outweighs the layers
        ((126, 16), 0.6, [7, *[8] * 14, 7]),  # Llama 3.1 405B
        ((126, 16, 4), 0.6, [1, *[2] * 62, 1]),
        ((16, 4, 2, True), 2.0, [2, 2, 2, 2, 3, 3, 2, 0]),  # both ends on rank 0
        ((3, 2, 4), 0.0, [0, 0, 0, 0, 0, 1, 1, 1]),  # fewer layers than stages
    ],
)
def test_the_balance(args, head, expected):
    assert counts(*args, head_cost=head) == expected
    check_whole(equal(*args, head_cost=head), args[0])


@settings(deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.booleans(),
    st.integers(0, 70),
    st.sampled_from([0.0, 0.25, 1.0, 3.9]),
)
def test_the_balance_over_virtual_stages(p, v, v_shape, more, head):
    v = 2 if v_shape else v
    num_layers = p + more
    check_whole(equal(num_layers, p, v, v_shape, head_cost=head), num_layers)
    cut = counts(num_layers, p, v, v_shape, head_cost=head)
    work = work_of_ranks(cut, p, v, v_shape, head)
    with_head = work[0 if v_shape else p - 1]
    # Nobody could hand a layer on and be the better for it, unless the head alone is too much.
    assert max(work) - min(work) <= 1 or max(work) == with_head < head + 1
    if head == 0 and num_layers % (p * v) == 0:
        assert len(set(cut)) == 1


def brute(costs, p, v, v_shape, embedding, head):
    """Return the work of the slowest rank in the best cut in which no rank holds nothing, and the
    least sum of squares of all ranks' work in such a cut.
    """
    last, best = p * v - 1, (float("inf"), 0.0)
    for bars in combinations(range(len(costs) + last), last):
        ends = [bar - i for i, bar in enumerate(bars)]
        bounds = [0, *ends, len(costs)]
        work = [sum(costs[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
        work[0] += embedding
        work[-1] += head
        ranks = [[stage_of(r, chunk, p, v_shape) for chunk in range(v)] for r in range(p)]
        if all(any(bounds[s] < bounds[s + 1] or s in (0, last) for s in r) for r in ranks):
            every = [sum(work[s] for s in r) for r in ranks]
            best = min(best, (max(every), sum(each * each for each in every)))
    return best


COSTS = st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0])


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([(2, 1, False), (3, 1, False), (4, 1, False), (2, 2, False), (2, 2, True)]),
    st.lists(COSTS, min_size=4, max_size=7),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 2.5, 20.0]),
)
def test_layers_of_unequal_cost(shape, costs, embedding, head):
    """With a stage a rank no cut has a faster slowest rank, and of those as fast none is more even;
    else the best is near.
    """
    cut = stages(tuple(costs), *shape, embedding_cost=embedding, head_cost=head)
    check_whole(cut, len(costs))
    p, v, v_shape = shape
    work = [sum(costs[stage.first : stage.last]) for stage in cut]
    work[0] += embedding
    work[-1] += head
    ranks = [[stage_of(r, chunk, p, v_shape) for chunk in range(v)] for r in range(p)]
    every = [sum(work[s] for s in r) for r in ranks]
    slowest, squares = brute(costs, *shape, embedding, head)
    if v == 1:
        assert (max(every), sum(each * each for each in every)) == (slowest, squares)
    else:
        assert max(every) <= slowest + max(costs)


def test_a_large_unequal_model_is_cut_soon_and_well():
    costs = tuple(1.0 + (i * 7 % 11) / 5 for i in range(126))
    for p, v in ((16, 1), (16, 4)):
        cut = stages(costs, p, v, head_cost=2.0)
        check_whole(cut, 126)
        work = [0.0] * p
        for number, stage in enumerate(cut):
            work[number % p] += sum(costs[stage.first : stage.last])
        work[-1] += 2.0
        assert max(work) < 1.1 * sum(work) / p


def test_a_rank_that_holds_nothing_is_refused():
    assert counts(2, 4, head_cost=1.0) == [0, 1, 1, 0]  # the ends hold an end
    with pytest.raises(
        ValueError, match="rank 1 would have no layers: an embedding, a head and 1 l"
    ):
        equal(1, 4, head_cost=1.0)
    with pytest.raises(ValueError, match="rank 2 would have no layers: .* 2 layers over 4 ranks"):
        equal(2, 4, 2, True, layout="Et|t||||||L")
    with pytest.raises(ValueError, match="rank 1 would have no layers"):
        equal(2, 3, layout="Et||tL")


@pytest.mark.parametrize(
    "args,options,expected",
    [
        ((7, 2, 2), {"layout": "Et|t*2|tt|ttL"}, [1, 2, 2, 2]),
        ((4, 2, 2), {"layout": "Ett||tt|L"}, [2, 0, 2, 0]),
    ],
)
def test_cuts_that_flags_ask_for(args, options, expected):
    assert counts(*args, **options) == expected
    check_whole(equal(*args, **options), args[0])


@pytest.mark.parametrize(
    "args,options,sentence",
    [
        ((8, 2), {"layout": "Et|tL"}, "number of t's must be that of the layers, 8, not 2"),
        ((2, 2), {"layout": "t|tL"}, "E must be the first symbol, and occur once; it has 0"),
        ((2, 2), {"layout": "EEt|tL"}, "E must be the first symbol, and occur once; it has 2"),
        ((2, 3), {"layout": "Et|tL|"}, "L must be the last symbol"),
    ],
)
def test_what_does_not_add_up_is_refused(args, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        equal(*args, **options)


@pytest.mark.parametrize(
    "text,expected",
    [
        ("Et*3|(tt|)*2ttL", ["Ettt", "tt", "tt", "ttL"]),
        ("Ettt, (|t*2)*2, | L", ["Ettt", "tt", "tt", "L"]),
        ("E((t)*2|)*2(t)L", ["Ett", "tt", "tL"]),
        ("Et*12L", ["E" + "t" * 12 + "L"]),
    ],
)
def test_a_layout_written_out(text, expected):
    assert read_layout(text) == expected


@pytest.mark.parametrize(
    "text,sentence",
    [
        ("Et|m|L", r"m \(multi-token prediction\) is not available"),
        ("E(t|tL", r"a \( has no matching \)"),
        ("Et*|tL", r"\* must be followed by a whole number >= 1, not by '\|'"),
        ("EtL*", "not by ''"),
        ("3E|tL", "3 is none of"),
    ],
)
def test_a_layout_that_cannot_be_read(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_layout(text)
