# SPDX-License-Identifier: Apache-2.0
"""Find the rank or the link that slows all others down, from the times that each rank waits.

Every step takes the same time on all ranks, so the step time does not show which rank is slow. The
times that ranks wait for others differ (mpu/comm/waits.py): the slow rank is the one that does not
wait.

    own(r)    = step - data(r) - waits(r)          a rank's own work
    link(g)   = least wait over an axis in its group g: the last rank to arrive waits only for the
                transfer

A rank's own work is compared with that of the ranks of its pipeline stage, its waits for data with
those of all ranks. A stage of one rank, and the link of the only group of an axis, have no peers:
they are compared with their own first steps. On NCCL a host does not wait for its peers, so there
only data and the clocks of the GPUs are compared.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from mpu.comm.collectives import all_gather
from mpu.comm.transport import Handle, Label
from mpu.grid import Grid
from training.run.gpu_health import Health, read_health
from training.run.log import Log
from training.run.step import CONTINUE, Decision, Step

SHARE = 0.10  # of a step: a smaller delay is not reported
FLOOR = 0.005  # seconds a step: nor is a delay below this
NOISE = 4.0  # times the median deviation of a rank's steps: a smaller delay is noise
CLOCK = 0.9  # of the median clock: a GPU below it is slow
WINDOW = 20  # steps, at least, in a window, of which the median is taken
WARM = 3  # steps that are left out at the start
LINKS = {
    "tp": ("tp", "tp_kv"),
    "cp": ("cp",),
    "dp": ("dp", "dp_cp", "dp_cp_shard", "dp_cp_replicate", "edp", "edp_shard", "edp_replicate",
           "tp_dp_cp_shard", "ep_edp_shard"),
    "pp": ("pp", "pp_back", "embd"),
}


@dataclass(frozen=True)
class Row:
    """One rank's median step of a window, in seconds. noise: the median deviation of its own work.

    links: {axis: waits for its peers there}. health: of its GPU.
    """

    step: float
    data: float
    own: float
    noise: float
    links: dict[str, float]
    health: Health = Health()


@dataclass(frozen=True)
class Layout:
    """Which ranks are peers. stages: ranks of each pipeline stage. groups: {axis: its groups}."""

    stages: tuple[tuple[int, ...], ...]
    groups: dict[str, tuple[tuple[int, ...], ...]]

    @classmethod
    def of(cls, grid: Grid) -> "Layout":
        """Return the layout of a grid."""
        several = [name for name in LINKS if getattr(grid, name).size > 1]
        found = {name: grid.groups(name).tolist() for name in ("stage", *several)}
        groups = {name: tuple(map(tuple, each)) for name, each in found.items()}
        return cls(groups.pop("stage"), groups)


@dataclass(frozen=True)
class Slow:
    """What slows a step down, and by how much. ranks: one, or those of a link."""

    ranks: tuple[int, ...]
    what: str
    seconds: float
    step: float
    more: str = ""

    @property
    def counts(self) -> bool:
        """Whether the delay is large enough to be reported."""
        return self.seconds > max(FLOOR, SHARE * self.step)

    def __str__(self) -> str:
        who = f"rank {self.ranks[0]} is slow in {self.what}"
        if len(self.ranks) > 1:
            who = f"the {self.what} link of ranks {', '.join(map(str, self.ranks))} is slow"
        return (
            f"{who}: {self.seconds * 1e3:.1f} ms of each step of {self.step * 1e3:.1f} ms "
            f"({self.seconds / self.step:.0%}){self.more}"
        )


def diagnose(rows: Sequence[Row], layout: Layout, young: Sequence[Row] | None) -> Slow | None:
    """Return the largest delay relative to peers, None if all are within the noise.

    young: the rows of an early window, None if this is the first. The result may be too small to be
    reported (`counts`).
    """
    step, noise = median(row.step for row in rows), median(row.noise for row in rows)
    before, found = young or rows, list[Slow]()
    growth = [new.own - old.own for new, old in zip(rows, before, strict=True)]

    def find(ranks: tuple[int, ...], what: str, seconds: float) -> None:
        row = rows[ranks[0]]
        words = row.health.words() if what == "compute" else ""
        if seconds > NOISE * max(noise, row.noise):
            found.append(Slow(ranks, what, seconds, step, words))

    for rank, late in enumerate(_beyond([row.data for row in rows])):
        find((rank,), "data", late)
    alone = _beyond(growth)
    for ranks in layout.stages:
        twins = _beyond([rows[r].own for r in ranks])
        for rank, more in zip(ranks, twins, strict=True):
            find((rank,), "compute", more if len(ranks) > 1 else alone[rank])
    for axis, groups in layout.groups.items():
        now = [min(rows[r].links[axis] for r in ranks) for ranks in groups]
        sisters = _beyond(now)
        for i, ranks in enumerate(groups):
            then = min(before[r].links[axis] for r in ranks) + max(0.0, median(growth))
            find(ranks, axis, sisters[i] if len(groups) > 1 else now[i] - then)
    found += _clocks(rows, step)
    return max(found, key=lambda slow: slow.seconds, default=None)


def _beyond(values: Sequence[float]) -> list[float]:
    """Return each value minus the median; of two values, each minus the other."""
    if len(values) == 2:
        return [values[0] - values[1], values[1] - values[0]]
    usual = median(values)
    return [value - usual for value in values]


def _clocks(rows: Sequence[Row], step: float) -> list[Slow]:
    """Return the GPUs whose clock is below the others', with the time that may cost."""
    clocks = [row.health.clock for row in rows]
    if any(math.isnan(clock) for clock in clocks):
        return []
    usual = median(clocks)
    return [
        Slow((rank,), "compute", step * (1 - clock / usual), step, rows[rank].health.words())
        for rank, clock in enumerate(clocks)
        if clock < CLOCK * usual
    ]


