# SPDX-License-Identifier: Apache-2.0
"""The order of what the sharded optimizer does, in recorded events.

A bucket's sum starts before the next bucket's gradients are ready, a block is gathered while the
one before runs, and new weights are waited for where they are used. Nothing is timed: the events
are each gradient that is done, each use of a weight, each collective's start and each wait for one.
"""

import itertools
from typing import NamedTuple

import pytest
import torch

import pretrain_llama
from forecast.recording import Actions
from tests.model.twin import config_of, micro_batches
from tests.sampling import sampled

IN_USE = ("use", "release")
BASE = dict(tp=1, dp=2, sp=False, recompute=None, tied=False, m=1, rows=12, lr=1e-3, gather=True)


class Event(NamedTuple):
    """What happened to which bucket, in which action, and which blocks were whole then.

    done: one of its gradients. sum, gather: of its gradients, its weights, has started; summed,
    gathered: somebody waited for that. use, release: of one of its weights. finish, end: of a step.
    """

    what: str
    bucket: int
    action: str
    gathered: frozenset[int]


class Recorder:
    """Builds a run of a case and trains steps; `events` tells of the last one."""

    def __init__(self, comm, case: dict) -> None:
        config = config_of(case)
        self.case, self.action, self.sink = case, "", None
        self.events: list[Event] = []
        self.grid = comm.grid(case["tp"], pp=case.get("pp", 1))
        self.grid.traced(self)
        try:
            monitor = Actions(self._begin)
            self.run = pretrain_llama.build(config, self.grid, torch.device("cpu"), monitor)
        finally:
            self.grid.traced(None)
        self.sink = sink = self.run.sink
        self.weights = {_storage(b.param_shard): i for i, b in enumerate(sink.buckets)}
        self.place = {id(b): i for i, b in enumerate(sink.buckets)}
        self.bucket = {id(p): i for i, b in enumerate(sink.buckets) for _, p, _ in b.params}
        self.sums: dict[int, int] = {}  # memory of gradients -> bucket
        done, acquire, end_use, finish = (
            sink.register_grad_ready, sink.acquire, sink.end_use, sink.finish_grad_sync
        )  # fmt: skip

        def noted_done(param):
            self.sums[_storage(sink.main[param])] = self.bucket[id(param)]
            self.note("done", param)
            done(param)

        def noted_use(param):
            weight = acquire(param)
            self.note("use", param)
            return weight

        def noted_release(param):
            self.note("release", param)
            end_use(param)

        def noted_finish():
            self.note("finish")
            finish()

        sink.register_grad_ready, sink.acquire = noted_done, noted_use
        sink.end_use, sink.finish_grad_sync = noted_release, noted_finish

    def note(self, what: str, param=None, bucket: int = -1) -> None:
        at = bucket if param is None else self.bucket[id(param)]
        gatherer = self.sink.gatherer
        unsharded = gatherer.unsharded if gatherer else []
        whole = frozenset(self.place[id(b)] for b in unsharded)
        self.events.append(Event(what, at, self.action, whole))

    def _begin(self, action: str) -> None:
        self.action = action.partition(" in stage")[0]

    def issued(self, verb, axis, tensor, nbytes, is_async, label=None):
        memory = _storage(tensor)
        if self.sink is None or axis.name != "dp_cp":
            return None
        if verb == "reduce_scatter":
            assert label == (self.sink.buckets[self.sums[memory]], "grad sum")
            return Started(self, "sum", "summed", self.sums[memory])
        if memory not in self.weights or not self.sink.zero_stage:
            return None
        bucket = self.sink.buckets[self.weights[memory]]
        assert label == (bucket, "gather" if bucket.sharded else "update")
        return Started(self, "gather", "gathered", self.weights[memory])

    def train(self, steps: int = 1) -> list[Event]:
        for step in range(steps):
            self.events = []
            batches = micro_batches(self.case, self.grid.dp.rank, step)
            pretrain_llama.train_step(self.run, batches, self.case["lr"])
            self.note("end")
        return self.events


class Started:
    """A collective that is under way."""

    def __init__(self, recorder: Recorder, what: str, then: str, bucket: int) -> None:
        self.recorder, self.then, self.bucket = recorder, then, bucket
        recorder.note(what, bucket=bucket)

    def waiting(self) -> None:
        """What is noted is the end of the wait."""

    def waited(self) -> None:
        self.recorder.note(self.then, bucket=self.bucket)


