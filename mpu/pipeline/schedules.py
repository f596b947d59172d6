# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules: the ordered actions of every rank as plain data, made by pure functions.

p ranks, m micro-batches, v chunks per rank, p v stages. An Action is one of

    F  forward of a stage on a micro-batch
    B  backward to its input only: the weight gradients are deferred
    W  the gradients of its weights

In a schedule that is not `split` each B is directly followed by its own W, and the two are one
backward: the gradient of the input is sent after both. An F may overlap the B and W that follow it
in the list (`pairs`): they begin when both inputs have arrived, alternate whenever one of them
waits for an exchange of its experts (mpu/interleave.py), and send their outputs when both are done.
"""

from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import NamedTuple

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2, "v-half": 2}
NAMES = tuple(CHUNKS)  # CHUNKS: chunks per rank; interleaved also takes other numbers
V_SHAPED = ("zb-v", "v-half")  # two chunks per rank: the second goes back up the ranks
SPLIT = ("zb-h1", "zb-v", "v-half")  # W is separate from B
OVERLAPPING = ("1f1b", "interleaved")  # an F may overlap a B


class Action(NamedTuple):
    """One action of a rank: F, B or W (kind) of one of its chunks on a micro-batch."""

    kind: str
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} chunk {self.chunk} micro-batch {self.micro_batch}"


@dataclass(frozen=True, eq=False)  # compared by identity: `build` caches its results
class Schedule:
    """The actions of each rank, in order: `ranks[r]` is rank r's list."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    micro_batches: int
    chunks: int = 1
    split: bool = False  # B and W are separate actions
    # chunk 0 goes down the ranks and chunk 1 comes back up, so that rank 0 holds both ends; else
    # stage = chunk p + rank
    v_shape: bool = False
    deferred: bool = False  # the output layer's W's come at the end
    # for each rank: the indices of the F's that overlap the B and W after them
    pairs: tuple[range, ...] = ()

    def overlapped_forwards(self, rank: int) -> range:
        """Return the indices of a rank's F's that overlap the B and W after them."""
        return self.pairs[rank] if self.pairs else range(0)

    @cached_property
    def stages(self) -> int:
        """Return the number of stages, p v."""
        return len(self.ranks) * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Return the number of the stage that is chunk `chunk` of rank `rank`."""
        return stage_of(rank, chunk, len(self.ranks), self.v_shape)

    def place(self, stage: int) -> tuple[int, int]:
        """Return (rank, chunk) of a stage."""
        p = len(self.ranks)
        chunk, at = divmod(stage, p)
        return (p - 1 - at if self.v_shape and chunk % 2 else at), chunk

    @cached_property
    def sources(self) -> list[list[tuple[int, Action] | None]]:
        """Return, for each action of each rank, the (rank, action) that computes its input.

        None where no other stage computes it: F of the first stage, B of the last, every W.
        """
        backward = "B" if self.split else "W"  # the action after which a gradient is sent
        before: dict[tuple[int, str, int], tuple[int, str, int]] = {}
        for stage in range(1, self.stages):
            (giver, its), (taker, chunk) = self.place(stage - 1), self.place(stage)
            before[taker, "F", chunk] = giver, "F", its
            before[giver, "B", its] = taker, backward, chunk

        def source(rank: int, action: Action) -> tuple[int, Action] | None:
            found = before.get((rank, action.kind, action.chunk))
            return (found[0], Action(*found[1:], action.micro_batch)) if found else None

        return [[source(rank, a) for a in actions] for rank, actions in enumerate(self.ranks)]

    def begin(self, rank: int, n: int) -> int:
        """Return the index of the first action that runs together with a rank's n-th: the B of a
        fused W, the F that overlaps the B, or n itself.
        """
        n -= self.ranks[rank][n].kind == "W" and not self.split
        return n - (n - 1 in self.overlapped_forwards(rank))

    def inputs(self, rank: int, n: int) -> list[tuple[int, Action]]:
        """Return the actions, as (rank, action), that must end before a rank's n-th begins."""
        taken = self.sources[rank][n : n + 1 + (n in self.overlapped_forwards(rank))]
        return [source for source in taken if source]


