# SPDX-License-Identifier: Apache-2.0
"""Say what every pipeline rank does, in order, as plain data: a schedule is a pure function.

p ranks, m micro-batches, v chunks a rank, p v stages. An Action is one of

    F  forward of a stage on a micro-batch
    B  backward to its input only: the gradient of its weights waits
    W  the gradients of its weights

In a schedule that is not `split` each B is directly followed by its own W, and the two are one
backward: the gradient of the input leaves after both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half")


class Action(NamedTuple):
    """One thing a rank does: kind F, B or W, of its chunk, on a micro-batch."""

    kind: str
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """What each rank does, in order: `ranks[r]` is rank r's list.

    v_shape: chunk 0 goes down the ranks and chunk 1 comes back up, so that rank 0 holds both ends;
    else stage = chunk p + rank.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    micro_batches: int
    chunks: int = 1
    split: bool = False
    v_shape: bool = False

    @property
    def stages(self) -> int:
        """Count the stages, p v."""
        return len(self.ranks) * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage that a rank's chunk is."""
        return stage_of(rank, chunk, len(self.ranks), self.v_shape)

    def place(self, stage: int) -> tuple[int, int]:
        """Return (rank, chunk) of a stage."""
        p = len(self.ranks)
        chunk, at = divmod(stage, p)
        return (p - 1 - at if self.v_shape and chunk % 2 else at), chunk


def stage_of(rank: int, chunk: int, p: int, v_shape: bool) -> int:
    """Return the stage that is chunk `chunk` of rank `rank`."""
    return chunk * p + (p - 1 - rank if v_shape and chunk % 2 else rank)


@lru_cache(maxsize=64)
def build(name: str, p: int, m: int, v: int = 1, group: int | None = None) -> Schedule:
    """Return the schedule of that name for p ranks, m micro-batches and v chunks a rank.

    group: of interleaved only. Raises ValueError with the rule that the sizes break.
    """
    if name not in NAMES:
        raise ValueError(f"{name!r} is no schedule: the schedules are {', '.join(NAMES)}")
    for value, what in ((p, "pipeline size"), (m, "number of micro-batches"), (v, "v")):
        if value < 1:
            raise ValueError(f"{name}: the {what} is {value}, and must be at least 1")
    if name == "interleaved":
        return interleaved(p, m, v, group)
    if group is not None:
        raise ValueError(f"{name} has no micro-batch group size ({group}): only interleaved has")
    chunks = 2 if name in ("zb-v", "v-half") else 1
    if v != chunks:
        raise ValueError(f"{name} has {chunks} virtual stages a rank, not {v}")
    makers = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-v": zb_v, "v-half": v_half}
    return makers[name](p, m)


def gpipe(p: int, m: int) -> Schedule:
    """Run all forwards, then all backwards, both in micro-batch order."""
    order = _fused(_actions("F", m), _actions("B", m), warm_up=m)
    return Schedule("gpipe", (order,) * p, m)


def one_f_one_b(p: int, m: int) -> Schedule:
    """Run a backward as soon as there is one: forwards and backwards in turn."""
    f, b = _actions("F", m), _actions("B", m)
    return Schedule("1f1b", tuple(_fused(f, b, warm_up=p - r - 1) for r in range(p)), m)


def interleaved(p: int, m: int, v: int, group: int | None = None) -> Schedule:
    """Cut each rank's layers into v chunks, so that the pipeline fills v times as fast."""
    if v == 1:
        if group is not None:
            raise ValueError(
                f"a micro-batch group size ({group}) needs more than 1 virtual stage a rank"
            )
        return replace(one_f_one_b(p, m), name="interleaved")
    size = p if group is None else group
    if m < p:
        raise ValueError(
            f"interleaved needs at least as many micro-batches as the pipeline size: {m} < {p}"
        )
    if not p <= size <= m:
        raise ValueError(
            f"the micro-batch group size must lie between the pipeline size {p} and the number of "
            f"micro-batches {m}: {size} does not"
        )
    if 0 < m % size < p:
        raise ValueError(
            f"{m} micro-batches in groups of {size} leave a last group of {m % size}, which must "
            f"be at least the pipeline size {p}"
        )
    f, b = _actions("F", m, v, size), _actions("B", m, v, size)
    warm_up = [2 * (p - r - 1) + (v - 1) * size for r in range(p)]
    return Schedule("interleaved", tuple(_fused(f, b, warm_up=k) for k in warm_up), m, v)


def zb_h1(p: int, m: int) -> Schedule:
    """Run 1F1B with each W where the rank would wait."""
    orders = [[a for a in rank if a.kind != "W"] for rank in one_f_one_b(p, m).ranks]
    return Schedule("zb-h1", _place_weights(orders, m, cap=p), m, split=True)


def zb_v(p: int, m: int) -> Schedule:
    """Fold the stages into a V, so that W's fill every gap, at 1F1B's memory."""
    return Schedule("zb-v", _v_order(p, m, 4, 2, cap=2 * p), m, 2, split=True, v_shape=True)


