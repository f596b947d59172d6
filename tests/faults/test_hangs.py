# SPDX-License-Identifier: Apache-2.0
"""Ranks that hang, anywhere in a step, in real runs: who is named, where, and how soon all end.

The short form has one; the long form every place in three layouts, runs of one rank, and runs that
are slow and do not hang.
"""

import json
import re
import signal
from typing import Any

import pytest

from tests.faults.small_run import Ranks
from tests.launcher import Launcher, Result

LATER = pytest.mark.prove
SECONDS = 5.0  # --hang-timeout
SLACK = 5.0  # the promise: the run is over so many seconds after that
SOON = {"grace": 0.5}
LAYOUTS = {  # name: (tp, pp, more flags)
    "tp 2": (2, 1, ""),
    "pp 2": (1, 2, "--num-workers 0"),
    "dp 2, ZeRO 3": (1, 1, "--zero-stage 3 --overlap-grad-reduce --overlap-param-gather"),
}
STEP, DATA = "hangs in the phase step: ", "hangs in the phase data: in the data loader at "
OURS = r"(mpu|model|training|pretrain_llama)\S*\.py:\d+ \(\w+\)"
PLACES = {  # name: (point, how, call, what is said)
    "data": ("data", "stall", 2, DATA + OURS),
    "forward": ("forward", "stall", 2, f"{STEP}computing at {OURS}"),
    "backward": ("backward", "stall", 9, f"{STEP}computing at {OURS}"),
    "collective": ("wait for a collective", "stall", 7, f"{STEP}.* at {OURS}"),
    "update": ("update", "stall", 2, f"{STEP}computing at {OURS}"),
    "evaluation": ("evaluation", "stall", 2, f"hangs in the phase evaluation: computing at {OURS}"),
    "save": ("saving", "stall", 1, f"hangs in the phase save: in a checkpoint's files at {OURS}"),
    "Python's lock held": (
        "update", "hold", 2,
        rf"no heartbeat .* Python interpreter is blocked \(.*\) at {OURS}; its last report, "
        r".*before: \S",
    ),
    "stopped": ("backward", "stop", 9, r"its process is stopped \(SIGSTOP\?\); its last"),
}  # fmt: skip
CASES = [
    (layout, place, (m + n + 1) % 2)
    for m, layout in enumerate(LAYOUTS)
    for n, place in enumerate(PLACES)
]
CASES += [("pp 2", "receive", rank) for rank in (0, 1)]
PLACES["receive"] = ("wait", "stall", 3, f"{STEP}.* at {OURS}")
SAMPLE = [("dp 2, ZeRO 3", "data", 1)]


@pytest.fixture
def ranks(launcher: Launcher) -> Ranks:
    return Ranks(launcher)


def run(ranks: Ranks, layout: str, fault: Any, flags: str = "", **job: Any) -> Result:
    """Run two ranks with a fault."""
    tp, pp, more = LAYOUTS[layout]
    return ranks.run(2, tp, fault, pp=pp, flags=f"{more} {flags}", **job)


def struck(result: Result, rank: int) -> float:
    """Return when a rank was struck, in seconds after the run began."""
    return json.loads((result.folder / f"struck.{rank}").read_text())["at"] - result.began


@pytest.mark.parametrize(
    "layout, place, rank",
    [pytest.param(*case, marks=[] if case in SAMPLE else LATER) for case in CASES],
)
def test_a_rank_that_hangs_is_named_and_all_end_in_time(
    ranks: Ranks, layout: str, place: str, rank: int
) -> None:
    point, how, call, says = PLACES[place]
    fault = {"point": point, "rank": rank, "call": call, "how": how}
    if place == "collective":  # not one of set-up, which --hang-timeout leaves out
        fault["from"] = 1
    result = run(ranks, layout, fault, f"--hang-timeout {SECONDS}", monitor=SOON)
    other = 1 - rank
    last = result.said(other).splitlines()[-1]
    assert f": rank {rank} failed first" in last and re.search(says, last), last
    assert result.codes[other] == 1
    assert result.codes[rank] == (-signal.SIGKILL if how in ("hold", "stop") else 1)
    assert result.ended[other] - struck(result, rank) < SECONDS + SLACK
    if how == "stall":
        assert result.ended[rank] - struck(result, rank) < SECONDS + SLACK
        own = result.said(rank)
        assert "stack of the thread MainThread:" in own and "fault_injection.py" in own
        assert (
            own.splitlines()[-1].partition("failed first")[2] == last.partition("failed first")[2]
        )


