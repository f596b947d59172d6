# SPDX-License-Identifier: Apache-2.0
"""Find autograd functions whose backward leaves out the conjugate of a transfer of its forward.

What a forward gathers its backward must sum, what a forward scatters its backward must gather, and
what a forward exchanges comes back (the pairs of mpu/comm/mappings.py). A torch.autograd.Function
is compared with itself, in any model.
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

BACKWARD = ".backward"  # of an autograd function's name in a record
NOT_DIFFERENTIATED = (f"{LABEL.who}: {LABEL.phase}",)  # a softmax's sums, known to its backward
CONJUGATE = {
    "all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_to_all": "all_to_all",
}  # fmt: skip


def one_way(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the functions that send floats in forward, and in backward not as often the other way.
    """
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
        # in backward of any dtype: a gradient in float8 travels as bytes
        if name.endswith(BACKWARD) or event.where.phase == "forward" and "float" in event.dtype:
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
            what += "summed" if expected == "reduce_scatter" else "brought together"
            also = events[index].where.place  # type: ignore[union-attr]
            chains = (recorder.chains.get(i, ()) for i in (*ran[back], index))
            through = tuple(dict.fromkeys(line for chain in chains for line in chain))
            function: Any = recorder.functions[name]
            yield Finding("traffic", end_of(function.backward), what, also, through)