def stage_of(rank: int, chunk: int, p: int, v_shape: bool) -> int:
    """Return the stage that is chunk `chunk` of rank `rank`."""
    return chunk * p + (p - 1 - rank if v_shape and chunk % 2 else rank)


@lru_cache(maxsize=64)
def build(
    name: str, p: int, m: int, v: int = 1, group: int | None = None, overlaps: bool = False
) -> Schedule:
    """Return the schedule of that name for p ranks, m micro-batches and v chunks per rank.

    group: for interleaved only. overlaps: F's overlap B's, for the names in OVERLAPPING. Raises
    ValueError, naming the rule, if the sizes break one.
    """
    if name not in NAMES:
        raise ValueError(f"{name!r} is not a schedule: the schedules are {', '.join(NAMES)}")
    if min(p, m, v) < 1:
        raise ValueError(f"pipeline size {p}, micro-batches {m} and v {v} must be at least 1")
    if name == "interleaved":
        return interleaved(p, m, v, group, overlaps)
    if group is not None:
        raise ValueError(f"{name} has no micro-batch group size ({group}): only interleaved has")
    if v != CHUNKS[name]:
        raise ValueError(f"{name} has {CHUNKS[name]} virtual stages a rank, not {v}")
    if overlaps:
        if name not in OVERLAPPING:
            can = " and ".join(OVERLAPPING)
            raise ValueError(f"{name} cannot overlap a forward with a backward: only {can} can")
        return one_f_one_b(p, m, overlaps)
    makers = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-v": zb_v, "v-half": v_half}
    return makers[name](p, m)


def gpipe(p: int, m: int) -> Schedule:
    """Run all forwards, then all backwards, both in micro-batch order.

        0  F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0 W0 B1 W1 B2 W2 B3 W3
        1  .  F0 F1 F2 F3 .  .  .  .  .  .  B0 W0 B1 W1 B2 W2 B3 W3 .  .
        2  .  .  F0 F1 F2 F3 .  .  .  B0 W0 B1 W1 B2 W2 B3 W3 .  .  .  .
        3  .  .  .  F0 F1 F2 F3 B0 W0 B1 W1 B2 W2 B3 W3 .  .  .  .  .  .

    Bubble (p-1)(F + B + W). Every rank holds the activations of all m micro-batches: it is included
    for comparison only (Huang et al. 2019).
    """
    return Schedule("gpipe", (_one_f_one_b(_actions("F", m), _backwards(m), m),) * p, m)


def one_f_one_b(p: int, m: int, overlaps: bool = False) -> Schedule:
    """Run a backward as soon as possible: after the warm-up, forwards and backwards alternate.

        0  F0 F1 F2 F3 .  .  .  .  .  .  B0 W0 .  B1 W1 .  B2 W2 .  B3 W3
        1  .  F0 F1 F2 .  .  .  .  B0 W0 F3 B1 W1 .  B2 W2 .  B3 W3 .  .
        2  .  .  F0 F1 .  .  B0 W0 F2 B1 W1 F3 B2 W2 .  B3 W3 .  .  .  .
        3  .  .  .  F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3 .  .  .  .  .  .

    Bubble (p-1)(F + B + W), as GPipe's; but rank r holds at most min(m, p - r) micro-batches. It
    has the fewest messages: use it when links are slow or m is large (Narayanan et al. 2021).

    overlaps: each steady-state forward overlaps the backward after it. An output is sent when both
    are done, so a micro-batch returns from the next rank two pairs after it was sent. The warm-up
    is therefore longer, 2(p - r) - 1 forwards, and rank r holds up to min(m, 2(p - r) - 1)
    micro-batches plus a layer of the next one.
    """
    f, b = _actions("F", m), _backwards(m)
    warm_up = [2 * (p - r - 1) + 1 if overlaps else p - r - 1 for r in range(p)]
    ranks = tuple(_one_f_one_b(f, b, warm_up=k) for k in warm_up)
    return Schedule("1f1b", ranks, m, pairs=_pairs(m, warm_up) if overlaps else ())


