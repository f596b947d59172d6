# SPDX-License-Identifier: Apache-2.0
"""Rank the orders in which ranks may count along the axes, by what crosses which level of links.

`across` is a pure function of the grid, the levels and what each rank sends; `ledger` reads the
latter from forecast/traffic.py, which is exact. In a ring each rank of a group sends to the next
one, the ranks in ascending order; a verb that goes in pairs sends an equal part to every other
rank. On gloo a reduce-scatter does (docs/numerics.md).

Ranks count along the axes of an order, the fastest first: --rank-order tp-cp-dp-pp.
"""

import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import pretrain_llama
from forecast.planner.cluster import Cluster, Level
from forecast.planner.model import REST, Model, read_flags
from forecast.recording import record
from forecast.rehearsal.links import ROUNDS, Links, Way, collective, message, spans
from forecast.traffic import rows
from mpu.grid import ORDER, Grid, Groups
from mpu.launch import Launch
from training.run.model_profile import make_grid
from training.run.text import aligned, in_units
from training.settings.config import Config

NCCL, GLOO = frozenset({"all_to_all"}), frozenset({"all_to_all", "reduce_scatter"})
AXES = {"pp_back": "pp"}  # the ranks of both are a pipeline's
WORTH = 0.01  # share of the time by which another order must be faster


class Flow(NamedTuple):
    """What every rank at `pp_rank` sends over an axis in a step. to: of a message, its pp rank.

    calls: collectives, or messages. sent: bytes, all calls together.
    """

    axis: str
    verb: str
    pp_rank: int
    calls: int
    sent: int
    to: int = -1


def ledger(config: Config) -> list[Flow]:
    """Return what the ranks of a run send in a step, its scalars too."""
    found = Counter[tuple[str, str, int, int]](), Counter[tuple[str, str, int, int]]()
    for rank, recording in record(config, pretrain_llama).items():
        for row in rows(recording):
            if row.sent:
                key = AXES.get(row.axis, row.axis), row.verb, rank, row.peer
                found[0][key] += row.times
                found[1][key] += row.sent
    return [Flow(*key[:3], calls, found[1][key], key[3]) for key, calls in found[0].items()]


