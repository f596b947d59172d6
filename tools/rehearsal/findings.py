# SPDX-License-Identifier: Apache-2.0
"""Find mistakes in the record of a rehearsed rank: what would fail, wait or be wrong on a GPU."""

from typing import TYPE_CHECKING

from tools.rehearsal.events import HostWait, Launch
from tools.rehearsal.order import Finding, order

if TYPE_CHECKING:
    from tools.rehearsal.run import Rehearsed

# where the host may wait in a step, and why
ALLOWED = {
    "training/run/log.py": "the log reads a step's loss and norm",
    "training/run/stop.py": "the ranks' agreement on the step before is read from pinned memory",
}


def findings(seen: "Rehearsed") -> list[Finding]:
    """Return what is wrong, in the order in which it came, each place once."""
    found: dict[tuple[str, str], Finding] = {}
    if seen.failure is not None:
        found["", ""] = seen.failure
    for event in seen.recorder.events[seen.first :]:
        if type(event) is HostWait:
            file = event.where.place.partition(":")[0]
            if file not in ALLOWED:
                what = f"the host waits for the device ({event.reads or 'synchronize'}) in a step"
                one = Finding("host read", event.where.place, what)
                found.setdefault((one.kind, one.place), one)
        elif type(event) is Launch and event.dtype == "float64":
            if seen.config.run.dtype.itemsize < 8 and max(map(_numel, event.shapes)) > 65536:
                what = f"{event.op} computes in float64"
                one = Finding("float64", event.where.place, what)
                found.setdefault((one.kind, one.place), one)
    return [*found.values(), *order(seen.recorder.events, seen.recorder.chains)]


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n