def interleaved(
    p: int, m: int, v: int, group: int | None = None, overlaps: bool = False
) -> Schedule:
    """Cut each rank's layers into v chunks, so that the pipeline fills v times as fast.

    Chunk 1 is in lower case. Micro-batches run chunk by chunk in groups, of p unless given:

        0  F0 F1 f0 f1 F2 .  b0 w0 F3 b1 w1 f2 B0 W0 f3 B1 W1 .  b2 w2 .  b3 w3 B2 W2 B3 W3
        1  .  F0 F1 f0 b0 w0 f1 b1 w1 F2 B0 W0 F3 B1 W1 f2 b2 w2 f3 b3 w3 B2 W2 B3 W3 .  .

    Bubble (p-1)(F + B + W) / v, with F, B, W of a rank's v chunks together, if m is a multiple of
    p. Rank 0 holds 1 + (p-1)/(pv) times the activations of 1F1B; there are v times as many
    messages. Use it when links are fast, as inside a node. Warm-up and groups are Megatron's
    (Narayanan et al. 2021). overlaps: as in one_f_one_b; the warm-up has one more forward, as in
    Megatron.
    v = 1 is 1F1B. Raises ValueError unless p <= group <= m and m mod group is 0 or at least p.
    """
    if v == 1:
        if group is not None:
            raise ValueError(f"a micro-batch group size ({group}) needs v > 1 stages a rank")
        return replace(one_f_one_b(p, m, overlaps), name="interleaved")
    size = p if group is None else group
    if not p <= size <= m:
        raise ValueError(
            "interleaved needs pipeline size <= micro-batch group size <= number of micro-batches, "
            f"not {p}, {size}, {m}"
        )
    if 0 < m % size < p:
        raise ValueError(
            f"{m} micro-batches in groups of {size} leave a last group of {m % size}, which must "
            f"be at least the pipeline size {p}"
        )
    f, b = _actions("F", m, v, size), _backwards(m, v, size)
    warm_up = [2 * (p - r - 1) + (v - 1) * size + overlaps for r in range(p)]
    ranks = tuple(_one_f_one_b(f, b, warm_up=k) for k in warm_up)
    return Schedule("interleaved", ranks, m, v, pairs=_pairs(m * v, warm_up) if overlaps else ())


def zb_h1(p: int, m: int) -> Schedule:
    """Run 1F1B with each W moved into idle time: a third of the bubble in 1F1B's memory.

        0  F0 F1 F2 F3 .  .  .  B0 W0 B1 W1 B2 W2 B3 W3
        1  .  F0 F1 F2 .  .  B0 F3 B1 W0 B2 W1 B3 W2 W3
        2  .  .  F0 F1 .  B0 F2 B1 F3 B2 W0 B3 W1 W2 W3
        3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3

    Bubble (p-1)(F + B - W) at F = B = W for m >= p; fewer micro-batches fill less of it. Rank r
    holds up to min(m, p) activations for B and W together, as rank 0 of 1F1B does. Use it when a
    rank has too few layers to split, or links too slow to cross v times (Qi et al. 2023).
    """
    return _place_weights(replace(one_f_one_b(p, m), name="zb-h1", split=True), cap=p)


