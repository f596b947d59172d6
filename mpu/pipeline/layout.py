# SPDX-License-Identifier: Apache-2.0
"""Say which part of the model each pipeline stage holds: cut L layers over p v stages.

A model is one embedding, L equal layers and one head with the loss. Left alone, the cut balances
the ranks, knowing what the head costs; it can also be even, fixed at the ends, or written out:

    "Et*3|(tt|)*2ttL"    Ettt | tt | tt | ttL        E embedding, t layer, L loss, | next stage
"""

import re
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from mpu.pipeline.schedules import stage_of

LONGEST = 100_000  # symbols of a layout written out: more is a slip of the pen


@dataclass(frozen=True)
class Stage:
    """One stage: the embedding or not, layers [first, last), the final norm with head and loss or
    not.
    """

    first: int
    last: int
    embedding: bool = False
    loss: bool = False

    @property
    def layers(self) -> range:
        """The layers' numbers."""
        return range(self.first, self.last)


@cache
def stages(
    num_layers: int,
    p: int,
    v: int = 1,
    v_shape: bool = False,
    *,
    layer_cost: float = 1.0,
    head_cost: float = 0.0,
    even: bool = False,
    count_embedding: bool = False,
    count_loss: bool = False,
    first_rank: int | None = None,
    last_rank: int | None = None,
    layout: str | None = None,
) -> tuple[Stage, ...]:
    """Cut the layers over p ranks of v stages each; return the p v stages in order.

    layout: as it is written. first_rank, last_rank: that many layers on the first and the last
    rank, the others share the rest evenly. even, or one of the ends counted as a layer: the same
    number on every stage. Else the automatic balance, with the costs of a layer and of the head.
    Raises ValueError where the numbers do not add up: no layer is ever dropped.
    """
    own = [[stage_of(rank, chunk, p, v_shape) for chunk in range(v)] for rank in range(p)]
    if layout is not None:
        counts = _written(layout, num_layers, p * v)
    elif first_rank is not None or last_rank is not None:
        counts = [0] * (p * v)
        ranks = _fixed_ends(num_layers, p, v, first_rank, last_rank)
        for held, layers in zip(own, ranks, strict=True):
            for stage in held:
                counts[stage] = layers // v
    elif even or count_embedding or count_loss:
        counts = _even(num_layers, p * v, count_embedding, count_loss)
    else:
        counts = _balanced(num_layers, own, layer_cost, head_cost)

    for rank, held in enumerate(own):
        if not any(counts[s] or s in (0, p * v - 1) for s in held):
            raise ValueError(
                f"pipeline rank {rank} would hold nothing: an embedding, a head and {num_layers} "
                f"layer{'s' * (num_layers > 1)} over {p} ranks"
            )
    return tuple(
        Stage(end - count, end, embedding=stage == 0, loss=stage == p * v - 1)
        for stage, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True))
    )


def _balanced(
    num_layers: int, own: list[list[int]], layer_cost: float, head_cost: float
) -> list[int]:
    """Give each layer to the rank that has least to do, there to the stage that has least.

    own: the stages of each rank. Layers being equal, no other cut has a faster slowest rank.
    Between equals a rank that holds nothing comes first, then the later one, where fewer
    micro-batches wait for their backward.
    """
    last = sum(map(len, own)) - 1
    counts = [0] * (last + 1)

    def work(stages: list[int]) -> float:  # a look-up in the embedding costs next to nothing
        return layer_cost * sum(counts[s] for s in stages) + head_cost * (last in stages)

    def least(rank: int) -> tuple[float, bool, int]:
        holds = any(counts[s] or s in (0, last) for s in own[rank])
        return work(own[rank]), holds, -rank

    for _ in range(num_layers):
        rank = min(range(len(own)), key=least)
        counts[min(own[rank], key=lambda s: (work([s]), -s))] += 1
    return counts


