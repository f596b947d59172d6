# SPDX-License-Identifier: Apache-2.0
"""The simulation by which --ddp-bucket-size auto chooses, held to timelines worked out by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from estimate.bucket_size import (
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
from mpu.comm.meta import MetaTransport
from mpu.comm.transport import Handle
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.optim.adam import AdamW
from mpu.optim.interface import Group
from mpu.optim.optimizer import Optimizer
from mpu.zero.bucket_layout import BucketLayout, ParamEntry, Sharing, ZeroConfig, make_buckets
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer

K = 1024
ENTRIES = [ParamEntry(name, 4 * K) for name in "abcd"]  # backward finishes d first
TIME = Timeline(
    used={"a": 0.0, "b": 1.0, "c": 2.0, "d": 3.0},
    ready={"d": 1.0, "c": 2.0, "b": 3.0, "a": 4.0},
    forward=4.0,
    backward=4.0,
)
ALONE = {"tp": Sharing()}
EACH = make_buckets(ENTRIES, 1, ALONE)  # a bucket a parameter
ONE = make_buckets(ENTRIES, 1 << 30, ALONE)


def cost(seconds: float, start: float = 0.0) -> Cost:
    """Of 4 K elements."""
    return Cost(start, seconds / (4 * K))


def sums_of(buckets: list[BucketLayout], sums: list[Cost], overlap: bool) -> float:
    return exposed_sums(buckets, TIME, Costs(tuple(sums), None), overlap)


def gathers_of(buckets: list[BucketLayout], gather: Cost, overlap: bool) -> float:
    return exposed_gathers(buckets, TIME, Costs((), gather), overlap)


def test_sums_by_hand() -> None:
    assert [len(bucket.params) for bucket in EACH + ONE] == [1, 1, 1, 1, 4]
    # each takes as long as a layer's backward: the last one is exposed
    assert sums_of(EACH, [cost(1.0)], True) == pytest.approx(1.0)
    assert sums_of(EACH, [cost(0.25)], True) == pytest.approx(0.25)
    # twice as long: d leaves at 1, over at 3; c at 2 waits for it, until 3; over at 5; b is ready
    # at 4 then and waits until 5; over at 7; a is ready at 6 and waits until 7; over at 9; 9 - 4
    assert sums_of(EACH, [cost(2.0)], True) == pytest.approx(5.0)
    assert sums_of(ONE, [cost(2.0)], True) == pytest.approx(8.0)
    # after backward nothing is hidden, and each bucket has a start
    assert sums_of(EACH, [cost(1.0)], False) == pytest.approx(4.0)
    assert sums_of(EACH, [cost(1.0, 0.5)], False) == pytest.approx(6.0)
    assert sums_of(ONE, [cost(1.0, 0.5)], False) == pytest.approx(4.5)


def test_sums_of_two_collectives_by_hand() -> None:
    """The second begins when the next bucket leaves; the last one's when backward is over."""
    both = [cost(0.25), cost(0.25)]
    # d: 1 to 1.25, then from 2 on, behind c's first: 2.25 to 2.5 ... a: 4 to 4.25, and b's second
    # 4.25 to 4.5, a's second 4.5 to 4.75
    assert sums_of(EACH, both, True) == pytest.approx(0.75)
    assert sums_of(ONE, both, True) == pytest.approx(2.0)


def test_what_is_summed_over_another_axis_leaves_last() -> None:
    entries = [ENTRIES[0]._replace(axes=("tp",)), *ENTRIES[1:]]
    buckets = make_buckets(entries, 1, ALONE)
    assert [bucket.params[0][0] for bucket in buckets] == ["d", "c", "b", "a"]
    # b: 3 to 3.5; a, though ready at 4 as the others' last, leaves at 4
    assert sums_of(buckets, [cost(0.5)], True) == pytest.approx(0.5)
    assert sums_of(buckets[3:] + buckets[:3], [cost(0.5)], True) == pytest.approx(2.0)