def v_half(p: int, m: int) -> Schedule:
    """Fold the stages into a V and keep each activation half as long: half 1F1B's memory."""
    cap = 2 * ((p + 2) // 2)
    return Schedule("v-half", _v_order(p, m, 2, 1, cap=cap), m, 2, split=True, v_shape=True)


def forward_only(schedule: Schedule) -> Schedule:
    """Keep the forwards: what an evaluation runs."""
    ranks = tuple(tuple(a for a in rank if a.kind == "F") for rank in schedule.ranks)
    return replace(schedule, ranks=ranks)


def slots(schedule: Schedule) -> list[list[Action | None]]:
    """Return what each rank does in each unit of time at F = B = W = 1 and send = 0 (None: wait).

    Raises ValueError if the ranks wait for one another.
    """
    orders = [list(rank) for rank in schedule.ranks]
    return _run(orders, schedule.chunks, schedule.split, schedule.v_shape)


def _run(
    orders: Sequence[Sequence[Action]],
    v: int,
    split: bool,
    v_shape: bool,
    cap: int | None = None,
) -> list[list[Action | None]]:
    """Run the orders in units of time. With a cap they lack their W's, and those are placed.

    A rank that would wait does its oldest W instead; so does one whose next F would make it hold
    more than `cap` activations (for B and W together).
    """
    p = len(orders)
    last = p * v - 1
    grid: list[list[Action | None]] = [[] for _ in orders]
    at = [0] * p
    waiting: list[list[Action]] = [[] for _ in orders]  # W's to place
    held = [0] * p
    end: dict[tuple[str, int, int], int] = {}
    leaves = "B" if split else "W"  # after which the gradient of the input leaves
    t = 0
    while any(at[r] < len(orders[r]) or waiting[r] for r in range(p)):
        moved = False
        for r, order in enumerate(orders):
            action = order[at[r]] if at[r] < len(order) else None
            if action is not None:
                kind, chunk, i = action
                stage = stage_of(r, chunk, p, v_shape)
                if kind == "F" and stage:
                    ready = end.get(("F", stage - 1, i), t) < t
                elif kind == "B" and stage < last:
                    ready = end.get((leaves, stage + 1, i), t) < t
                else:
                    ready = True
                full = cap is not None and kind == "F" and held[r] >= cap
                if not ready or (full and waiting[r]):
                    action = None
            if action is not None:
                at[r] += 1
                end[action.kind, stage, i] = t
                held[r] += action.kind == "F"
                if cap is not None and action.kind == "B":
                    waiting[r].append(Action("W", chunk, i))
            elif waiting[r]:
                action = waiting[r].pop(0)
                held[r] -= 1
            moved = moved or action is not None
            grid[r].append(action)
        if not moved:
            r = next(r for r in range(p) if at[r] < len(orders[r]))
            raise ValueError(f"rank {r} waits for ever for the input of {orders[r][at[r]]}")
        t += 1
    return grid


def _place_weights(
    orders: Sequence[Sequence[Action]], m: int, cap: int, v_shape: bool = False
) -> tuple[tuple[Action, ...], ...]:
    """Put the W's into orders of F's and B's: see _run."""
    grid = _run(orders, 2 if v_shape else 1, True, v_shape, cap)
    return tuple(tuple(a for a in rank if a is not None) for rank in grid)


def _v_order(p: int, m: int, slow: int, fast: int, cap: int) -> tuple[tuple[Action, ...], ...]:
    """Repeat one micro-batch's F0 F1 B1 B0 every 6 units of time, then place the W's.

    From rank to rank F0 and B1 move on after `slow` units, F1 and B0 after `fast`.
    """
    orders = []
    t1 = slow * (p - 1) + 1
    t2 = t1 + fast * (p - 1) + 1
    t3 = t2 + slow * (p - 1) + 1
    for d in range(p):
        up = p - 1 - d
        begin = (("F", 0, slow * d), ("F", 1, t1 + fast * up), ("B", 1, t2 + slow * d))
        timed = [
            (at + 6 * i, n, Action(kind, chunk, i))
            for i in range(m)
            for n, (kind, chunk, at) in enumerate((*begin, ("B", 0, t3 + fast * up)))
        ]
        orders.append([action for _, _, action in sorted(timed)])
    return _place_weights(orders, m, cap, v_shape=True)


def _actions(kind: str, m: int, v: int = 1, group: int | None = None) -> list[Action]:
    """List the actions of a kind: by groups of micro-batches, chunk by chunk within a group."""
    group = group or m
    chunks = range(v) if kind == "F" else range(v - 1, -1, -1)
    return [
        Action(kind, chunk, i)
        for first in range(0, m, group)
        for chunk in chunks
        for i in range(first, min(first + group, m))
    ]


def _fused(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """Do `warm_up` forwards, then a forward and a backward in turn while there are both."""
    order = forwards[:warm_up]
    for f, b in zip_longest(forwards[warm_up:], backwards):
        order += [f] if f else []
        order += [b, b._replace(kind="W")] if b else []
    return tuple(order)