class SlowRanks:
    """Records this rank's times; where a log line is due, compares all ranks', one line late.

    A finding is printed when it appears twice in a row, and again if it comes back; its values go
    to the log's files.
    """

    def __init__(self, grid: Grid, device: torch.device, log: Log) -> None:
        self.grid, self.device, self.log = grid, device, log
        self.layout = Layout.of(grid)
        self._steps = deque[list[float]](maxlen=max(WINDOW, log.config.log_interval))
        self._left, self._waited = WARM, dict(grid.waits.seconds)
        self._gathered: tuple[Tensor, Handle] | None = None
        self._young: list[Row] | None = None
        self._last: tuple[tuple[int, ...], str] | None = None  # the finding of the window before
        self._reported: tuple[tuple[int, ...], str] | None = None

    def after_step(self, step: Step) -> Decision:
        """Count a step that ends now; where a line of the log is due, add values to it."""
        at_interval = self.log.at_interval(step.iteration)
        step.values |= self._count(step.begin, step.waited, at_interval)
        return CONTINUE

    def wait(self) -> None:
        """Wait for the gather of times in flight."""
        if self._gathered is not None:
            self._gathered[1].wait()

    def _count(self, begin: float, data: float, at_interval: bool) -> dict[str, float]:
        waits, before = dict(self.grid.waits.seconds), self._waited
        self._waited = waits
        self._left -= 1
        seconds = time.perf_counter() - begin
        if self._left < 0:
            spent = {name: waits[name] - before.get(name, 0.0) for name in waits}
            links = [sum(spent.get(name, 0.0) for name in names) for names in LINKS.values()]
            own = seconds - data - sum(spent.values())
            self._steps.append([seconds, data, own, *links])
        if not at_interval or len(self._steps) < WINDOW // 2:
            return {}
        slow = self._read() if self._gathered is not None else None
        mine = torch.tensor([self._middle()], dtype=torch.float64, device=self.device)
        label = Label("slow ranks", "times")
        self._gathered = all_gather(mine, self.grid.world, async_op=True, label=label)
        if slow is None:
            return {"slow_rank_seconds": 0.0}
        return {"slow_rank": float(slow.ranks[0]), "slow_rank_seconds": slow.seconds}

    def _middle(self) -> list[float]:
        """Return this rank's median step, as `_row` reads it."""
        middle = [median(column) for column in zip(*self._steps, strict=True)]
        noise = median(abs(step[2] - middle[2]) for step in self._steps)
        return [*middle, noise, *read_health(self.device)]

    def _read(self) -> Slow | None:
        """Return the finding of the last gathered window, and print it if it is new."""
        assert self._gathered is not None
        every, handle = self._gathered
        handle.wait()
        if self.grid.rank > 0:
            return None
        rows = [_row(line) for line in every.tolist()]
        slow = diagnose(rows, self.layout, self._young)
        if self._young is None and len(self._steps) == self._steps.maxlen:
            self._young = rows
        name = (slow.ranks, slow.what) if slow is not None and slow.counts else None
        if name is not None and name == self._last and name != self._reported:
            self.log.note(str(slow))  # seen twice: not noise
            self._reported = name
        if name is None:
            self._reported = None
        self._last = name
        return slow

    def __enter__(self) -> "SlowRanks":
        return self

    def __exit__(self, kind: type | None, error: object, trace: object) -> None:
        if kind is None:
            self.wait()


def _row(numbers: list[float]) -> Row:
    step, data, own, *links, noise, clock, heat, power = numbers
    waits = dict(zip(LINKS, links, strict=True))
    return Row(step, data, own, noise=noise, links=waits, health=Health(clock, heat, power))
