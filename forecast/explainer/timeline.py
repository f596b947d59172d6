# SPDX-License-Identifier: Apache-2.0
"""Lay out the events of tools/explain.py as parallel streams: computation, transfers in flight.

The order is observed, but lengths are not. A matmul is one unit long. Other operations between two
matmuls or transfers are OTHERS long together, or UNDER if only they hide a transfer. A transfer is
as long as the operations that overlap it, or WAIT if there are none. A sent message is WAIT long,
as a thread waits for it. An action is at least ACTION long.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from forecast.explainer.trace import Explainer, Seen

COMPUTE = "compute"
OTHERS, UNDER, WAIT, ACTION = 0.35, 0.7, 1.0, 1.4
MATMULS = {"matmul": "F", "dgrad matmul": "B", "wgrad matmul": "W"}
VERBS = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "reduce",
         "all_to_all": "exchange", "broadcast": "broadcast"}  # fmt: skip


class Box(NamedTuple):
    """A span of a stream."""

    stream: str  # COMPUTE, or the axis of a transfer
    begin: float  # in units
    end: float  # in units
    # on COMPUTE: "F", "B" or "W" for a matmul (forward, input gradient, weight gradient), "other",
    # or "wait" for a transfer; on an axis: "hidden", or "waited for" if nothing ran meanwhile
    kind: str
    what: str  # a word or two
    layer: str


class Part(NamedTuple):
    """An action of a step: its words, and its begin in units."""

    words: str
    begin: float


class Streams(NamedTuple):
    """A rank's step: its actions, boxes and end. rank: its name if there are several, or ""."""

    rank: str
    parts: list[Part]
    boxes: list[Box]
    end: float


def streams_of(values: Sequence[Any]) -> Streams:
    """Return Streams from the lists in JSON."""
    rank, parts, boxes, end = values
    return Streams(rank, [Part(*part) for part in parts], [Box(*box) for box in boxes], end)


def streams(explainer: Explainer, rank: str = "") -> Streams:
    """Return the streams of a step that was traced on a rank."""
    done, clock = explainer.done, 0.0
    kinds = [MATMULS.get(story.partition(" of ")[0], "other") for story in done]
    covers = [(e.first, e.first + len(e.meanwhile)) for e in explainer.events if e.meanwhile]
    covers = [(first, end) for first, end in covers if {*kinds[first:end]} == {"other"}]
    breaks = {event.first for event in explainer.events if _exposed(event)}
    breaks.update(explainer.begun, (place for cover in covers for place in cover))
    runs = list[list[int]]()  # consecutive other operations, or one matmul
    for n, kind in enumerate(kinds):
        if n and kind == kinds[n - 1] == "other" and n not in breaks:
            runs[-1].append(n)
        else:
            runs.append([n])
    widths = list[float]()
    for run in runs:
        under = any(first <= run[0] < end for first, end in covers)
        long = 1.0 if kinds[run[0]] != "other" else UNDER if under else OTHERS
        widths += [long / len(run)] * len(run)
    events, actions = _by_place(explainer.events), dict[int, list[str]]()
    for words, at in zip(explainer.actions, explainer.begun, strict=True):
        actions.setdefault(at if actions else 0, []).append(_short(words, explainer.actions))
    boxes, parts = list[Box](), list[Part]()
    starts = list[float]()  # begin of each operation, before waits at this place
    issued = list[tuple[Seen, float]]()
    for n in range(len(done) + 1):
        starts.append(clock)
        for words in actions.get(n, ()):
            clock = max(clock, parts[-1].begin + ACTION) if parts else clock
            parts.append(Part(words, clock))
        for event in events.get(n, ()):
            issued.append((event, clock))
            if _exposed(event):
                boxes.append(Box(COMPUTE, clock, clock + WAIT, "wait", "waits", ""))
                boxes.append(_transfer(event, clock, clock + WAIT))
                clock += WAIT
        if n < len(done):
            boxes.append(_operation(done[n], clock, clock + widths[n]))
            clock += widths[n]
    for event, begin in [(each, 0.0) for each in explainer.before] + issued:
        if event.in_outbox:
            boxes.append(_transfer(event, begin, begin + WAIT))
        elif not _exposed(event):
            end = starts[event.first + len(event.meanwhile)] if event.waited_at else clock
            boxes.append(_transfer(event, begin, end))
    return Streams(rank, parts, _joined(boxes), max([clock, *(box.end for box in boxes)]))


def _exposed(event: Seen) -> bool:
    """Return whether a rank waited for a transfer that no operation hides."""
    waited = bool(event.waited_at) or not event.is_async  # if neither, the next step waits
    return waited and not event.meanwhile and not event.in_outbox


def _by_place(events: Iterable[Seen]) -> dict[int, list[Seen]]:
    found = dict[int, list[Seen]]()
    for event in events:
        found.setdefault(event.first, []).append(event)
    return found


def _operation(story: str, begin: float, end: float) -> Box:
    """Return the box of an operation, from its story: "dgrad matmul of head"."""
    what, _, layer = story.partition(" of ")
    return Box(COMPUTE, begin, end, MATMULS.get(what, "other"), what, layer)


def _short(action: str, actions: Iterable[str]) -> str:
    """Return the words of an action without parts that all actions of the rank share."""
    words = re.sub(r"^the | in stage \d+| of iteration \d+", "", action)
    return words if any("chunk 1" in each for each in actions) else words.replace(" chunk 0", "")


def _transfer(event: Seen, begin: float, end: float) -> Box:
    """Return the box of a collective or message."""
    what, layer = VERBS.get(event.verb, event.verb), event.place.layer
    if event.payload is not None:
        what = f"{'to' if event.verb == 'send' else 'from'} {event.payload.peer}"
        layer = f"{event.payload.kind}{event.payload.micro_batch}"
    kind = "waited for" if _exposed(event) else "hidden"
    return Box(event.axis, begin, end, kind, what, layer)


def _joined(boxes: list[Box]) -> list[Box]:
    """Return the boxes, with consecutive boxes of other operations joined into one.

    A joined box has the layer with the largest part of it.
    """
    found, layers = list[Box](), dict[str, float]()
    for box in boxes:
        last = found[-1] if found else None
        follows = last is not None and last.kind == "other" and last.end == box.begin
        if box.kind == "other":
            layers = layers if follows else {}
            layers[box.layer] = layers.get(box.layer, 0.0) + box.end - box.begin
        if last is not None and follows and box.kind == "other":
            layer = max(layers, key=layers.__getitem__)
            found[-1] = last._replace(end=box.end, layer=layer)
        else:
            found.append(box)
    return found
