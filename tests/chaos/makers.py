# SPDX-License-Identifier: Apache-2.0
"""Make what tests/run_ranks.py injects, from drawn numbers: each function is a kind's `make`."""

import random
from collections.abc import Callable, Iterable
from typing import Any

from tests.chaos.fault import Layout

Make = Callable[[random.Random, Layout, int, int], list[dict[str, Any]]]
CALLS = {"data": 1, "layer": 4, "backward": 8, "gradient sums": 1, "update": 1, "send": 2}
CALLS |= {"receive": 2, "reading": 1, "evaluation": 1}
RANK_0_ALONE = ("manifest", "renamed", "pruning", "trash")


def at(point: str, how: str, **more: Any) -> Make:
    """Strike at a call of `point` in the fault's step, or in the first one after it.

    point: one, or several to draw from, parted by commas.
    """

    def make(rng: random.Random, layout: Layout, rank: int, step: int) -> list[dict[str, Any]]:
        place = rng.choice(point.split(", "))
        where = {} if place in ("before the meeting", "connect", "build") else {"from": step}
        call = rng.randint(1, CALLS.get(place, 1))
        return [{"point": place, "call": call, "how": how} | where | more]

    return make


def in_save(phases: Iterable[str], how: str, **more: Any) -> Make:
    """Strike in a phase of the second or third save, "staging" and "staged" included."""

    def make(rng: random.Random, layout: Layout, rank: int, step: int) -> list[dict[str, Any]]:
        phase = rng.choice([p for p in phases if rank == 0 or p not in RANK_0_ALONE])
        save = rng.randint(2, 3)
        if phase in ("staging", "staged"):
            return [{"point": phase, "call": save, "how": how} | more]
        call = rng.randint(1, 4 if phase == "piece" else 1)
        return [{"point": f"save: {phase}", "save": save, "call": call, "how": how} | more]

    return make


def spoil(point: str, what: str, value: str | float, **more: Any) -> Make:
    """Write a wrong number (tests/faults/bad_numbers.py)."""

    def make(rng: random.Random, layout: Layout, rank: int, step: int) -> list[dict[str, Any]]:
        number = {"what": what, "value": value, "seed": rng.randrange(2**31)} | more
        if what in ("weight", "moment") and layout.name == "tp 2" and "flip" in str(value):
            number["named"] = "norm"  # which every rank of the axis holds whole
        return at(point, "spoil", **number)(rng, layout, rank, step)

    return make


def wait(rng: random.Random, layout: Layout, rank: int, step: int) -> list[dict[str, Any]]:
    """Let every rank wait in its step until the storm has done its part."""
    ranks = range(layout.ranks)
    return [{"point": "data", "call": 1, "how": "wait", "from": step, "rank": r} for r in ranks]


def fill_small_disk(rng: random.Random, layout: Layout, rank: int, step: int) -> Any:
    """Fill the disk `small` of the job's folder."""
    return [{"point": "data", "how": "fill", "from": step, "path": "{dir}/small", "rank": 0}]


def full_checkpoint_disk(rng: random.Random, layout: Layout, rank: int, step: int) -> Any:
    """Fill the disk of the checkpoints in the second save; empty it before the third."""
    disk = {"path": "{dir}/saved", "call": 1, "rank": 0}
    full = {"point": "save: start", "save": 2, "how": "fill"} | disk
    return [full, {"point": "save: start", "save": 3, "how": "empty"} | disk]


def jump(rng: random.Random, layout: Layout, rank: int, step: int) -> list[dict[str, Any]]:
    """Move the clock of a rank, forwards or backwards, by up to ten years."""
    seconds = rng.choice([-1, 1]) * 10.0 ** rng.uniform(0, 8.5)
    return at("data", "clock", seconds=seconds)(rng, layout, rank, step)


def nothing(rng: random.Random, layout: Layout, rank: int, step: int) -> list[dict[str, Any]]:
    return []


def everywhere(point: str, how: str) -> Make:
    """Strike at the same call on every rank. In a pipeline it is the update's: a stage that never
    leaves a layer keeps the next one from coming to its own.
    """

    def make(rng: random.Random, layout: Layout, rank: int, step: int) -> list[dict[str, Any]]:
        (fault,) = at(point if layout.pp == 1 else "update", how)(rng, layout, rank, step)
        return [fault | {"rank": r} for r in range(layout.ranks)]

    return make


def spike(rng: random.Random, layout: Layout, rank: int, step: int) -> list[dict[str, Any]]:
    """Make the loss, and so the gradients, of a whole step a thousand times as large."""
    more = {"how": "spoil", "what": "output", "value": 1000.0, "seed": 0, "times": 2}
    last = range(layout.ranks) if layout.pp == 1 else [layout.pp - 1]
    return [{"point": "forward", "call": 1, "from": step, "rank": r} | more for r in last]
