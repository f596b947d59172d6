# SPDX-License-Identifier: Apache-2.0
"""Uses of a storage that no wait orders are found, each pair with both places; ordered ones not."""

import pytest

from forecast.rehearsal.events import (
    Alloc,
    Free,
    HostUse,
    HostWait,
    Launch,
    Polled,
    Record,
    RecordStream,
    Transfer,
    Wait,
    Where,
)
from forecast.rehearsal.order import order

COMM, SIDE = 7, 3  # streams


def at(line):
    return Where(place=f"a.py:{line}")


def alloc(storage=0, stream=0):
    return Alloc(storage, 64, "", stream, "cuda", at(1))


def launch(line, stream=0, read=(), written=(), spans=()):
    return Launch("op", stream, (), "float32", read, written, 0, 0.0, at(line), spans)


def transfer(line, read=(), written=(), spans=(), number=0, origin=0):
    group, shape = (0, 1), (4,)
    return Transfer(
        number, "all_gather", "tp", group, -1, number, 16, 16, "float32", shape, COMM, origin,
        read, written, -1, "", at(line), spans,
    )  # fmt: skip


def wait(stream=0, number=0):
    return Wait(-1, stream, "a.py:90", number)


def mark(event, stream):
    return Record(event, stream, "a.py:91")


def kinds(*events):
    return [(found.kind, found.place, found.also) for found in order(events, {})]


def test_a_transfer_starts_after_its_origin_and_is_waited_for_by_its_reader():
    made = alloc(), alloc(1), launch(2, written=(0,)), transfer(3, (0,), (1,))
    assert kinds(*made, wait(), launch(4, read=(1,))) == []
    assert kinds(*made, launch(4, read=(1,))) == [("order", "a.py:4", "a.py:3")]


def test_an_input_of_a_transfer_is_not_overwritten_before_it_is_over_but_may_be_read():
    made = alloc(), launch(2, written=(0,)), transfer(3, (0,))
    assert kinds(*made, launch(4, read=(0,))) == []
    assert kinds(*made, launch(4, written=(0,))) == [("order", "a.py:4", "a.py:3")]
    assert kinds(*made, wait(), launch(4, written=(0,))) == []


def test_a_wait_of_one_stream_orders_no_other():
    made = alloc(), transfer(3, (), (0,)), wait(SIDE)
    assert kinds(*made, launch(4, SIDE, read=(0,))) == []
    assert kinds(*made, launch(4, read=(0,))) == [("order", "a.py:4", "a.py:3")]
    # unless that stream is waited for in turn
    assert kinds(*made, mark(0, SIDE), Wait(0, 0, "a.py:5"), launch(6, read=(0,))) == []


def test_a_wait_for_a_later_transfer_is_none_for_an_earlier_one():
    made = alloc(), transfer(3, (), (0,)), transfer(4, number=1), wait(number=1)
    assert kinds(*made, launch(5, read=(0,))) == [("order", "a.py:5", "a.py:3")]
    assert kinds(*made, wait(), launch(5, read=(0,))) == []
    assert kinds(*made, Free(0, "a.py:8")) == [("free", "a.py:8", "a.py:3")]


def test_an_event_marks_what_was_on_its_stream_before_it():
    early = alloc(), mark(0, SIDE), launch(2, SIDE, written=(0,)), Wait(0, 0, "a.py:5")
    assert kinds(*early, launch(4, read=(0,))) == [("order", "a.py:4", "a.py:2")]


def test_other_bytes_of_a_storage_are_not_what_was_written():
    made = alloc(), transfer(3, (), (0,), ((0, 16),))
    assert kinds(*made, launch(4, read=(0,), spans=((16, 32),))) == []
    assert kinds(*made, launch(4, read=(0,), spans=((15, 32),))) == [("order", "a.py:4", "a.py:3")]


def test_what_the_host_has_seen_is_before_all_that_it_launches_then():
    made = alloc(), transfer(3, (), (0,))
    assert kinds(*made, Polled(0), launch(4, read=(0,))) == []
    assert kinds(*made, HostWait(-1, -1, "", at(5)), launch(4, read=(0,))) == []
    assert kinds(*made, HostWait(-1, SIDE, "", at(5)), launch(4, read=(0,))) != []


@pytest.mark.parametrize("stream", [0, SIDE])
def test_a_freed_storage_is_not_in_use_by_a_stream_that_its_own_has_not_waited_for(stream):
    made = alloc(stream=stream), transfer(3, (0,), origin=stream)
    assert kinds(*made, Free(0, "a.py:8")) == [("free", "a.py:8", "a.py:3")]
    assert kinds(*made, wait(stream), Free(0, "a.py:8")) == []
    assert kinds(*made, RecordStream(0, COMM, "a.py:7"), Free(0, "a.py:8")) == []
    assert kinds(*made, RecordStream(0, 5, "a.py:7"), Free(0, "a.py:8")) != []
    assert kinds(*made, Polled(0), Free(0, "a.py:8")) == []


def test_the_host_reads_pinned_memory_after_its_copy():
    down = launch(2, SIDE, read=(), written=(5,)), mark(0, SIDE)
    read = HostUse((5,), (), at(9))
    assert kinds(*down, read) == [("order", "a.py:9", "a.py:2")]
    assert kinds(*down, HostWait(0, -1, "", at(8)), read) == []


def test_the_host_writes_pinned_memory_after_the_copy_from_it():
    up = HostUse((), (5,), at(1)), launch(2, SIDE, read=(5,)), mark(0, SIDE)
    write = HostUse((), (5,), at(9))
    assert kinds(*up) == []
    assert kinds(*up, write) == [("order", "a.py:9", "a.py:2")]
    assert kinds(*up, HostWait(0, -1, "", at(8)), write) == []
