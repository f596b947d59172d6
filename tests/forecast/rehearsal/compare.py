# SPDX-License-Identifier: Apache-2.0
"""Hold the record of a rank that ran in earnest against its rehearsal's, event by event."""

from collections.abc import Iterator, Sequence
from typing import Any

from forecast.rehearsal.events import Event, Transfer
from forecast.rehearsal.run import Rehearsed

STORAGES = ("read", "written", "storage")  # fields that hold numbers of storages
NUMBERS = ("id", "transfer", "event", "stream", "origin", "batch")  # those of other things


class Names:
    """Numbers in the order in which a record first names them, each with what it names."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self.sizes = sizes
        self.given: dict[tuple[str, int], int] = {}

    def __call__(self, field: str, number: int) -> Any:
        """Return the new number; of a storage, with its bytes."""
        sort = "stream" if field == "origin" else field
        sort = "transfer" if field == "id" else sort
        sort = "storage" if field in STORAGES else sort
        if number < 0 or sort == "stream" and number == 0:
            return number
        name = self.given.setdefault((sort, number), len(self.given))
        return (name, self.sizes[number]) if sort == "storage" else name


def renamed(events: Sequence[Event], sizes: dict[int, int]) -> Iterator[tuple[Any, ...]]:
    """Yield events as tuples whose numbers depend on nothing but the events. sizes: of storages."""
    names, first = Names(sizes), dict[tuple[int, tuple[int, ...]], int]()
    for event in events:
        fields: list[Any] = [type(event).__name__]
        value: Any
        for field, value in zip(event._fields, event, strict=True):
            if field in STORAGES and isinstance(value, tuple):
                value = tuple(names(field, number) for number in value)
            elif field in STORAGES or field in NUMBERS:
                value = names(field, value)
            elif field == "number":  # counted from the start of the run; here from the step's
                assert isinstance(event, Transfer)
                value -= first.setdefault((event.stream, event.group), value)
            fields.append((field, value))
        yield tuple(fields)


def step_of(seen: Rehearsed) -> list[tuple[Any, ...]]:
    """Return the last step's events, renamed."""
    recorder = seen.recorder
    return list(renamed(recorder.events[seen.first :], recorder.sizes))


def difference(real: Rehearsed, rehearsed: Rehearsed) -> str:
    """Return where the two records of a step part, in words, or "" where they are equal."""
    one, other = step_of(real), step_of(rehearsed)
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            before = "\n".join(f"          {_short(x)}" for x in one[max(0, i - 3) : i])
            return f"event {i}:\n{before}\nreal      {_short(a)}\nrehearsed {_short(b)}"
    if len(one) != len(other):
        longer = one if len(one) > len(other) else other
        more = _short(longer[min(len(one), len(other))])
        return f"{len(one)} events in earnest, {len(other)} rehearsed; the first beyond: {more}"
    return ""


def _short(event: tuple[Any, ...]) -> str:
    return f"{event[0]}({', '.join(f'{k}={v}' for k, v in event[1:])})"