def level_of(levels: Sequence[Level], one: Groups, other: Groups) -> Groups:
    """Return the number of the innermost level that joins each pair of ranks."""
    found = np.full(np.broadcast_shapes(one.shape, other.shape), len(levels) - 1)
    for n in range(len(levels) - 1, -1, -1):
        block = levels[n].gpus
        if block:
            found = np.where(one // block == other // block, n, found)
    return found


class Pairs(NamedTuple):
    """Bytes from ranks to ranks, pair by pair."""

    source: Groups
    target: Groups
    sent: npt.NDArray[np.float64]


def pairs(axis: str, grid: Grid, flows: Sequence[Flow], spread: Collection[str] = NCCL) -> Pairs:
    """Return who sends whom how many bytes of an axis. spread: the verbs that go in pairs."""
    found, places = grid.groups(axis), grid.groups("pp")  # [others, pp]
    at = np.empty(grid.world_size, dtype=np.intp)
    at[places] = np.arange(grid.pp_size)
    n = found.shape[1]
    parts: list[Pairs] = []
    for ways in (True, False):  # to all others in the group, or to the next
        of_axis = [f for f in flows if f.axis == axis and f.to < 0 and (f.verb in spread) == ways]
        by_stage = np.zeros(grid.pp_size)
        for flow in of_axis:
            by_stage[flow.pp_rank] += flow.sent
        if n == 1 or not by_stage.any():
            continue
        for step in range(1, n if ways else 2):
            target = np.roll(found, -step, axis=1)
            share = by_stage[at[found]] / (n - 1 if ways else 1)
            parts.append(Pairs(found.ravel(), target.ravel(), share.ravel()))
    for flow in flows:
        if flow.axis == axis and flow.to >= 0:
            source, target = places[:, flow.pp_rank], places[:, flow.to]
            parts.append(Pairs(source, target, np.full(len(source), float(flow.sent))))
    if not parts:
        nobody = np.zeros(0, dtype=np.intp)
        return Pairs(nobody, nobody, np.zeros(0))
    return Pairs(*(np.concatenate([part[i] for part in parts]) for i in range(3)))


def across(
    grid: Grid, levels: Sequence[Level], flows: Sequence[Flow], spread: Collection[str] = NCCL
) -> dict[str, list[int]]:
    """Return {axis: bytes of a step over each level's links, of all ranks together}."""
    of_axes = {}
    for axis in dict.fromkeys(flow.axis for flow in flows):
        sent = pairs(axis, grid, flows, spread)
        at = level_of(levels, sent.source, sent.target)
        sums = np.bincount(at, weights=sent.sent, minlength=len(levels))
        of_axes[axis] = [round(each) for each in sums]
    return of_axes


def seconds(grid: Grid, levels: Sequence[Level], flows: Sequence[Flow]) -> dict[str, float]:
    """Return {axis: seconds that its bytes of a step need}, each axis alone, nothing hidden.

    Each call takes the time that the rehearsal's clock computes (forecast/rehearsal/links.py), on
    links of one protocol with rings and trees; a flow's calls are equal parts. The pipeline rank
    with the most seconds counts, and of groups that lie differently the slowest.
    """
    links = links_of(levels)
    blocks = [level.gpus for level in levels]
    places = grid.groups("pp")  # [others, pp]
    of_axes = {}
    for axis in dict.fromkeys(flow.axis for flow in flows):
        found = grid.groups(axis)
        n, ways = found.shape[1], [spans(blocks, group) for group in unlike(levels, found)]
        of_rank = defaultdict[int, float](float)
        for flow in flows:
            if flow.axis != axis:
                continue
            sent = flow.sent / flow.calls
            if flow.verb == "send":  # to another stage, or to the next rank of a ring
                source, target = found, np.roll(found, -1, axis=1)
                if flow.to >= 0:
                    source, target = places[:, flow.pp_rank], places[:, flow.to]
                far = level_of(levels, source, target).max()
                each = float(message(links, sent, int(far)))
            else:
                given = input_of(flow.verb, sent, n)
                each = max(float(collective(links, flow.verb, given, n, way)) for way in ways)
            of_rank[flow.pp_rank] += flow.calls * each
        of_axes[axis] = max(of_rank.values())
    return of_axes


def links_of(levels: Sequence[Level]) -> Links:
    """Return the links of a cluster's levels."""
    latencies = [level.latency for level in levels]
    return Links(
        rates=[level.share for level in levels],
        start=0.0,
        ways=[Way(tree, 1.0, 0.0, latencies) for tree in (True, False)],
        message=latencies,
    )


def unlike(levels: Sequence[Level], found: Groups) -> list[list[int]]:
    """Return one of the groups, which ascend, of each way in which these lie on the levels."""
    if found.shape[1] == 1:
        return []
    joints = level_of(levels, found[:, :-1], found[:, 1:])
    _, first = np.unique(joints, axis=0, return_index=True)
    return [found[n].tolist() for n in first]


def input_of(verb: str, sent: float, n: int) -> float:
    """Return the bytes of one rank's input where it sends so many in a ring: see sent_of."""
    total = sent * n / (n - 1) / ROUNDS.get(verb, 1)
    return total / n if verb == "all_gather" else total


@dataclass(frozen=True)
class Choice:
    """An order, the bytes of a step over each level by axis, and the seconds of each axis."""

    order: tuple[str, ...]
    bytes: Mapping[str, list[int]]
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def distinct(grid: Grid) -> list[tuple[str, ...]]:
    """Return the orders that differ in the axes of several ranks, the usual one first."""
    cut = [name for name in ORDER if getattr(grid, name).size > 1]
    rest = [name for name in ORDER if name not in cut]
    return [ORDER, *((*each, *rest) for each in permutations(cut) if list(each) != cut)]


def choices(grid: Grid, levels: Sequence[Level], flows: Sequence[Flow]) -> list[Choice]:
    """Return every order, the fastest first; the usual one before those that gain under WORTH."""
    grids = [replace(grid, order=order) for order in distinct(grid)]
    every = [
        Choice(each.order, across(each, levels, flows), seconds(each, levels, flows))
        for each in grids
    ]
    usual = every[0].total
    return sorted(every, key=lambda c: (usual if c.total > usual * (1 - WORTH) and c.order == ORDER
                                        else c.total, c.order != ORDER))  # fmt: skip


def config_of(model: Model, cluster: Cluster, flags: str) -> Config:
    """Return the run of a model in the layout of some flags. Raises UsageError."""
    given = shlex.split(flags)
    dtype = [] if {"--bf16", "--fp64"} & set(given) else ["--bf16"]
    rest = [word for word in REST.split() if word != "--bf16"]
    return read_flags([*model.flags, *rest, *dtype, *given], cluster.gpus)


def orders(config: Config, cluster: Cluster) -> list[Choice]:
    """Return every order that differs for a run, the one whose transfers take least time first."""
    grid = make_grid(config, Launch(0, config.parallel.world_size))
    return choices(grid, cluster.levels, ledger(config))


def faster(model: Model, cluster: Cluster, flags: str) -> tuple[str, float]:
    """Return the flag of the best order of a layout, and the seconds of transfers that it saves.

    The flag is empty where no order is faster than the usual one. Seconds are of each axis alone.
    """
    found = orders(config_of(model, cluster, flags), cluster)
    if found[0].order == ORDER:
        return "", 0.0
    usual = next(choice for choice in found if choice.order == ORDER)
    return f"--rank-order {'-'.join(found[0].order)}", usual.total - found[0].total


def table(config: Config, cluster: Cluster) -> list[str]:
    """Return the orders with the bytes of a step over each level, and the flag of the first."""
    found, levels = orders(config, cluster), cluster.levels
    world = config.parallel.world_size
    head = ["order", *(f"over {level.name}" for level in levels), "seconds"]
    rows: list[Sequence[str]] = [head]
    for choice in found:
        sums = [sum(column) for column in zip(*choice.bytes.values(), strict=True)] or [0]
        rows.append([
            "-".join(choice.order), *(in_units(each / world) for each in sums),
            f"{choice.total:.3f}",
        ])  # fmt: skip
    best = found[0]
    parts = sorted(best.seconds.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{axis} {seconds:.3f}" for axis, seconds in parts if seconds >= 5e-4)
    return [
        *aligned(rows),
        "bytes that a rank sends in a step, on average; seconds of all transfers, each axis alone "
        "and nothing hidden",
        f"seconds of the first: {listed or 'under a millisecond each'}",
        f"flag of the first: --rank-order {'-'.join(best.order)}",
    ]
