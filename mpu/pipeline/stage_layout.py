# SPDX-License-Identifier: Apache-2.0
"""Decide which part of the model each pipeline stage holds: cut L layers over p v stages.

A model is one embedding, L layers and one head with the loss. By default the cut balances the cost
of the ranks; it can also be given explicitly:

    "Et*3|(tt|)*2ttL"    Ettt | tt | tt | ttL        E embedding, t layer, L loss, | next stage
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import inf

from mpu.pipeline.schedules import stage_of

LONGEST = 100_000  # symbols of an expanded layout: a longer one is rejected as a mistake
DEEPEST = 100  # the most parentheses


@dataclass(frozen=True)
class Stage:
    """One stage: layers [first, last). loss: it also has the final norm, the head and the loss."""

    first: int
    last: int
    embedding: bool = False
    loss: bool = False

    @property
    def layers(self) -> range:
        """Return the indices of its layers."""
        return range(self.first, self.last)


@cache
def stages(
    costs: tuple[float, ...],
    p: int,
    v: int = 1,
    v_shape: bool = False,
    *,
    embedding_cost: float = 0.0,
    head_cost: float = 0.0,
    layout: str | None = None,
) -> tuple[Stage, ...]:
    """Cut the layers over p ranks of v stages each; return the p v stages in order.

    costs: of each layer, in any unit; embedding_cost and head_cost are in the same unit.
    layout: an explicit cut; None: balance the costs. Raises ValueError if the layout does not match
    the sizes, or a rank would hold nothing: no layer is ever dropped.
    """
    num_layers = len(costs)
    own = [[stage_of(rank, chunk, p, v_shape) for chunk in range(v)] for rank in range(p)]
    if layout is not None:
        counts = _written(layout, num_layers, p * v)
    else:
        counts = _balanced(costs, own, embedding_cost, head_cost)

    for rank, stages_of_rank in enumerate(own):
        if not any(counts[s] or s in (0, p * v - 1) for s in stages_of_rank):
            raise ValueError(
                f"pipeline rank {rank} would have no layers: an embedding, a head and {num_layers} "
                f"layer{'s' * (num_layers > 1)} over {p} ranks"
            )
    return tuple(
        Stage(end - count, end, embedding=stage == 0, loss=stage == p * v - 1)
        for stage, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True))
    )


def _balanced(
    costs: tuple[float, ...], own: list[list[int]], embedding_cost: float, head_cost: float
) -> list[int]:
    """Return the number of layers of each stage that minimises the work of the slowest rank.

    own: the stages of each rank. The cut is optimal if all layers are equal or each rank has one
    stage; else it is a local optimum with respect to moving single layers.
    """
    if len(set(costs)) <= 1:
        return _balanced_equal(costs, own, embedding_cost, head_cost)
    stages = sum(map(len, own))
    ends = [0.0] * stages
    ends[0] += embedding_cost
    ends[-1] += head_cost
    if stages == len(own):
        return _contiguous(costs, ends, least=int(len(costs) >= stages - 2))
    return _improved(costs, own, ends, _contiguous(costs, ends, least=0))


def _balanced_equal(
    costs: tuple[float, ...], own: list[list[int]], embedding_cost: float, head_cost: float
) -> list[int]:
    """Assign each layer to the rank with the least work, and there to the stage with the least.

    As layers are equal, no other cut has a faster slowest rank. Among ranks with equal work an
    empty one comes first, then the later one, which holds fewer micro-batches' activations.
    """
    last = sum(map(len, own)) - 1
    counts = [0] * (last + 1)
    one = costs[0] if costs else 0.0

    def work(stages: list[int]) -> float:
        ends = head_cost * (last in stages) + embedding_cost * (0 in stages)
        return one * sum(counts[s] for s in stages) + ends

    def least(rank: int) -> tuple[float, bool, int]:
        holds = any(counts[s] or s in (0, last) for s in own[rank])
        return work(own[rank]), holds, -rank

    keys = [*map(least, range(len(own)))]
    for _ in costs:
        rank = keys.index(min(keys))
        counts[min(own[rank], key=lambda s: (work([s]), -s))] += 1
        keys[rank] = least(rank)  # the keys of the other ranks are unchanged
    return counts


def _contiguous(costs: tuple[float, ...], ends: list[float], least: int) -> list[int]:
    """Cut the layers into stages, each a rank of its own, by dynamic programming.

    ends: work of each stage besides its layers. least: the fewest layers of every stage but the
    first and the last. The cut minimises the slowest stage's work, and among such cuts the sum of
    squares of the stages' work.
    """
    total, stages, layers = [0.0, *accumulate(costs)], len(ends), len(costs)

    def best(value: Callable[[float, float], float], limit: float) -> tuple[float, list[int]]:
        """Return the minimum of value(before, work) over cuts with no stage above `limit`, and the
        layers of each stage.
        """
        found = [0.0] + [inf] * layers  # [i]: the minimum for the first i layers on stages so far
        froms: list[list[int]] = []
        for stage in range(stages):
            few = least if 0 < stage < stages - 1 else 0
            now, origin = [inf] * (layers + 1), [0] * (layers + 1)
            for i in range(few, layers + 1):
                for j in range(i - few, -1, -1):
                    work = total[i] - total[j] + ends[stage]
                    if work > limit or value(0.0, work) >= now[i]:
                        break  # one more layer only adds to it
                    new = value(found[j], work)
                    if new < now[i]:
                        now[i], origin[i] = new, j
            found = now
            froms.append(origin)
        counts, at = [], layers
        for origin in reversed(froms):
            counts.append(at - origin[at])
            at = origin[at]
        return found[layers], counts[::-1]

    slowest, _ = best(max, inf)
    return best(lambda before, work: before + work * work, slowest)[1]


def _improved(
    costs: tuple[float, ...], own: list[list[int]], ends: list[float], counts: list[int]
) -> list[int]:
    """Move a layer from one stage to another while that improves `rating`; return the counts.

    The stages between the two shift by a layer and keep their counts. It tries moves between
    neighbouring stages, and from the slowest rank's stages to any at most len(own) stages away.
    """
    total, last = [0.0, *accumulate(costs)], len(ends) - 1

    def work_of(counts: list[int]) -> list[float]:
        bounds = [0, *accumulate(counts)]
        stage = [total[bounds[s + 1]] - total[bounds[s]] + end for s, end in enumerate(ends)]
        return [sum(stage[s] for s in stages_of_rank) for stages_of_rank in own]

    def rating(counts: list[int]) -> tuple[int, float, float]:
        """Return the number of empty ranks, the slowest rank's work, and all work squared."""
        work = work_of(counts)
        empty = sum(
            not any(counts[s] or s in (0, last) for s in stages_of_rank) for stages_of_rank in own
        )
        return empty, max(work), sum(w * w for w in work)

    def moved(source: int, to: int) -> list[int]:
        return [n + (s == to) - (s == source) for s, n in enumerate(counts)]

    while True:
        now, work = rating(counts), work_of(counts)
        slowest = own[work.index(max(work))]
        pairs = [(s, to) for s in slowest for to in range(s - len(own), s + len(own) + 1)]
        pairs += [(s, s + step) for s in range(last + 1) for step in (-1, 1)]
        tries = (moved(s, to) for s, to in pairs if counts[s] and 0 <= to <= last and to != s)
        better = next((other for other in tries if rating(other) < now), None)
        if better is None:
            return counts
        counts = better


