# SPDX-License-Identifier: Apache-2.0
"""Seconds of a collective or a message over levels of links: an alpha-beta model.

It is the model by which NCCL chooses its algorithm and protocol (src/graph/tuning.cc,
ncclTopoTuneModel): a base, a latency per step, and bytes divided by a bus bandwidth; the fastest
choice counts. There are rings for every verb, and trees for all_reduce. One difference: here every
step of a ring has the latency of the outermost level that the group crosses; NCCL counts that
latency for one step of each block. On published runs of many nodes the former is closer
(docs/predictions.md). NVLink SHARP, CollNet and PAT are not modeled.

The functions are pure. Arguments may be arrays over runs, for the planner, or single numbers, for
the rehearsal.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forecast.device_file import PROTOCOLS, Device
from forecast.rehearsal.roofline import Numbers, Quantity

Steps = Sequence[float]
# shares of the bus bandwidth, (tree, ring) for each of PROTOCOLS: tuning.cc
SHARES = ((1 / 3.8, 0.5), (0.86, 0.92), (0.92, 1.0))
ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}  # rounds of a ring


class Span(NamedTuple):
    """How a group is placed on one level.

    level: its index. blocks: most blocks of the level below that the group has ranks in, within one
    block of this level; 1: the group does not cross this level. members: most ranks of the group in
    one block of the level below.
    """

    level: int
    blocks: Quantity
    members: Quantity


class Way(NamedTuple):
    """An algorithm and protocol of NCCL.

    tree: a tree, which only all_reduce uses; else a ring. share: of the bus bandwidth. base:
    seconds of each collective. steps: seconds of a step, by level. limit: most bytes per second.
    """

    tree: bool
    share: float
    base: float
    steps: Sequence[Quantity]
    limit: float = np.inf


class Links(NamedTuple):
    """The properties of links by level, inner ones first: numbers, or arrays over runs.

    rates: bytes per second of one GPU in one direction. start: seconds added to every collective.
    ways: choices of a collective, the Simple ring last; the fastest counts. message: latency of a
    message in seconds. decay: outer levels' rates are divided by the number of blocks to this
    power.
    """

    rates: Sequence[Quantity]
    start: Quantity
    ways: Sequence[Way]
    message: Sequence[Quantity]
    decay: Quantity = 0.0


def ways_of(device: Numbers, rings: Sequence[Steps], trees: Sequence[Steps]) -> list[Way]:
    """Return NCCL's algorithms. rings, trees: seconds of a step, by level and protocol."""
    ways = list[Way]()
    for place, (protocol, shares) in enumerate(zip(PROTOCOLS, SHARES, strict=True)):
        limit = np.inf if place else device["low_latency_bandwidth"]  # LL has its own limit
        for kind, share, levels in zip(("tree", "ring"), shares, (trees, rings), strict=True):
            steps = [level[place] for level in levels]
            base = device[f"{kind}_base.{protocol}"]
            ways.append(Way(kind == "tree", share, base, steps, limit))
    return ways


def links_of(device: Device) -> Links:
    """Return the links of a device file."""
    outer = device["network_share"] / device["oversubscription"]
    shares = [device["link_share"], *[outer] * (len(device.levels) - 1)]
    levels = device.levels
    rings, trees = ([getattr(level, kind) for level in levels]
                    for kind in ("step_seconds", "tree_seconds"))  # fmt: skip
    return Links(
        rates=[level.bandwidth * share for level, share in zip(levels, shares, strict=True)],
        start=device["collective_start"],
        ways=ways_of(device, rings, trees),
        message=[device["ring_base.LL"] + level.step_seconds[-1] for level in levels],
    )