def zb_v(p: int, m: int) -> Schedule:
    """Fold the stages into a V: no bubble but the start-up, in 1F1B's memory.

    Chunk 1, in lower case, goes back up the ranks, so that rank 0 has both ends:

        0  F0 F1 F2 f0 b0 w0 f1 b1 w1 F3 B0 W0 f2 b2 w2 B1 W1 f3 b3 w3 B2 W2 B3 W3 .
        1  .  F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 F3 B1 W1 f3 b2 w2 B2 b3 B3 W2 w3 W3

    Bubble (p-1) F of one chunk at F = B = W for m >= p: each rank starts one F after the previous
    rank, and for m >= 2p - 1 no rank waits again. Any rank holds up to 2p activations of a chunk,
    the memory of p micro-batches. Use it when F, B and W are about equal (Qi et al. 2023). With
    fewer than 2p - 1 micro-batches each W is moved into idle time.
    """
    n = max(m, 2 * p - 1)
    ranks = []
    for r in range(p):
        f0, f1, b0, b1, w0, w1 = (
            iter([Action(kind, chunk, i) for i in range(m)]) for kind in "FBW" for chunk in (0, 1)
        )
        turns = [f0] * (2 * (p - r) - 1) + [f1, f0] * r + [f1, b1, w1] * (p - r)  # warm-up
        turns += [f0, b0, w0, f1, b1, w1] * (n - p)
        turns += [b0, b1] * r + [b0, w0] * (p - r) + [w1] * r + [w0] * r  # cool-down
        actions = (next(at_turn, None) for at_turn in turns)  # None: all m of that kind are placed
        ranks.append(tuple(action for action in actions if action))
    schedule = Schedule("zb-v", tuple(ranks), m, 2, split=True, v_shape=True)
    return schedule if m == n else _place_weights(schedule, cap=2 * p)


