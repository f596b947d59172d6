# SPDX-License-Identifier: Apache-2.0
"""Seconds of a collective or a message over levels of links: alpha and beta.

The model is that by which NCCL chooses among its own algorithms and protocols (src/graph/tuning.cc,
ncclTopoTuneModel): a base, a latency for each step, and bytes over a bus bandwidth; the fastest
counts. Rings for every verb, trees for all_reduce. One difference: every step of a ring takes the
latency of the outermost level that the group crosses. NCCL counts that for one step of a block; on
published runs of many nodes the former is nearer (docs/predictions.md). Not in it: NVLink SHARP,
CollNet and PAT.

The functions are pure. Sizes and numbers may be arrays over runs, for the planner, or single
numbers, for the rehearsal.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forecast.device_file import PROTOCOLS, Device
from forecast.rehearsal.roofline import Numbers, Quantity

Steps = Sequence[float]
# of the bus bandwidth, by PROTOCOLS, of trees and of rings: tuning.cc
SHARES = ((1 / 3.8, 0.5), (0.86, 0.92), (0.92, 1.0))
ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}  # of a ring


class Span(NamedTuple):
    """How a group lies on one level.

    level: its number. blocks: those of the level below that the group touches in one block of this
    level, at most; 1: the group does not cross it. members: ranks of the group in one block of the
    level below, at most.
    """

    level: int
    blocks: Quantity
    members: Quantity


class Way(NamedTuple):
    """A protocol of rings, or of trees, that a collective may take.

    tree: whether it is one of trees, which only an all_reduce takes. share: of the bus bandwidth.
    base: seconds of a collective. steps: of a step, by level. limit: bytes a second, at most.
    """

    tree: bool
    share: float
    base: float
    steps: Sequence[Quantity]
    limit: float = np.inf


class Links(NamedTuple):
    """What links do, by level, inner ones first: numbers, or arrays over runs.

    rates: bytes a second that one GPU gets in one direction. start: seconds of every collective.
    ways: those that a collective may take, a ring of Simple last; the fastest counts. message:
    seconds before the first byte of a message. decay: power of the number of blocks by which the
    outer levels' rates fall.
    """

    rates: Sequence[Quantity]
    start: Quantity
    ways: Sequence[Way]
    message: Sequence[Quantity]
    decay: Quantity = 0.0


def ways_of(device: Numbers, rings: Sequence[Steps], trees: Sequence[Steps]) -> list[Way]:
    """Return NCCL's ways. rings, trees: seconds of a step, by level and protocol."""
    ways = list[Way]()
    for place, (protocol, shares) in enumerate(zip(PROTOCOLS, SHARES, strict=True)):
        limit = np.inf if place else device["low_latency_bandwidth"]  # LL has one of its own
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

    blocks: the ranks that each level joins, inner levels first; 0: all.
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
    """Return how groups of `size` ranks, `stride` apart, lie in nodes and on their network."""
    inside = np.minimum(size, np.maximum(1.0, np.floor(node / stride)))
    return [Span(0, inside, 1.0), Span(1, np.ceil(size / inside), inside)]


def collective(
    links: Links, verb: str, sent: Quantity, n: Quantity, crossed: Sequence[Span]
) -> Quantity:
    """Return the seconds of a collective of n ranks. sent: bytes of one rank's input.

    A block with g members of the group has g rings through g network cards: the group's rings have
    the least over its levels of what a GPU gets times g. Raises ValueError for a verb that is no
    collective.
    """
    if verb != "all_to_all" and verb not in ROUNDS:
        raise ValueError(f"{verb} is no collective that a device file can time")
    seconds = (_all_to_all if verb == "all_to_all" else _ring_or_tree)(
        links, verb, sent, n, crossed
    )
    return np.where((np.asarray(n) > 1) & (np.asarray(sent) > 0), links.start + seconds, 0.0)


def _rate(links: Links, span: Span) -> Quantity:
    """Return the bytes a second of one GPU across a level, infinite where it is not crossed."""
    rate = links.rates[span.level]
    if span.level and np.any(links.decay):
        rate = rate / np.maximum(1.0, span.blocks) ** links.decay
    return np.where(span.blocks > 1, rate, np.inf)


def _ring_or_tree(
    links: Links, verb: str, sent: Quantity, n: Quantity, crossed: Sequence[Span]
) -> Quantity:
    steps = ROUNDS[verb] * (n - 1)
    carried = steps * (sent if verb == "all_gather" else sent / n)  # by a ring
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
    """Return the seconds of a tree's steps, up and down: a chain in a node, then a binary tree."""
    seconds: Quantity = 0.0
    for span in crossed:
        depth = np.ceil(np.log2(span.blocks)) if span.level else span.blocks - 1
        seconds = seconds + 2 * depth * way.steps[span.level]
    return seconds


def _all_to_all(
    links: Links, verb: str, sent: Quantity, n: Quantity, crossed: Sequence[Span]
) -> Quantity:
    """Return the slowest level's time; every rank sends 1/n of its input to every other."""
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
    """Return bytes a second that one GPU gets across a level in one direction."""
    return float(links_of(device).rates[level])


def collective_seconds(device: Device, verb: str, sent: float, group: Sequence[int]) -> float:
    """Return the seconds of a collective of world ranks: see `collective`."""
    if len(group) == 1:
        return 0.0
    return float(collective(links_of(device), verb, sent, len(group), spans(device.blocks, group)))


def message_seconds(device: Device, sent: float, a: int, b: int) -> float:
    """Return the seconds of a message between two world ranks."""
    return float(message(links_of(device), sent, spans(device.blocks, (a, b))[-1].level))
