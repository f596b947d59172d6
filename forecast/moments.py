# SPDX-License-Identifier: Apache-2.0
"""Memory of a rank in each action of a step, also extrapolated to ranks that are not recorded."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mpu.pipeline.schedules import Action

Bytes = npt.NDArray[np.int64]


class Moment(NamedTuple):
    """The moment of an action with the most memory on the device.

    kinds: bytes by kind at that moment. after: bytes by kind as the action ends.
    """

    action: Action | str
    kinds: dict[str, int]
    after: dict[str, int]

    @property
    def total(self) -> int:
        """Return the total of all kinds, in bytes."""
        return sum(self.kinds.values())


class Place(NamedTuple):
    """An action of another rank, and the recorded action that represents it.

    like: index of the recorded action. receives: how many more receives this action posts.
    """

    action: Action
    like: int
    receives: int


class Moments(NamedTuple):
    """The fullest moment of each action of a step, in order; entry 0 precedes the first action.

    most, after: bytes [action, kind], at the fullest moment and as the action ends.
    """

    actions: list[Action | str]
    kinds: tuple[str, ...]
    most: Bytes
    after: Bytes

    @classmethod
    def of(cls, found: Sequence[Moment], kinds: tuple[str, ...]) -> "Moments":
        """Return moments as arrays with a column for each of `kinds`."""
        assert {*kinds} >= {kind for each in found for kind in (*each.kinds, *each.after)}
        most, after = (
            np.array([[part.get(kind, 0) for kind in kinds] for part in parts], np.int64)
            for parts in ([each.kinds for each in found], [each.after for each in found])
        )
        return cls([each.action for each in found], kinds, most, after)

    def moment(self, n: int) -> Moment:
        """Return the moment of an action."""
        most, after = (dict(zip(self.kinds, of[n].tolist(), strict=True))
                       for of in (self.most, self.after))  # fmt: skip
        return Moment(self.actions[n], most, after)

    def changes(self) -> tuple[Bytes, Bytes]:
        """Return the bytes [action, kind] by which the fullest moment and the end of each action
        exceed its begin; 0 in entry 0.
        """
        before = np.concatenate([self.after[:1], self.after[:-1]])
        most = self.most - before
        most[0] = 0
        return most, self.after - before


def _sum(
    begin: Bytes, actions: list[Action | str], kinds: tuple[str, ...], most: Bytes, end: Bytes
) -> Moments:
    """Return the moments of a sequence of actions from their changes, the inverse of `changes`."""
    after = np.concatenate([begin[None], begin + np.cumsum(end, 0)])
    most = np.concatenate([begin[None], after[:-1] + most])
    return Moments(["", *actions], kinds, most, after)


def reordered(moments: Moments, order: Sequence[Place], messages: str, message: int) -> Moments:
    """Return the moments of a step whose actions come in another order, possibly repeated.

    messages: the kind of memory of messages; message: bytes of one. An action is assumed to
    allocate and free the same memory at any position, except for the receives that it posts.
    """
    places = [n for n, action in enumerate(moments.actions) if isinstance(action, Action)]
    early, late = range(1, places[0]), range(places[-1] + 1, len(moments.actions))
    index = [*early, *(places[each.like] for each in order), *late]
    actions = [moments.actions[n] for n in index]
    actions[len(early) : len(early) + len(order)] = [each.action for each in order]
    most, end = (of[index] for of in moments.changes())
    if messages in moments.kinds:
        receives = np.array([each.receives for each in order]) * message
        end[len(early) : len(early) + len(order), moments.kinds.index(messages)] += receives
    return _sum(moments.after[0], actions, moments.kinds, most, end)


def of_layers(
    low: Moments, high: Moments, chunks: Sequence[int], few: tuple[int, int]
) -> Moments:
    """Return the moments of a rank whose chunks have `chunks` layers, by linear extrapolation.

    low, high: moments of the same rank with few[0] and few[1] layers in each chunk. The memory of
    an action is linear in the layers of its chunk, that of other phases in the layers of all.
    """
    mean = sum(chunks) / len(chunks)
    layers = [chunks[a.chunk] if isinstance(a, Action) else mean for a in low.actions]
    share = ((np.array(layers) - few[0]) / (few[1] - few[0]))[:, None]

    def between(one: Bytes, other: Bytes) -> Bytes:
        return np.rint(one * (1 - share) + other * share).astype(np.int64)

    most, end = (between(*each) for each in zip(low.changes(), high.changes(), strict=True))
    begin = between(low.after, high.after)[0]
    return _sum(begin, low.actions[1:], low.kinds, most[1:], end[1:])