def test_gathers_by_hand() -> None:
    """a's comes first and is waited for; the others come while forward runs."""
    assert gathers_of(EACH, cost(1.0), True) == pytest.approx(1.0)
    assert gathers_of(EACH, cost(2.0), True) == pytest.approx(5.0)
    assert gathers_of(EACH, cost(0.5), False) == pytest.approx(2.0)
    assert gathers_of(ONE, cost(0.5), True) == pytest.approx(2.0)
    costs = Costs((cost(1.0),), cost(2.0))
    assert exposed(EACH, TIME, costs, sums=True, gathers=True) == pytest.approx(6.0)


def test_collectives_that_share_a_link_by_hand() -> None:
    """Alone each takes 1 s; two at once take 1.5 of that, so that four in one bucket are slower."""
    one = Cost(0.0, 1 / (4 * K), ((4 * K, 1.0, 1.5), (16 * K, 4.0, 1.5)))
    shared = Costs((one, one), None, shared=True)
    # d: 1 to 2; its second beside c's first from 2 on, both over at 3.5, a half late; so all are:
    # c's second and b's first until 5, b's and a's until 6.5, a's second alone until 7.5
    assert exposed_sums(EACH, TIME, shared, True) == pytest.approx(3.5)
    assert exposed_sums(ONE, TIME, shared, True) == pytest.approx(8.0)
    gathers = Costs((), one, shared=True)  # four at once, each at 1 / 3 of its speed
    assert exposed_gathers(EACH, TIME, gathers, False) == pytest.approx(3.0)
    assert exposed_gathers(EACH, TIME, gathers, True) == pytest.approx(3.0)
    assert one.seconds(8 * K) == pytest.approx(2.0) and one.seconds(K) == 1.0
    assert one.seconds(32 * K) == pytest.approx(8.0) and Cost(1.0, 2.0).pair(5) == 2.0


def test_slow_starts_ask_for_large_buckets_and_slow_links_for_small_ones() -> None:
    entries = [ParamEntry(f"layers.{i}", 64 * K) for i in range(16)]
    times = {entry.name: 1.0 - i / 16 for i, entry in enumerate(entries)}
    time = Timeline({entry.name: i / 32 for i, entry in enumerate(entries)}, times, 0.5, 1.0)
    sizes = candidates(16 * 64 * K, 2)
    assert sizes[0] == 32 * K and sizes[-1] == 16 * 64 * K * 2 and sizes == sorted(set(sizes))

    def chosen(start: float, each: float) -> int:
        costs = Costs((Cost(start, each / (16 * 64 * K)),), None)
        shared = {"tp": Sharing(ranks=2)}
        found = seconds_of(entries, sizes, shared, time, costs, sums=True, gathers=False)
        return choose(sizes, found, 1.5)

    fast, slow, costly = chosen(1e-5, 0.5), chosen(1e-5, 4.0), chosen(0.2, 0.5)
    assert fast <= 64 * K < costly
    assert slow >= fast


def test_of_sizes_that_are_as_good_the_largest_is_taken() -> None:
    assert choose([1, 2, 3, 4], [1.0, 0.5, 0.504, 0.6], 0.0) == 3
    assert choose([1, 2, 3, 4], [1.0, 0.5, 0.504, 0.51], 1.0) == 4  # within 1 % of a step


class Clock:
    """Time that passes only where somebody lets it."""

    def __init__(self) -> None:
        self.now, self.free = 0.0, 0.0