def _storage(tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def recorded(comm, case: dict, steps: int = 1) -> list[Event]:
    return [tuple(event) for event in Recorder(comm, case).train(steps)]


def events_of(world, case: dict, steps: int = 1, ranks: int = 2) -> list[list[Event]]:
    """Return each rank's events of the last step; the ranks of a stage issue in one order."""
    every = [
        [Event(*event) for event in events]
        for events in world(ranks).run(recorded, BASE | case, steps)
    ]
    wire = [[e[:3] for e in events if e.what in ("sum", "gather")] for events in every]
    half = ranks // case.get("pp", 1)
    assert all(wire[r] == wire[r // half * half] for r in range(ranks)), "ranks differ"
    return every


def at(events: list[Event], what: str, bucket: int = -1) -> list[int]:
    """List the places of such events."""
    return [i for i, e in enumerate(events) if (e.what, e.bucket) == (what, bucket)]


def buckets_of(events: list[Event], what: str) -> list[int]:
    """List the buckets of such events, in order."""
    return [e.bucket for e in events if e.what == what]


@pytest.mark.parametrize("zero, m", sampled([(2, 3), (0, 1), (3, 3), (1, 1)], 2))
def test_a_sum_leaves_before_the_next_gradients_are_ready(world, zero, m):
    for events in events_of(world, dict(zero=zero, m=m)):
        left = buckets_of(events, "sum")
        assert left == list(range(len(left))) and len(left) >= 5
        (finish,) = at(events, "finish")
        for i in left:
            (launch,) = at(events, "sum", i)
            assert at(events, "done", i)[-1] < launch < finish
            if i + 1 in left:
                assert launch < at(events, "done", i + 1)[-1], (i, "left too late")
            (arrived,) = at(events, "summed", i)
            if i + 1 in left:  # it travels meanwhile
                assert at(events, "done", i + 1)[-1] < arrived, (i, "was waited for at once")


@pytest.mark.parametrize("zero", sampled([3, 1], 2))
def test_gradients_travel_in_the_last_micro_batch_only(world, zero):
    for events in events_of(world, dict(zero=zero, m=3)):
        assert {e.action for e in events if e.what == "sum"} == {"BW chunk 0 micro-batch 2"}
        assert {e.action for e in events if e.what == "done"} == {
            f"BW chunk 0 micro-batch {i}" for i in range(3)
        }


@pytest.mark.parametrize(
    "overlap, zero", sampled([(True, 3), (False, 2)], 2)
)
def test_gradients_travel_after_each_micro_batch_where_asked(world, zero, overlap):
    for events in events_of(world, dict(zero=zero, m=3, each=True, overlap=overlap)):
        last = max(buckets_of(events, "sum"))
        for i in range(3):
            action = f"BW chunk 0 micro-batch {i}"
            here = [e for e in events if e.action == action]
            assert buckets_of(here, "sum") == list(range(last + 1))
            for b in range(last):
                (launch,) = at(here, "sum", b)
                assert at(here, "done", b)[-1] < launch < at(here, "done", b + 1)[-1]
                if not overlap:
                    assert here[launch + 1][:2] == ("summed", b), "it did not wait"


@pytest.mark.parametrize(
    "zero, schedule", sampled([(3, "interleaved"), (2, "zb-v")], 2)
)
def test_in_a_pipeline_buckets_leave_with_their_last_gradient(world, zero, schedule):
    """Of each virtual stage: in the action of its last W, while other stages still compute."""
    case = dict(zero=zero, pp=2, schedule=schedule, v=2, m=4, rows=16, layers=8)
    kind = "W" if schedule == "zb-v" else "BW"
    for events in events_of(world, case, 2, ranks=4):
        (finish,) = at(events, "finish")
        ready, early, chunks = -1, 0, []
        for i in range(max(buckets_of(events, "sum")) + 1):
            (launch,) = at(events, "sum", i)
            ready = max(ready, at(events, "done", i)[-1])
            assert ready < launch < finish and events[launch].action == events[ready].action
            chunks.append(events[launch].action.split(" micro-batch ")[0])
            assert events[launch].action == f"{chunks[-1]} micro-batch 3"
            early += any(e.what == "done" for e in events[launch + 1 :])
        assert set(chunks) == {f"{kind} chunk 1", f"{kind} chunk 0"}
        assert chunks == sorted(chunks, reverse=True) and early >= chunks.count(chunks[0])
        if zero == 3:  # a block is whole from its first use to its last gradient
            gathers = buckets_of(events, "gather")
            assert sorted(gathers) == list(range(len(chunks)))
            assert events[-1].gathered == frozenset()
            for i in gathers:
                first, last = at(events, "use", i)[0], at(events, "done", i)[-1]
                assert all(i in e.gathered for e in events[first : last + 1])
                (launch,) = at(events, "sum", i)
                held = [sum(place < launch for place in at(events, w, i)) for w in IN_USE]
                later = [e for e in events[launch + 1 :] if e.what in ("done", "finish")]
                assert held[0] > held[1] or not any(i in e.gathered for e in later), (
                    "it stays whole"
                )


@pytest.mark.parametrize(
    "zero, schedule", sampled([(3, "1f1b"), (1, "interleaved")], 2)
)
def test_the_output_layers_bucket_leaves_last_where_its_gradients_are_deferred(
    world, zero, schedule
):
    """So that the other buckets leave under backward, and their sums travel under its matmuls."""
    v = 2 if schedule == "interleaved" else None
    case = dict(zero=zero, pp=2, schedule=schedule, v=v, m=4, rows=16, layers=8, defer=True)
    for rank, events in enumerate(events_of(world, case, 2, ranks=4)):
        left = buckets_of(events, "sum")
        actions = [event.action for event in events if event.what == "sum"]
        deferred = [action.startswith("the output layer's deferred W") for action in actions]
        assert left == list(range(len(left))) and len(left) > 3
        assert deferred == [False] * (len(left) - 1) + [rank >= 2]
        gathers = buckets_of(events, "gather")
        assert not gathers or gathers[-1] == (left[-1] if rank >= 2 else 0) or zero == 3


def turns(events: list[Event]) -> list[tuple[int, int, int]]:
    """Cut a step into uses of one block after another: (block, first use, last release)."""
    found: list[tuple[int, int, int]] = []
    for i, e in enumerate(events):
        if e.what == "use" and (not found or found[-1][0] != e.bucket):
            found.append((e.bucket, i, i))
        elif e.what == "release":
            assert e.bucket == found[-1][0], "two blocks are in use"
            found[-1] = (*found[-1][:2], i)
    return found


@pytest.mark.parametrize(
    "case", sampled([dict(recompute="full", m=2), dict(m=2), dict(tied=True)], 2)
)
def test_a_block_is_gathered_under_the_one_before(world, case):
    """From the second step on, forward and backward; and the one before that is freed. The last
    norm alone hides nothing: what comes after it is gathered with it.
    """
    norm = {0} if "tied" in case else set()
    for events in events_of(world, dict(zero=3) | case, 2):
        order = turns(events)
        kinds = {events[first].action.split()[0] for _, first, _ in order}
        assert kinds == {"F", "BW"} and len(order) >= 8
        before = -1
        for n, ((block, first, last), (then, begin, _)) in enumerate(itertools.pairwise(order)):
            gather = max(i for i in at(events, "gather", then) if i < begin)
            wait = max(i for i in at(events, "gathered", then) if i < begin)
            assert gather < first < last, (block, then, "is gathered too late")
            if then == before:  # the way turns: it has stayed whole
                assert wait < first
            else:
                assert wait == begin - 1, (block, then, "was not waited for at its use")
            before = block
            uses = [e for e in events[first : last + 1] if e.what in ("use", "release")]
            after = {next_block for next_block, *_ in order[n + 2 : n + 3] if then in norm}
            assert all(e.gathered == {block, then} | after for e in uses), (block, then)
        assert max(len(e.gathered - norm) for e in events) == 2 and not events[-1].gathered
        assert buckets_of(events, "gather")[0] == order[0][0]


@pytest.mark.parametrize("gather, steps", [(False, 2), (True, 1)], ids=["never ahead", "first"])
def test_without_gathering_ahead_each_block_waits_for_its_own(world, gather, steps):
    """At most one is whole; so it is in the first step too, which learns the order."""
    for events in events_of(world, dict(zero=3, m=2, gather=gather), steps):
        order = turns(events)
        gathers, waits = ([i for b in {b for b, *_ in order} for i in at(events, w, b)]
                          for w in ("gather", "gathered"))  # fmt: skip
        assert len(gathers) == len(waits) == len(order)
        assert sorted(waits) == [first - 1 for _, first, _ in order]
        assert sorted(gathers) == [first - 2 for _, first, _ in order]
        for block, first, last in order:
            assert all(e.gathered == {block} for e in events[first : last + 1] if e.what == "use")
        assert max(len(e.gathered) for e in events) == 1


@pytest.mark.parametrize("zero", [1, 2])
def test_new_weights_travel_under_the_next_forward(world, zero):
    """The update starts the gathers and nobody waits; a wait stands before the first use."""
    for one, two in zip(*(events_of(world, dict(zero=zero, m=2), n) for n in (1, 2)), strict=True):
        gathers = buckets_of(one, "gather")
        assert gathers == sorted(gathers, reverse=True) and len(gathers) >= 5
        assert all(e.action.startswith("the update") for e in one if e.what == "gather")
        assert not buckets_of(one, "gathered"), "the update waited"
        assert sorted(buckets_of(two, "gathered")) == sorted(gathers)
        for b in gathers:
            first = at(two, "use", b)[0]
            assert two[first - 1][:2] == ("gathered", b)
            assert two[first].action == "F chunk 0 micro-batch 0"
