# SPDX-License-Identifier: Apache-2.0
"""What a kind of fault is, what is promised about it, and how faults are drawn from a seed.

A fault is data. Drawing has no effect and depends on nothing but the seed and the table of kinds;
tests/chaos/play.py lets a fault happen and tests/chaos/judge.py holds the run to the promise.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

STEPS, SAVE_EVERY, EVALUATE_EVERY = 12, 3, 4
PEER_TIMEOUT, HANG_TIMEOUT = 6, 8  # seconds, of --peer-timeout and --hang-timeout
SLACK = 5.0  # seconds after a timeout within which every rank must have ended
SOON = 20.0  # seconds within which survivors of a death have ended


@dataclass(frozen=True)
class Layout:
    """How a run is cut. own: its ranks hold state that no other rank holds."""

    name: str
    tp: int = 1
    pp: int = 1
    flags: str = ""
    ranks: int = 2


LAYOUTS = {
    x.name: x
    for x in (
        Layout("tp 2", tp=2, flags="--sequence-parallel"),
        Layout("pp 2", pp=2, flags="--num-layers 4"),
        Layout("dp 2"),
        Layout("ZeRO 3", flags="--zero-stage 3"),
        Layout("ep 2", flags="--num-experts 4 --expert-model-parallel-size 2 "
               "--moe-token-dispatcher-type alltoall --zero-stage 1"),
    )
}  # fmt: skip
DENSE = tuple(name for name in LAYOUTS if name != "ep 2")


@dataclass(frozen=True)
class Promise:
    """What must happen.

    codes: the exit codes that ranks other than the victim may have. says: a regular expression
    that names the fault right; {rank}, {other} and {step} are the fault's, {name} what it hit,
    {bare} and {module} the parameter and its layer. who: in whose words it must stand: each of the
    "survivors", "one" rank, "both sides" of a wire, or the "restart"; None: nobody's. limit:
    seconds from the fault to the last survivor's end. equal: the end of the run, or of the same
    command given again, has the bits of an undisturbed run. honest: nothing is promised about being
    found; the table only counts.
    """

    codes: tuple[int, ...] = (1,)
    says: str = ""
    who: str | None = "survivors"
    limit: float = SOON
    equal: bool = True
    honest: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether the run itself comes to its end."""
        return self.codes == (0,)


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    make(draw, layout, rank, step) -> what tests/run_ranks.py is to inject. base: flags with which
    the undisturbed run is made too; flags: those that only notice. outside: what the storm itself
    does once the fault strikes (a function of tests/chaos/outside.py). held: the victim cannot
    move, so that its launcher kills it. share: how often it is drawn, against the others. victim:
    the exit code of the rank that is struck; None: that of the others. apart: the launcher that
    starts the ranks, of tests/chaos/apart.py.
    """

    name: str
    make: Callable[[random.Random, Layout, int, int], list[dict[str, Any]]]
    promise: Promise
    layouts: tuple[str, ...] = DENSE
    base: str = ""
    flags: str = ""
    outside: str = ""
    held: bool = False
    share: float = 1.0
    victim: int | None = None
    only: int | None = None  # the rank that is struck, where it cannot be any
    first: int = SAVE_EVERY + 1  # the earliest step in which it strikes
    steps: int = STEPS  # of the run; `base` says so too
    log: bool = True  # the log of a run that comes to its end has the rows of an undisturbed one
    job: dict[str, Any] = field(default_factory=dict)
    apart: str = ""


@dataclass(frozen=True)
class Fault:
    """One fault that was drawn. seed: draws what is done from outside."""

    number: int
    kind: str
    layout: str
    rank: int
    step: int
    seed: int
    inject: tuple[dict[str, Any], ...]


def one(kind: Kind, number: int, layout: Layout, rng: random.Random) -> Fault:
    """Draw a fault of a kind in a layout."""
    rank = rng.randrange(layout.ranks) if kind.only is None else kind.only
    step = rng.randint(kind.first, max(kind.first, STEPS - 2))
    made = kind.make(rng, layout, rank, step)
    for fault in made:
        fault.setdefault("rank", rank)
        fault.setdefault("call", 1)
    return Fault(number, kind.name, layout.name, rank, step, rng.randrange(2**31), tuple(made))


def draw(seed: int, cases: int, kinds: Sequence[Kind]) -> list[Fault]:
    """Draw `cases` faults: first each kind once, then by their shares; layouts in turn.

    A fault of a number is the same however many are drawn.
    """
    rng, turns = random.Random(seed), Counter[str]()
    chosen = rng.sample(kinds, len(kinds))
    chosen += rng.choices(kinds, [kind.share for kind in kinds], k=max(0, cases - len(kinds)))
    faults = []
    for number, kind in enumerate(chosen[:cases], 1):
        own = random.Random(f"{seed} {number} {kind.name}")
        start = random.Random(f"{seed} {kind.name}").randrange(len(kind.layouts))
        name = kind.layouts[(start + turns[kind.name]) % len(kind.layouts)]
        turns[kind.name] += 1
        faults.append(one(kind, number, LAYOUTS[name], own))
    return faults
