# SPDX-License-Identifier: Apache-2.0
"""Rehearse every rank of a small world, each in a process of its own, and match them."""

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from tools.rehearsal.match import MATCHED, match
from tools.rehearsal.run import Rehearsed
from training.config import Config

MOST_RANKS = 16
AT_ONCE = 2


class Told(NamedTuple):
    """What a rank's process tells: its events that others must meet, and its report."""

    events: list[Any]
    failed: bool
    made: dict[str, Any]
    text: str


def all_ranks(
    run: Callable[[Config], Rehearsed],
    describe: Callable[[Rehearsed], tuple[dict[str, Any], str]],
    config: Config,
) -> tuple[dict[str, Any], str]:
    """Return the report of the rank that is asked for, with what was found on and between all.

    run, describe: rehearse a rank and report it, in a process that is forked from this one.
    """
    global _work
    _work = partial(_tell, run, describe, config)
    world, rank = config.parallel.world_size, config.rehearse.rehearse_rank
    with multiprocessing.get_context("fork").Pool(AT_ONCE, maxtasksperchild=1) as pool:
        told = pool.map(_call, range(world), chunksize=1)
    made, text = told[rank].made, told[rank].text
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for one in told:
        for finding in one.made["findings"]:
            found.setdefault((finding["kind"], finding["place"], finding["also"]), finding)
    if not any(one.failed for one in told):  # else what is missing would be found missing
        for between in match([one.events for one in told]):
            found.setdefault(between[:2] + (between.also,), between._asdict())
    made["findings"] = list(found.values())
    return made, text


_work: Callable[[int], Told]  # a forked process inherits it, so nothing is pickled


def _call(number: int) -> Told:
    return _work(number)


def _tell(run: Any, describe: Any, config: Config, rank: int) -> Told:
    seen = run(replace(config, rehearse=replace(config.rehearse, rehearse_rank=rank)))
    made, text = describe(seen)
    events = [e for e in seen.recorder.events if isinstance(e, MATCHED)]
    return Told(events, seen.failure is not None, made, text)
