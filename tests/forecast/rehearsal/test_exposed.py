# SPDX-License-Identifier: Apache-2.0
"""Which transfers a product could hide, in made-up steps."""

from types import SimpleNamespace

import pytest

from forecast.rehearsal.events import Action, Launch, Record, Transfer, Wait, Where
from forecast.rehearsal.exposed import exposed

PASS = Action("B chunk 0 micro-batch 0 in stage 0")
SUMS = Action("the gradient sums of iteration 2")
HERE, INPUT, OUTPUT, OTHER = Where(place="a.py:1"), 1, 2, 3


def runs(read=(), written=(), flops=1.0, op="aten::mm", stream=0):
    where = Where(place="b.py:1")
    return Launch(op, stream, (), "bfloat16", read, written, 1 << 20, flops, where)


def sends(verb="all_gather", read=(INPUT,), written=(OUTPUT,)):
    return Transfer(
        id=0, verb=verb, axis="tp", group=(0, 1), peer=-1, number=1, bytes=8, sent=8,
        dtype="bfloat16", shape=(4,), stream=1, origin=0, read=read, written=written, batch=-1,
        label="", where=HERE, is_async=True,
    )  # fmt: skip


WAIT = Wait(-1, 0, "a.py:2", 0)
MAKES, READS = runs(written=(INPUT,)), runs(read=(OUTPUT,))
NORM_BEFORE = runs(read=(OTHER,), written=(INPUT,), flops=0.0)
NORM_AFTER = runs(read=(OUTPUT,), written=(OTHER,), flops=0.0)


def found(*events):
    every = [PASS, *events, SUMS]
    recorder = SimpleNamespace(events=every, chains={})
    some = exposed(SimpleNamespace(recorder=recorder, first=0, end=len(every)))
    return [one.what.rpartition(" by ")[2] for one in some]


@pytest.mark.parametrize(
    "events, how",
    [
        ((MAKES, sends(), WAIT, READS), []),  # nothing could run meanwhile
        ((runs(), sends(), runs(), WAIT, runs()), []),  # something runs
        ((runs(), sends(), WAIT, READS), ["an earlier start"]),
        ((sends(), WAIT, READS), []),  # nothing came before it in its action
        ((MAKES, sends(), WAIT, runs(), READS), ["a later wait"]),
        ((MAKES, sends(), WAIT), []),  # no product comes after it
        ((runs(), sends("receive", ()), WAIT, READS), []),  # it comes when the other rank sends
        ((runs(), sends("receive", ()), WAIT, runs(), READS), ["a later wait"]),
        # through what is between the product and the transfer
        ((runs(written=(OTHER,)), NORM_BEFORE, sends(), WAIT, READS), []),
        ((runs(), NORM_BEFORE, sends(), WAIT, READS), ["an earlier start"]),
        ((MAKES, sends(), WAIT, NORM_AFTER, runs(read=(OTHER,))), []),
    ],
)
def test_a_transfer_that_could_be_hidden_is_found(events, how):
    assert found(*events) == how


LARGE = runs(flops=100.0)


@pytest.mark.parametrize(
    "events, how",
    [
        ((LARGE, sends(), WAIT, READS), ["an earlier start"]),
        ((runs(flops=100.0, written=(INPUT,)), runs(), sends(), WAIT, READS), []),  # a router
        ((LARGE, MAKES, sends(), WAIT, READS), []),
        ((MAKES, sends(), WAIT, READS, LARGE), []),
        ((LARGE, sends(), runs(), WAIT, READS), []),  # it is hidden by all that there is
    ],
)
def test_a_small_product_is_none_that_could_hide(events, how):
    assert found(*events) == how


def test_a_forward_that_is_computed_again_begins_with_what_was_kept():
    again = [event._replace(where=HERE._replace(phase="recompute")) for event in (sends(), READS)]
    assert found(runs(), again[0], WAIT, again[1]) == []


def test_a_transfer_that_the_program_waits_for_at_once_is_its_choice():
    assert found(runs(), sends()._replace(is_async=False), WAIT, READS) == []


def test_half_of_a_lines_transfers_may_be_exposed():
    bad, good = (runs(), sends(), WAIT, READS), (runs(), sends(), runs(), WAIT, READS)
    assert found(*bad, *good) == []
    assert found(*bad, *bad, *good) == ["an earlier start"]


@pytest.mark.parametrize("stream", [0, 1])
def test_a_copy_to_the_device_is_a_transfer_too(stream):
    copy = runs((INPUT,), (OUTPUT,), 0.0, "memcpy HtoD", stream)
    events = (copy, Record(0, 1, ""), Wait(0, 0, ""), READS)
    on_computing = ["memcpy HtoD of 1,048,576 bytes on the compute stream"]
    assert found(runs(), *events) == (["an earlier start"] if stream else on_computing)


def test_what_an_earlier_transfer_brings_is_there_from_its_wait_on():
    first = sends("reduce_scatter", (INPUT,), (OTHER,))._replace(id=1)
    waits, uses = Wait(-1, 0, "a.py:3", 1), runs(read=(OTHER,), written=(INPUT,), flops=0.0)
    assert found(MAKES, first, runs(), waits, uses, sends(), WAIT, READS) == []
    assert found(MAKES, first, waits, runs(), uses, sends(), WAIT, READS) == ["an earlier start"]
