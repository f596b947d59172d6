# SPDX-License-Identifier: Apache-2.0
"""The memory of a rehearsed rank: its live storages over time, and the peak by kind.

Storages of the optimizer and the model have the kinds that these report. Others have a kind by the
part of the step that allocated them: activations in forward, logits in the loss, and so on.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forecast.rehearsal.events import Alloc, Event, Free, Launch, Where
from forecast.rehearsal.workspaces import OF_OPERATORS, of_launch

ROUND = 512  # bytes: the CUDA allocator's smallest block


@dataclass(frozen=True)
class Memory:
    """Bytes on the device at the fullest moment. at: index of the event that reaches it.

    rounding: bytes that CUDA's allocator adds to the live allocations. largest: the live storages,
    largest first, as (bytes, kind, place).
    """

    peak: int
    by_kind: dict[str, int]
    rounding: int
    at: int
    largest: list[tuple[int, str, str]]


def memory(
    events: Sequence[Event], kinds: Mapping[int, str], device: str, first: int = 0
) -> Memory:
    """Return the peak from event `first` on. kinds: kinds of the persistent storages, by number.

    The workspace of a launch counts while it runs (workspaces.py).
    """
    live: dict[int, Alloc] = {}
    now = peak = taken = 0
    at = -1
    for i, event in enumerate(events):
        changed = step(live, event, device)
        now += changed
        if i + 1 == first or (changed > 0 and now > peak and i >= first):
            peak, at, taken = now, i, 0
        elif type(event) is Launch and i >= first:
            own = of_launch(event)
            if own and now + own > peak:
                peak, at, taken = now + own, i, own
    fullest = live_storages(events[: at + 1], device)
    by_kind: dict[str, int] = defaultdict(int)
    for alloc in fullest:
        by_kind[kind_of(alloc, kinds)] += alloc.bytes
    if taken:
        by_kind[OF_OPERATORS] = taken
    largest = sorted(((a.bytes, kind_of(a, kinds), a.where.place) for a in fullest), reverse=True)
    rounding = sum(-a.bytes % ROUND for a in fullest)
    order = dict(sorted(by_kind.items(), key=lambda item: -item[1]))
    return Memory(peak, order, rounding, at, largest[:20])


def live_storages(events: Iterable[Event], device: str) -> list[Alloc]:
    """Return the live storages after these events."""
    live: dict[int, Alloc] = {}
    for event in events:
        step(live, event, device)
    return list(live.values())


def step(live: dict[int, Alloc], event: Event, device: str) -> int:
    """Update the live storages by an event; return the change in bytes."""
    if type(event) is Alloc and event.device == device:
        live[event.storage] = event
        return event.bytes
    if type(event) is Free and event.storage in live:
        return -live.pop(event.storage).bytes
    return 0


def kind_of(alloc: Alloc, kinds: Mapping[int, str]) -> str:
    """Return the kind of a storage."""
    return alloc.kind or kinds.get(alloc.storage) or of_where(alloc.where)


def of_where(where: Where) -> str:
    """Return the kind of a storage by the part of the step that allocated it."""
    if where.part == "state":
        return "masters and moments"
    if where.part == "loss":
        return "logits"
    if where.phase in ("forward", "recompute") or where.part == "offload":
        return "activations"
    if where.phase in ("backward", "wgrad"):
        return "gradients of activations"
    if where.phase in ("grad sum", "update"):
        return "buffers of sums and updates"
    return "other"
