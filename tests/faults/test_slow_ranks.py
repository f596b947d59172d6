# SPDX-License-Identifier: Apache-2.0
"""Real runs with a rank or a link that is slow from a step on, and clean runs.

tests/training/run/watch/test_slow_ranks.py has the short form: tables that were made up.
"""

import re
from typing import Any

import pytest

from tests.launcher import Launcher

MODEL = (
    "--mock-data --vocab-size 500 --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 32 --lr 1e-3 --log-interval 10 --num-workers 0 --train-iters 110"
).split()
LAYOUTS = {
    "tp": "--tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 1",
    "dp": "--zero-stage 1 --global-batch-size 2",
    "pp": "--pipeline-model-parallel-size 2 --global-batch-size 2",
}
PLACES = {  # what: (point, how, seconds)
    "data": ("data", "slow", 0.2),
    "compute": ("forward", "slow", 0.2),
    "link": ("a wait", "slow inside", 0.02),
}
BEGINS = 45  # the step; before it a run is young


def run(launcher: Launcher, layout: str, fault: Any = None, flags: str = "") -> Any:
    argv = [*MODEL, *LAYOUTS[layout].split(), *flags.split()]
    result = launcher.run(2, argv, fault=fault, limit=300.0)
    assert result.codes == [0, 0], result.said(0)
    return result


@pytest.mark.prove
@pytest.mark.parametrize(
    "layout, what, rank",
    [(a, b, (m + n) % 2) for m, a in enumerate(LAYOUTS) for n, b in enumerate(PLACES)],
)
def test_what_is_slow_is_named(launcher: Launcher, layout: str, what: str, rank: int) -> None:
    point, how, seconds = PLACES[what]
    fault = {"point": point, "rank": rank, "call": 1, "times": 10**6, "from": BEGINS}
    fault |= {"how": how, "seconds": seconds}
    result = run(launcher, layout, fault, "--no-shared-memory")
    lines = [line for line in result.said(0, "out").splitlines() if " is slow" in line]
    assert len(lines) == 1, lines
    if what == "link":
        assert lines[0].startswith(f"the {layout} link of ranks 0, 1 is slow: ")
    else:
        assert lines[0].startswith(f"rank {rank} is slow in {what}: ")
    found = re.search(r": ([\d.]+) ms of each step of ([\d.]+) ms \((\d+)%\)$", lines[0])
    assert found is not None, lines
    rows = [row for row in result.rows() if "slow_rank_seconds" in row]
    worst = max(rows, key=lambda row: row["slow_rank_seconds"])
    assert rows[0]["iteration"] <= BEGINS and worst["slow_rank_seconds"] > 0.5 * seconds
    if what != "link":
        each = seconds * (2 if (layout, what) == ("pp", "compute") else 1)  # two micro-batches
        assert abs(float(found[1]) / 1e3 - each) < 0.5 * each
        assert worst["slow_rank"] == rank


@pytest.mark.prove
@pytest.mark.parametrize("flags", ["", "--no-shared-memory"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_clean_run_names_nobody(launcher: Launcher, layout: str, flags: str) -> None:
    result = run(launcher, layout, flags=flags)
    assert " is slow" not in result.said(0, "out")
