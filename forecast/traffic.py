# SPDX-License-Identifier: Apache-2.0
"""List the collectives and messages of one rank in a step: their bytes, and the layer or bucket.

The list comes from a recording of the step (forecast/recording.py), so it includes a fork's own
collectives. The dry run, `make explain`, fork-check and the planner's bytes over each link use it.
Bytes are those of the best algorithm (sent_bytes in mpu/comm/transport.py). Collectives that are
not in every step are left out: checks of replicas, evaluation, saves, start-up.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

from forecast.recording import Recording, Transfer, record
from training.settings.config import Config

SMALL = ("norm", "loss sum", "go on?")  # purposes of transfers of a few numbers
Totals = dict[tuple[str, str], tuple[int, int]]  # (axis, verb) -> collectives, bytes sent


@dataclass(frozen=True)
class Traffic:
    """Collectives or messages of one kind in a step."""

    axis: str  # as the grid names it
    verb: str  # as a trace names it
    who: str  # as in Transfer
    purpose: str  # as in Transfer
    times: int  # number of calls
    bytes: int  # of each whole tensor
    sent: int  # bytes that leave this rank, of all calls
    size: int  # number of ranks of the axis
    peer: int = -1  # as in Transfer


def traffic(config: Config, script: ModuleType, pp_rank: int = 0, member: int = 0) -> list[Traffic]:
    """Return the traffic of a pipeline rank in a step after the first.

    script, member: as for `record`. Every pipeline sends as much as the one with world rank 0,
    except where ranks own whole matrices.
    """
    return rows(record(config, script, [pp_rank], member=member)[pp_rank])


def rows(recording: Recording) -> list[Traffic]:
    """Return a row for each kind of collective and message, in order of first occurrence.

    Micro-batches that are not recorded count as repeats of one in the middle.
    """
    found: dict[Transfer, int] = {}
    for each in recording.recorder.transfers:
        if each.size > 1:
            key = each._replace(action="")
            found[key] = found.get(key, 0) + recording.times(each.action)
    return [
        Traffic(
            each.axis, each.verb, each.who, each.purpose, times=times, bytes=each.bytes,
            sent=times * each.sent, size=each.size, peer=each.peer,
        )
        for each, times in found.items() if times
    ]  # fmt: skip


def totals(rows: Iterable[Traffic]) -> Totals:
    """Return the number of collectives and the bytes sent, by axis and verb."""
    found: Totals = {}
    for row in rows:
        times, sent = found.get((row.axis, row.verb), (0, 0))
        found[row.axis, row.verb] = times + row.times, sent + row.sent
    return found