def _written(layout: str, num_layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage of a layout; raise ValueError if it is invalid."""
    texts = read_layout(layout)
    if len(texts) != stages:
        raise ValueError(f"it has {len(texts)} stages, but {stages} are needed")
    chars = "".join(texts)
    for symbol, end, where in (("E", texts[0][:1], "first"), ("L", texts[-1][-1:], "last")):
        if chars.count(symbol) != 1 or end != symbol:
            raise ValueError(
                f"{symbol} must be the {where} symbol, and occur once; it has {chars.count(symbol)}"
            )
    if chars.count("t") != num_layers:
        raise ValueError(
            f"the number of t's must be that of the layers, {num_layers}, not {chars.count('t')}"
        )
    return [text.count("t") for text in texts]


def read_layout(text: str) -> list[str]:
    """Expand a layout into one string of E, t and L for each stage.

    Commas and blanks are ignored; `*3` repeats the symbol or the parentheses before it.
    Raises ValueError, naming the text that it cannot parse.
    """
    words = re.findall(r"\d+|[^\s,]", text)
    if words.count("(") > DEEPEST:
        raise ValueError(f"it has more than {DEEPEST} parentheses")
    out, left = _sequence(words, 0)
    if left < len(words):
        raise ValueError("a ) has no matching (")
    return out.split("|")


def _sequence(words: list[str], at: int) -> tuple[str, int]:
    """Expand words[at:] up to its end or a closing parenthesis; return the text and that place."""
    out = ""
    while at < len(words) and words[at] != ")":
        item, at = words[at], at + 1
        if item == "(":
            item, at = _sequence(words, at)
            if at == len(words):
                raise ValueError("a ( has no matching )")
            at += 1
        elif item == "m":
            raise ValueError("m (multi-token prediction) is not available")
        elif item not in "EtL|":
            raise ValueError(
                f"{item} is none of E (embedding), t (layer), L (loss), | (next stage), ( ) and *n"
            )
        if words[at : at + 1] == ["*"]:
            times = words[at + 1] if at + 1 < len(words) else ""
            if not times.isdecimal() or int(times) < 1:
                raise ValueError(f"* must be followed by a whole number >= 1, not by '{times}'")
            if len(times) > 9 or len(item) * int(times) > LONGEST:
                raise ValueError(f"*{times} makes it longer than {LONGEST:,} symbols")
            item, at = item * int(times), at + 2
        out += item
        if len(out) > LONGEST:
            raise ValueError(f"it is longer than {LONGEST:,} symbols")
    return out, at
