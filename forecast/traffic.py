# SPDX-License-Identifier: Apache-2.0
"""List what one rank sends in a step: each collective and message, its bytes, and by whom.

The list comes from a recording of the step (forecast/recording.py), so a fork's own collectives
are in it. The dry run, `make explain`, fork-check and the planner's bytes over each link read it.
Bytes are those of the best algorithm (sent_bytes in mpu/comm/transport.py). Left out is
what is not in every step: checks of replicas, evaluation, saves, start-up.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

from forecast.recording import Recording, Transfer, record
from training.settings.config import Config

SMALL = ("norm", "loss sum", "go on?")  # purposes that send a few numbers
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
    size: int  # ranks of the axis
    peer: int = -1  # as in Transfer


def traffic(config: Config, script: ModuleType, pp_rank: int = 0, member: int = 0) -> list[Traffic]:
    """Return what a rank at a place of the pipeline sends in a step that is not the first.

    script, member: as `record` takes them. The pipeline that has the first rank of the world sends
    as much as others do, but for owners of matrices.
    """
    return rows(record(config, script, [pp_rank], member=member)[pp_rank])


def rows(recording: Recording) -> list[Traffic]:
    """Return a row for each kind of collective and message, in the order of the first of each.

    A step of more micro-batches repeats one in the middle.
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
    """Return collectives and bytes sent, by axis and verb."""
    found: Totals = {}
    for row in rows:
        times, sent = found.get((row.axis, row.verb), (0, 0))
        found[row.axis, row.verb] = times + row.times, sent + row.sent
    return found