def _even(num_layers: int, stages: int, embedding: bool, loss: bool) -> list[int]:
    """Put the same number on every stage; an end that is counted stands in a layer's place."""
    things = num_layers + embedding + loss
    if things % stages:
        ends = " and the embedding" * embedding + " and the loss" * loss
        raise ValueError(
            f"{num_layers} layers{ends}{f', {things} in all,' if ends else ''} do not divide over "
            f"{stages} stages"
        )
    counts = [things // stages] * stages
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _fixed_ends(num_layers: int, p: int, v: int, first: int | None, last: int | None) -> list[int]:
    """Return the layers of each rank: the ends' as told, the rest evenly, each over v chunks."""
    given = [n for n in (first, last) if n is not None]
    between, rest = p - len(given), num_layers - sum(given)
    told = f"{num_layers} layers, {' and '.join(map(str, given))} of them at the ends"
    if between < 0:
        raise ValueError(f"{told}: {p} pipeline rank has no two ends")
    if rest < 0:
        raise ValueError(f"{told}: that is more than there are")
    if between == 0 and rest:
        raise ValueError(f"{told}: no other rank is there to hold the other {rest}")
    if between and rest % between:
        raise ValueError(f"{told}: the other {rest} do not divide over the other {between} ranks")
    each = rest // between if between else 0
    ranks = [each] * p
    if first is not None:
        ranks[0] = first
    if last is not None:
        ranks[-1] = last
    for rank, layers in enumerate(ranks):
        if layers % v:
            raise ValueError(
                f"{told}: the {layers} of pipeline rank {rank} do not divide over its {v} "
                "virtual stages"
            )
    return ranks


def _written(layout: str, num_layers: int, stages: int) -> list[int]:
    """Count the layers of each stage of a layout, and hold it against what it must add up to."""
    texts = read_layout(layout)
    if len(texts) != stages:
        raise ValueError(f"it has {len(texts)} stages and {stages} are needed")
    whole = "".join(texts)
    for symbol, end, where in (("E", texts[0][:1], "first"), ("L", texts[-1][-1:], "last")):
        if whole.count(symbol) != 1 or end != symbol:
            raise ValueError(
                f"{symbol} must be the {where} symbol, and stand once; it has {whole.count(symbol)}"
            )
    if whole.count("t") != num_layers:
        raise ValueError(f"it has {whole.count('t')} layers (t) and {num_layers} are needed")
    return [text.count("t") for text in texts]


def read_layout(text: str) -> list[str]:
    """Write a layout out, one string of E, t and L a stage.

    Commas and blanks are for the eye; `*3` repeats the symbol or the parentheses before it.
    Raises ValueError naming what it cannot read.
    """
    words = re.findall(r"\d+|[^\s,]", text)
    out, left = _sequence(words, 0)
    if left < len(words):
        raise ValueError("a ) closes nothing")
    return out.split("|")


def _sequence(words: list[str], at: int) -> tuple[str, int]:
    """Read items up to the end or a closing parenthesis; return them written out and where."""
    out = ""
    while at < len(words) and words[at] != ")":
        item, at = words[at], at + 1
        if item == "(":
            item, at = _sequence(words, at)
            if at == len(words):
                raise ValueError("a ( is never closed")
            at += 1
        elif item == "m":
            raise ValueError("m, a layer that predicts several tokens ahead: a Llama has none")
        elif item not in "EtL|":
            raise ValueError(
                f"{item} is none of E (embedding), t (layer), L (loss), | (next stage), ( ) and *n"
            )
        if words[at : at + 1] == ["*"]:
            times = words[at + 1] if at + 1 < len(words) else ""
            if not times.isdecimal() or int(times) < 1:
                raise ValueError(f"* must be followed by a whole number >= 1, not by '{times}'")
            if len(item) * int(times) > LONGEST:
                raise ValueError(f"*{times} makes it longer than {LONGEST:,} symbols")
            item, at = item * int(times), at + 2
        out += item
    return out, at
