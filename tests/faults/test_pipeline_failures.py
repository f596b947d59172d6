# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline that are killed or stuck: what the other stages say."""

import re
import signal
import time

import pytest

from tests.faults.small_run import LIMIT, MESSAGES, PATIENCE, Ranks, check_blame, fault
from tests.launcher import Launcher

LATER = pytest.mark.prove
TIMEOUT = 4.0  # seconds: of a collective, where a test waits for it
# of several that wait, one sees its own wait end, another that the first has closed its connection
GIVEN_UP = "Timed out waiting|Application timeout|Connection closed by peer"
# A pipeline: (pp, tp, flags). Each stage waits for others only through messages.
PLAIN = (2, 1, "--num-layers 4")
CHUNKS = (2, 1, "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2")
V_SHAPE = (2, 2, "--num-layers 4 --pipeline-schedule zb-v")
LONG = (4, 1, "--num-layers 4 --pipeline-schedule zb-h1")
LOST = (*MESSAGES, "forward", "backward", "gradient sums", "update", "evaluation", "saving")
# of two stages: tests/faults/test_kills.py
STAGES = [(PLAIN, "wait", 0)] + [(LONG, point, 2) for point in LOST]
STAGES += [(V_SHAPE, point, 3) for point in MESSAGES]


@pytest.fixture
def ranks(launcher: Launcher) -> Ranks:
    return Ranks(launcher)


@pytest.mark.prove
@pytest.mark.parametrize("pipeline, point, rank", STAGES)
def test_a_killed_stage_is_named_by_all_others(
    ranks: Ranks, pipeline: tuple[int, int, str], point: str, rank: int
) -> None:
    pp, tp, flags = pipeline
    result = ranks.run(pp * tp, tp, fault(point, rank, "kill"), pp=pp, flags=flags)
    assert result.codes[rank] == -signal.SIGKILL
    check_blame(result, rank, "the process died (killed?)")
    if point == "wait" and pp * tp == 2:  # the other one needs it for its next action
        doing = rf"while waiting for [FB] chunk \d micro-batch \d from stage \d \(rank {rank}\)"
        assert re.search(doing, result.said(1 - rank)), result.said(1 - rank)


@pytest.mark.prove
@pytest.mark.parametrize(
    "pipeline, point, call, victim, doing, hangs",
    [
        (
            CHUNKS, "forward", 14, 1,
            "during F chunk 0 micro-batch 3 in stage 1 of iteration 2", "step: computing at "),
        (
            PLAIN, "evaluation", 2, 0,
            "while waiting for its last messages to be sent of the evaluation after iteration 2",
            "evaluation: computing at "),
        (  # who times out first waits for one who waits, too
            LONG, "forward", 12, 2,
            "during F chunk 0 micro-batch 3 in stage 2 of iteration 2", "step: computing at "),
        (
            V_SHAPE, "forward", 6, 2,
            "during F chunk 1 micro-batch 2 in stage 2 of iteration 1", "step: computing at "),
        (V_SHAPE, "update", 2, 3, "during the update of iteration 2", "step: computing at "),
    ],
)  # fmt: skip
def test_a_stage_that_stalls_ends_the_run_after_the_timeout(
    ranks: Ranks,
    pipeline: tuple[int, int, str],
    point: str,
    call: int,
    victim: int,
    doing: str,
    hangs: str,
) -> None:
    """It is alive and beats; those who wait for it give up, and all name it and where it is."""
    pp, tp, flags = pipeline
    how = {"point": point, "rank": victim, "call": call, "how": "stall"}
    began = time.monotonic()
    result = ranks.run(pp * tp, tp, how, pp=pp, flags=flags, timeout=TIMEOUT, monitor=PATIENCE)
    assert result.codes == [1] * pp * tp and time.monotonic() - began < LIMIT
    last_lines = [result.said(rank).splitlines()[-1] for rank in range(pp * tp)]
    for rank, last in enumerate(last_lines):
        assert last.startswith(f"[rank {rank}] stopping"), last
        assert (
            f"rank {victim} failed first {doing}: rank {victim} hangs in the phase {hangs}" in last
        )
        assert re.search(rf"; rank \d gave up: .*({GIVEN_UP})", last), last
        assert last.partition(" failed first ")[2] == last_lines[0].partition(" failed first ")[2]