@LATER
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_hang_all_at_once_are_named_together(ranks: Ranks, layout: str) -> None:
    fault = {"point": "update", "rank": -1, "call": 2, "how": "stall"}
    result = run(ranks, layout, fault, f"--hang-timeout {SECONDS}", monitor=SOON)
    assert result.codes == [1, 1]
    for rank in (0, 1):
        last = result.said(rank).splitlines()[-1]
        assert "ranks 0 and 1, which is every rank, hang in the phase step: computing at" in last
        assert result.ended[rank] - struck(result, rank) < SECONDS + SLACK


@LATER
def test_ranks_that_hang_all_at_once_end_at_the_timeout_of_collectives_at_the_latest(
    ranks: Ranks,
) -> None:
    """The report comes at the learnt limit, once; the end at --distributed-timeout-minutes."""
    fault = {"point": "data", "rank": -1, "call": 2, "how": "stall"}
    result = run(
        ranks, "tp 2", fault, "--distributed-timeout-minutes 1", monitor=SOON | {"floor": 6.0}
    )
    assert result.codes == [1, 1]
    said = result.said(0).splitlines()
    reports = [line for line in said if "which is every rank, hang in the phase data" in line]
    assert len(reports) == 2 and "(limit " in reports[0] and "stopping" in reports[1]
    assert reports[0].startswith("[rank 0] ranks 0 and 1")
    for rank in (0, 1):
        assert 60 < result.ended[rank] - struck(result, rank) < 60 + SLACK


@LATER
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_report_is_made_once_and_a_rank_that_goes_on_may_go_on(ranks: Ranks, layout: str) -> None:
    # ten times a step of a busy machine is less than that
    fault = {"point": "data", "rank": 1, "call": 2, "how": "slow", "seconds": 24.0}
    flags = "--train-iters 4 --save-interval 9"
    result = run(ranks, layout, fault, flags, monitor=SOON | {"floor": 4.0})
    assert result.codes == [0, 0], result.said(0)
    said = [line for line in result.said(0).splitlines() if " hangs in the phase " in line]
    assert len(said) == 1 and said[0].startswith("[rank 0] rank 1 hangs in the phase "), said
    assert "in the data loader at " in said[0] and "; rank 0 waits in " in said[0]
    assert "[rank 0] the stack of rank 1, innermost first: " in result.said(0)
    assert "[rank 1] rank 1 hangs in the phase " in result.said(1)
    assert "stack of the thread MainThread:" in result.said(1)


@LATER
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_with_uneven_steps_and_slow_saves_is_no_hang(ranks: Ranks, layout: str) -> None:
    always = {"how": "slow", "call": 1, "times": 1000}
    faults = [
        {"point": "forward", "rank": -1, "seconds": 0.5, "vary": 7} | always,
        {"point": "evaluation", "rank": 1, "seconds": 2.5} | always,
        {"point": "saving", "rank": 0, "seconds": 4.0} | always,
    ]
    result = run(ranks, layout, faults, monitor=SOON | {"floor": 2.0})
    assert result.codes == [0, 0], result.said(0)
    assert "hang" not in result.said(0) + result.said(1)


@LATER
@pytest.mark.parametrize("place", ["data", "forward", "Python's lock held"])
def test_a_single_rank_that_hangs_ends_in_time(ranks: Ranks, place: str) -> None:
    point, how, call, says = PLACES[place]
    fault = {"point": point, "rank": 0, "call": call, "how": how}
    result = ranks.run(1, 1, fault, flags=f"--hang-timeout {SECONDS}", monitor=SOON)
    assert result.codes == [1]
    assert result.ended[0] - struck(result, 0) < SECONDS + SLACK
    if how == "hold":
        assert "Timeout (0:00:07" in result.said(0) and "in train_step" in result.said(0)
    else:
        assert re.search(says, result.said(0).splitlines()[-1])
