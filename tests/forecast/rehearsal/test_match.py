# SPDX-License-Identifier: Apache-2.0
"""Transfers of all ranks meet, or what does not fit and what stands still is found."""

from forecast.rehearsal.events import HostWait, Record, Transfer, Wait, Where
from forecast.rehearsal.match import match


class Script:
    """The record of one rank, written down call by call; a line for each call."""

    def __init__(self, rank):
        self.rank, self.events, self.streams, self.count = rank, [], {}, 0

    def _transfer(self, verb, name, group, peer, shape=(4,), dtype="float32", label="", batch=-1):
        stream = self.streams.setdefault(name, 1 + len(self.streams))
        where = Where(place=f"rank{self.rank}.py:{len(self.events) + 1}")
        self.events.append(
            Transfer(
                self.count,
                verb,
                name,
                group,
                peer,
                self.count,
                16,
                16,
                dtype,
                shape,
                stream,
                0,
                (),
                (),
                batch,
                label,
                where,
                (),
                "",
                name,
            )  # fmt: skip
        )
        self.count += 1
        return self.count - 1

    def gather(self, name, group=(0, 1), **more):
        return self._transfer("all_gather", name, group, -1, **more)

    def send(self, to, name="pair", **more):
        return self._transfer("send", name, (0, 1), to, **more)

    def receive(self, source, name="pair", **more):
        return self._transfer("receive", name, (0, 1), source, **more)

    def wait(self, number):
        self.events.append(Wait(-1, 0, "", number))

    def record(self, event, stream):
        self.events.append(Record(event, self.streams[stream], ""))

    def wait_for(self, event):
        self.events.append(Wait(event, 0, ""))


def two():
    return Script(0), Script(1)


def found(*ranks):
    return [(f.kind, f.place, f.also) for f in match([rank.events for rank in ranks])]


def test_equal_collectives_meet_and_unequal_ones_name_both_places():
    a, b = two()
    a.wait(a.gather("tp"))
    b.wait(b.gather("tp"))
    assert found(a, b) == []
    a.gather("tp", shape=(2, 2))
    b.gather("tp")
    assert found(a, b) == [("mismatch", "rank0.py:3", "rank1.py:3")]


def test_a_collective_that_one_rank_never_starts_is_a_deadlock():
    a, b = two()
    a.gather("tp")
    b.gather("tp")
    a.wait(a.gather("tp"))
    assert found(a, b) == [("deadlock", "rank0.py:2", "")]


def test_a_message_meets_its_other_end_of_one_shape_dtype_and_label():
    a, b = two()
    a.send(1, label="F of stage 0, 3")
    b.wait(b.receive(0, label="F of stage 0, 3"))
    assert found(a, b) == []
    for given, asked in [({"shape": (2,)}, {}), ({"dtype": "bfloat16"}, {}), ({"label": "x"}, {})]:
        a, b = two()
        a.send(1, **given)
        b.receive(0, **asked)
        assert found(a, b) == [("mismatch", "rank0.py:1", "rank1.py:1")]


def test_two_sends_that_face_each_other_on_one_communicator_are_a_deadlock():
    a, b = two()
    a.send(1)
    a.receive(1)
    b.send(0)
    b.receive(0)
    assert found(a, b) == [
        ("deadlock", "rank0.py:1", "rank1.py:1"), ("deadlock", "rank1.py:1", "rank0.py:1"),
    ]  # fmt: skip
    a, b = two()  # as in a batch, or with a communicator for each direction, they are none
    for rank, peer in ((a, 1), (b, 0)):
        rank.send(peer, batch=0)
        rank.receive(peer, batch=0)
    assert found(a, b) == []
    a, b = two()
    a.send(1, "there")
    a.receive(1, "back")
    b.send(0, "back")
    b.receive(0, "there")
    assert found(a, b) == []


def test_a_wait_of_the_compute_stream_holds_up_what_starts_from_it():
    a, b = two()
    a.wait(a.receive(1, "back"))
    a.send(1, "there")
    b.wait(b.receive(0, "there"))
    b.send(0, "back")
    assert [kind for kind, *_ in found(a, b)] == ["deadlock", "deadlock"]
    a, b = two()
    coming = a.receive(1, "back")
    a.send(1, "there")
    a.wait(coming)
    b.wait(b.receive(0, "there"))
    b.send(0, "back")
    assert found(a, b) == []


def test_a_wait_for_an_event_holds_up_no_more_than_what_comes_before_the_event():
    for early in (True, False):
        a, b = two()
        a.receive(1, "forth")
        if early:
            a.record(7, "forth")
        a.receive(1, "forth")
        a.record(8, "forth")
        a.wait_for(7 if early else 8)
        a.send(1, "back")
        b.send(0, "forth")
        b.wait(b.receive(0, "back"))
        b.send(0, "forth")
        kinds = [kind for kind, *_ in found(a, b)]
        assert kinds == [] if early else ["deadlock"] * len(kinds) != []


def test_a_host_that_waits_puts_nothing_more_on_its_streams():
    a, b = two()
    a.receive(1, "back")
    a.events.append(HostWait(-1, -1, "", Where()))
    a.send(1, "there")
    b.wait(b.receive(0, "there"))
    b.send(0, "back")
    assert ("deadlock", "rank0.py:1", "rank1.py:1") in found(a, b)


def test_two_communicators_in_different_orders_name_both_places():
    a, b = two()
    a.gather("tp")
    a.gather("dp")
    b.gather("dp")
    b.gather("tp")
    assert found(a, b) == [("order", "rank0.py:1", "rank1.py:1")]


def test_a_ring_of_batches_is_no_deadlock():
    ranks = [Script(i) for i in range(3)]
    for i, rank in enumerate(ranks):
        rank.send((i - 1) % 3, "ring", batch=0)
        rank.wait(rank.receive((i + 1) % 3, "ring", batch=0))
    assert found(*ranks) == []
