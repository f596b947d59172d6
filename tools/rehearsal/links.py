# SPDX-License-Identifier: Apache-2.0
"""Seconds of a collective or a message over a device's levels of links: alpha and beta.

The model is that by which NCCL chooses among its own algorithms and protocols (src/graph/tuning.cc,
ncclTopoTuneModel): a base, a latency for each step, and bytes over a bus bandwidth; the fastest
counts. Rings for every verb, trees for all_reduce. Not in it: NVLink SHARP, CollNet and PAT.
Pure functions of sizes, groups and a device file's numbers.
"""

from collections import Counter
from collections.abc import Sequence
from math import ceil, log2
from typing import NamedTuple

from tools.rehearsal.device_file import PROTOCOLS, Device

RING_SHARE = {"LL": 0.5, "LL128": 0.92, "Simple": 1.0}  # of the bus bandwidth: tuning.cc
TREE_SHARE = {"LL": 1 / 3.8, "LL128": 0.86, "Simple": 0.92}
LOW_LATENCY = 0  # PROTOCOLS' place of LL, which has a limit of its own


class Span(NamedTuple):
    """How a group lies on one level.

    level: its number. blocks: those of the level below that the group touches in one block of this
    level, at most. members: ranks of the group in one block of the level below, at most.
    """

    level: int
    blocks: int
    members: int


def spans(device: Device, group: Sequence[int]) -> list[Span]:
    """Return the levels that a group of world ranks crosses, inner ones first."""
    found = []
    below = 1
    for number, level in enumerate(device.levels):
        block = level.ranks or max(group) + 1
        members = Counter(rank // below for rank in group)
        homes = Counter(home * below // block for home in members)
        if max(homes.values()) > 1:
            found.append(Span(number, max(homes.values()), max(members.values())))
        if len(homes) == 1:
            break
        below = block
    return found


def bandwidth(device: Device, level: int) -> float:
    """Return bytes a second that one GPU gets across a level in one direction."""
    link = device.levels[level].bandwidth
    if level == 0:
        return link * device["link_share"]
    return link * device["network_share"] / device["oversubscription"]


def bus_bandwidth(device: Device, crossed: Sequence[Span]) -> float:
    """Return the bytes a second of the group's rings together.

    A block with g members of the group has g rings through g network cards.
    """
    return min(bandwidth(device, span.level) * span.members for span in crossed)


def collective_seconds(device: Device, verb: str, sent: float, group: Sequence[int]) -> float:
    """Return the seconds of a collective. sent: bytes of one rank's input.

    Raises ValueError for a verb that is no collective.
    """
    n = len(group)
    if n == 1 or not sent:
        return 0.0
    crossed = spans(device, group)
    if verb == "all_to_all":
        return device["collective_start"] + _all_to_all(device, sent, n, crossed)
    steps = {"all_gather": n - 1, "reduce_scatter": n - 1, "all_reduce": 2 * (n - 1)}.get(verb)
    if steps is None:
        raise ValueError(f"{verb} is no collective that a device file can time")
    part = sent if verb == "all_gather" else sent / n  # what one step of a ring carries
    bus = bus_bandwidth(device, crossed)
    best = float("inf")
    for place, protocol in enumerate(PROTOCOLS):
        limit = device["low_latency_bandwidth"] if place == LOW_LATENCY else float("inf")
        ring = _ring_latency(device, crossed, steps, place, n)
        best = min(best, ring + steps * part / min(bus * RING_SHARE[protocol], limit))
        if verb == "all_reduce":
            rate = min(bus * TREE_SHARE[protocol], limit)
            best = min(best, _tree_latency(device, crossed, place) + 2 * sent / rate)
    return device["collective_start"] + best


def _ring_latency(device: Device, crossed: Sequence[Span], steps: int, place: int, n: int) -> float:
    """Return base and steps of a ring: each block is left once a round, by its outermost level."""
    seconds = device[f"ring_base.{PROTOCOLS[place]}"]
    rounds = steps / (n - 1)
    left: float = steps
    for span in reversed(crossed):
        outer = min(left, rounds * (span.blocks - 1)) if span.level else left
        seconds += outer * device.levels[span.level].step_seconds[place]
        left -= outer
    inner = device.levels[crossed[0].level].step_seconds[place]
    return float(seconds + left * inner)


def _tree_latency(device: Device, crossed: Sequence[Span], place: int) -> float:
    """Return base and steps of a tree, up and down: a chain in a node, then a binary tree."""
    seconds = device[f"tree_base.{PROTOCOLS[place]}"]
    for span in crossed:
        steps = span.blocks - 1 if span.level == 0 else ceil(log2(span.blocks))
        seconds += 2 * steps * device.levels[span.level].tree_seconds[place]
    return float(seconds)


def _all_to_all(device: Device, sent: float, n: int, crossed: Sequence[Span]) -> float:
    """Return the slowest level's time; every rank sends 1/n of its input to every other."""
    seconds = 0.0
    inside = 1
    for span in crossed:
        reached = inside * span.blocks  # ranks within this level's block
        share = sent * min(reached - inside, n - inside) / n
        seconds = max(seconds, share / bandwidth(device, span.level))
        inside = reached
    latency = device.levels[crossed[-1].level].step_seconds[-1]
    return seconds + device["ring_base.Simple"] + latency


def message_seconds(device: Device, sent: float, a: int, b: int) -> float:
    """Return the seconds of a message between two world ranks."""
    level = spans(device, (a, b))[-1].level
    rate = bandwidth(device, level)
    return device["ring_base.LL"] + device.levels[level].step_seconds[-1] + sent / rate