class Timed(MetaTransport):
    """Carries nothing, and takes what a link of some cost would, one collective after another."""

    def __init__(self, clock: Clock, scatter: Cost, gather: Cost) -> None:
        super().__init__()
        self.clock, self.scatter, self.gather = clock, scatter, gather

    def _start(self, cost: Cost, elements: int) -> Handle:
        clock = self.clock
        clock.free = max(clock.now, clock.free) + cost.start + cost.each * elements
        over = clock.free

        def wait() -> None:
            clock.now = max(clock.now, over)

        return Handle(SimpleNamespace(wait=wait, is_completed=lambda: clock.now >= over))

    def all_reduce(self, x, axis, async_op, op, label):
        raise AssertionError("not in a bucket's step")

    def all_gather(self, x, axis, async_op, into, label):
        into = torch.cat([x] * axis.size) if into is None else into  # what ranks tell one another
        return into, self._start(self.gather, into.numel())

    def reduce_scatter(self, x, axis, async_op, into, label):
        return into, self._start(self.scatter, x.numel())

    def all_to_all(self, x, axis, async_op, splits, label):
        raise AssertionError("not in a bucket's step")


def step(
    stage: int, size: int, overlap: bool, scatter: Cost, gather: Cost, sizes: list[int]
) -> tuple[float, float, list[BucketLayout], Timeline]:
    """Let the trainer's own buckets run a step in made-up time; return what was exposed."""
    clock = Clock()
    grid = Grid(2, launch=Launch(0, 2)).carried_by(Timed(clock, scatter, gather))
    config = ZeroConfig(stage, size, overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    sink = ParamAndGradBuffer(grid, torch.float32, config)
    module = nn.Module()
    module.layers = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in sizes])
    sink.attach(module)
    optimizer = Optimizer(module, sink, grid, {"vector": Group(AdamW())})
    names = [name for name, _ in module.named_parameters()]
    count = len(names)
    time = Timeline(
        {name: 0.5 * i / count for i, name in enumerate(names)},
        {name: 1.0 - i / count for i, name in enumerate(names)},
        0.5,
        1.0,
    )
    clock.now = clock.free = 0.0
    sink.begin_step(1)
    before = 0.0
    for name, param in reversed(list(module.named_parameters())):
        clock.now += time.ready[name] - before
        before = time.ready[name]
        sink.grad_slot(param)[0].fill_(1.0)
        sink.register_grad_ready(param)
    clock.now += time.backward - before
    sink.finish_grad_sync()
    sums = clock.now - time.backward
    began = clock.now = clock.free = 100.0
    optimizer.sink.gather_weights()
    late = clock.now - began
    for name, param in module.named_parameters():
        clock.now = max(clock.now, began + time.used[name] + late)
        sink.acquire(param)
        late = clock.now - began - time.used[name]
    return sums, late, [bucket.layout for bucket in sink.buckets], time


@pytest.mark.parametrize(
    ("stage", "overlap"),
    [
        (0, True),
        (1, True),
        *(
            pytest.param(*each, marks=pytest.mark.prove)
            for each in ((0, False), (1, False), (2, True))
        ),
    ],
)
def test_the_simulation_tells_what_the_trainers_buckets_do(stage: int, overlap: bool) -> None:
    """Whatever the cost of links, for every size that is tried; in time that the test makes."""
    sizes = [1500, 30_000, 30_000, 7000, 64_000, 2048, 9000, 30_000]
    tried = candidates(sum(sizes), 2)[::2]
    assert len(tried) > 2
    for scatter, gather in (
        (Cost(0.001, 2e-6), Cost(0.001, 2e-6)),
        (Cost(0.05, 1e-6), Cost(0.02, 3e-6)),
        (Cost(0.0, 2e-5), Cost(0.01, 1e-5)),
    ):
        found = []
        for size in tried:
            sums, late, buckets, time = step(stage, size, overlap, scatter, gather, sizes)
            costs = Costs((scatter,) if stage else (scatter, gather), gather if stage else None)
            assert sums == pytest.approx(exposed_sums(buckets, time, costs, overlap))
            told = exposed(buckets, time, costs, overlap, overlap)
            assert sums + late == pytest.approx(told), (size, scatter, gather)
            found.append(sums + late)
        chosen = tried.index(choose(tried, found, 1.5))
        assert 1.5 + found[chosen] <= 1.05 * (1.5 + min(found))
