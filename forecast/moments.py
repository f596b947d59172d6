# SPDX-License-Identifier: Apache-2.0
"""Memory of a rank over a step, action by action, and of ranks that one recording stands for."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpu.pipeline.schedules import Action


class Moment(NamedTuple):
    """The fullest moment of an action. kinds: bytes on the device, by kind; after: as it ends."""

    action: Action | str
    kinds: dict[str, int]
    after: dict[str, int]

    @property
    def total(self) -> int:
        """Return the bytes of all kinds."""
        return sum(self.kinds.values())


class Place(NamedTuple):
    """Where an action of another rank stands. like: the number of the recorded one that is like it.
    receives: how many more it posts than that.
    """

    action: Action
    like: int
    receives: int


class _Sum:
    """Moments that follow each other, each given by what it changes."""

    def __init__(self, begin: Mapping[str, int]) -> None:
        self.now, self.found = dict(begin), [Moment("", dict(begin), dict(begin))]

    def add(self, action: Action | str, kinds: Mapping[str, int], after: Mapping[str, int]) -> None:
        """Add an action. kinds: how many bytes more its fullest moment has than its begin; after:
        how many more its end has.
        """
        most, self.now = (
            {kind: self.now.get(kind, 0) + change.get(kind, 0) for kind in {*self.now, *change}}
            for change in (kinds, after)
        )
        self.found.append(Moment(action, most, dict(self.now)))


def _changes(moments: Sequence[Moment], n: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return how many bytes more than its begin an action's fullest moment has, and its end."""
    before, (_, kinds, after) = moments[n - 1].after, moments[n]
    most, end = (
        {kind: part.get(kind, 0) - before.get(kind, 0) for kind in {*before, *part}}
        for part in (kinds, after)
    )
    return most, end


def reordered(
    moments: Sequence[Moment], order: Sequence[Place], messages: str, message: int
) -> list[Moment]:
    """Return moments of a step whose actions come in another order, some of them several times.

    moments: the first before any action. messages: the kind of memory of messages; message: bytes
    of one. What an action makes and frees is the same wherever it stands, but for the receives that
    it posts for later ones.
    """
    places = [n for n, moment in enumerate(moments) if isinstance(moment.action, Action)]
    found = _Sum(moments[0].after)
    for n in range(1, places[0]):
        found.add(moments[n].action, *_changes(moments, n))
    for action, n, receives in order:
        most, end = _changes(moments, places[n])
        end[messages] = end.get(messages, 0) + receives * message
        found.add(action, most, end)
    for n in range(places[-1] + 1, len(moments)):
        found.add(moments[n].action, *_changes(moments, n))
    return found.found


def of_layers(
    low: Sequence[Moment], high: Sequence[Moment], chunks: Sequence[int], few: tuple[int, int]
) -> list[Moment]:
    """Return the moments of a rank whose chunks have so many layers, from those of the same rank
    with few[0] and with few[1] layers in each: what an action makes is linear in the layers of its
    chunk, and what a step does besides in those of all.
    """

    def between(one: Mapping[str, int], other: Mapping[str, int], layers: float) -> dict[str, int]:
        share = (layers - few[0]) / (few[1] - few[0])
        return {kind: round(one.get(kind, 0) * (1 - share) + other.get(kind, 0) * share)
                for kind in {*one, *other}}  # fmt: skip

    mean = sum(chunks) / len(chunks)
    found = _Sum(between(low[0].after, high[0].after, mean))
    for n in range(1, len(low)):
        action = low[n].action
        layers = chunks[action.chunk] if isinstance(action, Action) else mean
        most, end = (
            between(one, other, layers)
            for one, other in zip(_changes(low, n), _changes(high, n), strict=True)
        )
        found.add(action, most, end)
    return found.found
