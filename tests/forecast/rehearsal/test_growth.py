# SPDX-License-Identifier: Apache-2.0
"""What lives on when its micro-batch is over, in made-up steps."""

from types import SimpleNamespace

import pytest

from forecast.rehearsal.events import Action, Alloc, Event, Free, Where
from forecast.rehearsal.growth import SUMS, grown

HERE = Where(place="a.py:1")


def leaks(events: list[Event]) -> list[str]:
    recorder = SimpleNamespace(events=events, chains={}, led={}, born={}, pinned_at=[])
    seen = SimpleNamespace(recorder=recorder, begin=0, first=0, loop=0, end=len(events), kinds=dict)
    return [f"{one.place} {one.what}" for one in grown(seen)]


def step(*actions: str, freed: dict[int, int]) -> list[Event]:
    """Return a step of which each action allocates a storage, its own number.

    freed: the action in which a storage is freed.
    """
    events: list[Event] = []
    for n, words in enumerate((*actions, SUMS)):
        events.append(Action(words))
        events += [Free(storage, "") for storage, at in freed.items() if at == n]
        if words != SUMS:
            events.append(Alloc(n, 8, "", 0, "cuda", HERE))
    return events


BACKWARDS = [f"BW chunk 0 micro-batch {i} in stage 1" for i in range(4)]
SENT = "waiting for its last messages to be sent"


@pytest.mark.parametrize(
    "freed, said",
    [
        ({}, ["a.py:1 memory of 3 micro-batches is still live after their end"]),
        ({0: 1, 1: 2, 2: 3}, []),
        ({0: 3, 1: 3}, []),
    ],
)
def test_what_each_micro_batch_keeps_is_a_leak(freed, said):
    assert leaks(step(*BACKWARDS, freed=freed)) == said


def test_messages_that_leave_while_the_output_layer_catches_up_are_none():
    late = [f"the output layer's deferred W of micro-batch {i} in stage 1" for i in range(2)]
    freed = {0: 2, 1: 3, 2: 6, 3: 6, 4: 6, 5: 6}
    assert leaks(step(*BACKWARDS, *late, SENT, freed=freed)) == []


def test_what_a_forward_keeps_that_overlaps_a_backward_is_none():
    """It is freed by its own backward, when the one that it overlaps has long been over."""
    ahead = [f"F chunk 0 micro-batch {i + 3} overlapping {b}" for i, b in enumerate(BACKWARDS)]
    last = [f"BW chunk 0 micro-batch {i} in stage 1" for i in range(4, 7)]
    freed = {n: min(n + 3, 6) for n in range(6)}
    assert leaks(step(*ahead, *last, freed=freed)) == []
