# SPDX-License-Identifier: Apache-2.0
"""Find autograd functions whose backward lacks the conjugate of a collective in its forward.

The conjugate of all_gather is reduce_scatter and vice versa; all_to_all is its own (the pairs of
mpu/comm/mappings.py). The forward and backward of each torch.autograd.Function are compared, so
the rule holds in any model.
"""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from forecast.rehearsal.events import Launch, Transfer
from forecast.rehearsal.order import Finding
from forecast.rehearsal.places import end_of
from mpu.layers.cross_entropy import LABEL

if TYPE_CHECKING:
    from forecast.rehearsal.run import Rehearsed

BACKWARD = ".backward"  # suffix of an autograd function's name in a record
NOT_DIFFERENTIATED = (f"{LABEL.who}: {LABEL.phase}",)  # a softmax's sums, saved for its backward
CONJUGATE = {
    "all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_to_all": "all_to_all",
}  # fmt: skip


def one_way(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the functions whose backward has fewer conjugates than collectives in forward."""
    events, recorder = seen.recorder.events, seen.recorder
    made: dict[tuple[str, str], Counter[str]] = {}  # a function, the axis: its verbs
    first: dict[tuple[str, str], int] = {}
    ran: dict[str, list[int]] = {}
    for index in range(seen.first, len(events)):
        event = events[index]
        if not isinstance(event, (Launch, Transfer)) or not (name := event.where.function):
            continue
        if name.endswith(BACKWARD):
            ran.setdefault(name, []).append(index)
        if type(event) is not Transfer or event.label in NOT_DIFFERENTIATED:
            continue
        if event.label and not event.label.endswith((": forward", ": backward")):
            continue
        # in backward count every dtype: a float8 gradient is sent as bytes. Of a forward that is
        # recomputed, autograd differentiates the second run
        if name.endswith(BACKWARD) or event.differentiated and "float" in event.dtype:
            made.setdefault((name, event.axis), Counter())[event.verb] += 1
            first.setdefault((name, event.axis), index)
    for (name, axis), verbs in made.items():
        back = name + BACKWARD
        if name.endswith(BACKWARD) or back not in ran:
            continue
        for verb, count in verbs.items():
            expected = CONJUGATE.get(verb, "")
            done = made.get((back, axis), Counter())
            if not expected or done[expected] >= count or (done["send"] and not done[expected]):
                continue
            index = first[name, axis]
            what = f"{name}: forward does {verb} over {axis} {count} times in a step, backward "
            what += f"does {expected} {done[expected]} times: a gradient is not "
            what += "summed" if expected == "reduce_scatter" else "gathered"
            also = events[index].where.place  # type: ignore[union-attr]
            chains = (recorder.chains.get(i, ()) for i in (*ran[back], index))
            through = tuple(dict.fromkeys(line for chain in chains for line in chain))
            function: Any = recorder.functions[name]
            yield Finding("traffic", end_of(function.backward), what, also, through)