def v_half(p: int, m: int) -> Schedule:
    """Fold the stages into a V and free activations sooner: half of 1F1B's memory.

        0  F0 F1 F2 .  .  .  .  f0 b0 w0 .  f1 b1 w1 .  f2 b2 B0 w2 W0 .  B1 W1 B2 W2
        1  .  F0 F1 .  .  .  f0 F2 .  b0 f1 w0 .  b1 f2 w1 B0 b2 W0 w2 B1 W1 B2 W2 .
        2  .  .  F0 F1 .  f0 .  .  F2 f1 b0 w0 .  f2 b1 B0 w1 W0 b2 B1 w2 B2 W1 W2 .
        3  .  .  .  F0 f0 F1 f1 .  .  F2 .  b0 f2 B0 w0 b1 B1 W0 w1 b2 B2 W1 w2 W2 .

    The F's and B's follow one block, a micro-batch's F0 F1 B1 B0, repeated every 6 units of time:
    from rank to rank F0 and B1 move on after 2 units, F1 and B0 after 1, so that an activation
    lives about half as long as in 1F1B. Each W is then moved into idle time.

    Bubble at most 3 (p-1) F of one chunk at F = B = W for m >= p, half of 1F1B's. Any rank holds up
    to 2 ((p+2) // 2) activations of a chunk, the memory of (p+2) // 2 micro-batches. Use it when
    memory is the limit (Qi, Wan, Amar, Lin 2024).
    """
    # When F1, B1 and B0 begin on rank 0: as early as possible, with a rank's four distinct mod 6.
    n = 3 * p
    at_turn, loss, back = (n - 2, n - 1, 2 * n - 2) if p % 2 else (n + 1, n + 3, 2 * n + 4)
    ranks = []
    for r in range(p):
        begins = (2 * r, at_turn - r, loss + 2 * r, back - r)
        block = list(zip(begins, "FFBB", (0, 1, 1, 0), strict=True))
        timed = [(at + 6 * i, Action(k, c, i)) for i in range(m) for at, k, c in block]
        ranks.append(tuple(action for _, action in sorted(timed)))
    schedule = Schedule("v-half", tuple(ranks), m, 2, split=True, v_shape=True)
    return _place_weights(schedule, cap=2 * ((p + 2) // 2))


@lru_cache(maxsize=64)
def forward_only(schedule: Schedule) -> Schedule:
    """Return only the forwards of a schedule, for an evaluation."""
    ranks = tuple(tuple(a for a in rank if a.kind == "F") for rank in schedule.ranks)
    return replace(schedule, ranks=ranks, pairs=())


def table(schedule: Schedule) -> str:
    """Return a schedule as text: a row per rank, a column per time unit (see slots), a dot to wait.

    F3 is the forward of micro-batch 3. The second of two chunks is in lower case; more than two are
    marked a, b, ...
    """

    def cell(action: Action | None) -> str:
        if action is None:
            return "."
        kind, chunk, i = action
        if schedule.chunks > 2:
            return f"{kind}{i}{chr(ord('a') + chunk)}"
        return f"{kind.lower() if chunk else kind}{i}"

    rows = [[str(rank), *map(cell, row)] for rank, row in enumerate(slots(schedule))]
    width = max(len(text) for row in rows for text in row)
    return "\n".join(" ".join(text.ljust(width) for text in row).rstrip() for row in rows)


def slots(schedule: Schedule, cap: int | None = None) -> list[list[Action | None]]:
    """Return each rank's action in each time unit at F = B = W = 1 and send = 0 (None: wait).

    cap: the schedule has no W's, and this places them: a rank that would wait does its oldest W
    instead, as does a rank whose next F would make it hold more than `cap` activations (for B and W
    together). Raises ValueError if the ranks deadlock.
    """
    grid: list[list[Action | None]] = [[] for _ in schedule.ranks]
    done: dict[tuple[int, Action], int] = {}  # the time unit in which it ends
    to_do = [
        deque(
            (a, schedule.inputs(r, n), n in schedule.overlapped_forwards(r))
            for n, a in enumerate(actions)
        )
        for r, actions in enumerate(schedule.ranks)
    ]
    weights: list[deque[Action]] = [deque() for _ in schedule.ranks]  # W's to place
    in_flight = [0] * len(schedule.ranks)
    now = 0
    while any(to_do) or any(weights):
        for r, row in enumerate(grid):
            action, inputs, overlapped = to_do[r][0] if to_do[r] else (None, [], False)
            for source in inputs:
                if done.get(source, now) >= now:
                    action = None
            if cap and action and action.kind == "F" and in_flight[r] >= cap and weights[r]:
                action = None
            if action:
                to_do[r].popleft()
                done[r, action] = now + 2 * overlapped  # with the B and W that it overlaps
                in_flight[r] += action.kind == "F"
                if cap and action.kind == "B":
                    weights[r].append(action._replace(kind="W"))
            elif weights[r]:
                action = weights[r].popleft()
                in_flight[r] -= 1
            row.append(action)
        if not any(row[-1] for row in grid):
            r = next(r for r, rest in enumerate(to_do) if rest)
            raise ValueError(f"rank {r} waits forever for the input of {to_do[r][0][0]}")
        now += 1
    return grid


def _place_weights(schedule: Schedule, cap: int) -> Schedule:
    """Return the schedule with its W's placed again by `slots`."""
    ranks = tuple(tuple(a for a in rank if a.kind != "W") for rank in schedule.ranks)
    grid = slots(replace(schedule, ranks=ranks), cap)
    return replace(schedule, ranks=tuple(tuple(a for a in row if a) for row in grid))


def _actions(kind: str, m: int, v: int = 1, group: int | None = None) -> list[Action]:
    """Return the actions of one kind, group by group of micro-batches, chunk by chunk in each."""
    chunks = range(v) if kind == "F" else range(v - 1, -1, -1)
    groups = [range(i, min(i + (group or m), m)) for i in range(0, m, group or m)]
    return [Action(kind, chunk, i) for members in groups for chunk in chunks for i in members]


def _backwards(m: int, v: int = 1, group: int | None = None) -> list[tuple[Action, Action]]:
    """Return the backwards in order, each as a B and its W."""
    return [(b, b._replace(kind="W")) for b in _actions("B", m, v, group)]


def _one_f_one_b(
    f: list[Action], b: list[tuple[Action, Action]], warm_up: int
) -> tuple[Action, ...]:
    """Return `warm_up` forwards, then alternating forwards and backwards to the end."""
    order = f[:warm_up]
    for forward, backward in zip_longest(f[warm_up:], b):
        if forward:
            order.append(forward)
        order += backward or ()
    return tuple(order)


def _pairs(forwards: int, warm_up: list[int]) -> tuple[range, ...]:
    """Return, for each rank, the indices of the F's that `_one_f_one_b` puts before a B and W."""
    return tuple(range(k, k + 3 * max(0, forwards - k), 3) for k in warm_up)