def spans(blocks: Sequence[int], group: Sequence[int]) -> list[Span]:
    """Return the levels that a group of world ranks crosses, inner ones first.

    blocks: number of ranks that each level joins, inner levels first; 0: all.
    """
    found = []
    below = 1
    for number, size in enumerate(blocks):
        block = size or max(group) + 1
        members = Counter(rank // below for rank in group)
        homes = Counter(home * below // block for home in members)
        if max(homes.values()) > 1:
            found.append(Span(number, max(homes.values()), max(members.values())))
        if len(homes) == 1:
            break
        below = block
    return found


def strided(size: Quantity, stride: Quantity, node: Quantity) -> list[Span]:
    """Return the spans of groups of `size` ranks, `stride` apart, over nodes and their network."""
    inside = np.minimum(size, np.maximum(1.0, np.floor(node / stride)))
    return [Span(0, inside, 1.0), Span(1, np.ceil(size / inside), inside)]


def collective(
    links: Links, verb: str, sent: Quantity, n: Quantity, crossed: Sequence[Span]
) -> Quantity:
    """Return the seconds of a collective of n ranks. sent: bytes of one rank's input.

    A block with g members of the group has g rings through g network cards, so the bandwidth of the
    rings is the least over the crossed levels of g times the rate of a GPU. Raises ValueError for
    an unknown verb.
    """
    if verb != "all_to_all" and verb not in ROUNDS:
        raise ValueError(f"{verb} is no collective that a device file can time")
    seconds = (_all_to_all if verb == "all_to_all" else _ring_or_tree)(
        links, verb, sent, n, crossed
    )
    return np.where((np.asarray(n) > 1) & (np.asarray(sent) > 0), links.start + seconds, 0.0)


def _rate(links: Links, span: Span) -> Quantity:
    """Return the bytes per second of one GPU across a level, infinite if it is not crossed."""
    rate = links.rates[span.level]
    if span.level and np.any(links.decay):
        rate = rate / np.maximum(1.0, span.blocks) ** links.decay
    return np.where(span.blocks > 1, rate, np.inf)


def _ring_or_tree(
    links: Links, verb: str, sent: Quantity, n: Quantity, crossed: Sequence[Span]
) -> Quantity:
    steps = ROUNDS[verb] * (n - 1)
    carried = steps * (sent if verb == "all_gather" else sent / n)  # bytes of each rank in a ring
    bus: Quantity = np.inf
    for span in crossed:
        bus = np.minimum(bus, _rate(links, span) * span.members)
    best: Quantity = np.inf
    for way in links.ways:
        rate = np.minimum(bus * way.share, way.limit)
        if not way.tree:
            seconds = steps * _outermost(way, crossed) + carried / rate
        elif verb == "all_reduce":
            seconds = _tree(way, crossed) + 2 * sent / rate
        else:
            continue
        best = np.minimum(best, way.base + seconds)
    return best


def _outermost(way: Way, crossed: Sequence[Span]) -> Quantity:
    """Return the seconds of a step across the outermost level that a group crosses."""
    step: Quantity = 0.0
    for span in crossed:
        step = np.where(span.blocks > 1, way.steps[span.level], step)
    return step


def _tree(way: Way, crossed: Sequence[Span]) -> Quantity:
    """Return the seconds of a tree's steps, up and down: chains in nodes, a binary tree outside."""
    seconds: Quantity = 0.0
    for span in crossed:
        depth = np.ceil(np.log2(span.blocks)) if span.level else span.blocks - 1
        seconds = seconds + 2 * depth * way.steps[span.level]
    return seconds


def _all_to_all(
    links: Links, verb: str, sent: Quantity, n: Quantity, crossed: Sequence[Span]
) -> Quantity:
    """Return the time of the slowest level; every rank sends 1/n of its input to each other one."""
    seconds: Quantity = 0.0
    inside: Quantity = 1
    for span in crossed:
        reached = inside * span.blocks  # ranks within this level's block
        share = sent * np.minimum(reached - inside, n - inside) / n
        seconds = np.maximum(seconds, share / _rate(links, span))
        inside = reached
    simple = links.ways[-1]
    return seconds + simple.base + _outermost(simple, crossed)


def message(links: Links, sent: Quantity, level: Quantity) -> Quantity:
    """Return the seconds of a message between two ranks that a level joins."""
    rate, start = (np.choose(level, values) for values in (links.rates, links.message))
    return start + sent / rate


def bandwidth(device: Device, level: int) -> float:
    """Return the bytes per second of one GPU across a level in one direction."""
    return float(links_of(device).rates[level])


def collective_seconds(device: Device, verb: str, sent: float, group: Sequence[int]) -> float:
    """Return the seconds of a collective of world ranks: see `collective`."""
    if len(group) == 1:
        return 0.0
    return float(collective(links_of(device), verb, sent, len(group), spans(device.blocks, group)))


def message_seconds(device: Device, sent: float, a: int, b: int) -> float:
    """Return the seconds of a message between two world ranks."""
    return float(message(links_of(device), sent, spans(device.blocks, (a, b))[-1].level))
