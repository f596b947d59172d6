# SPDX-License-Identifier: Apache-2.0
"""A run that is killed repeatedly ends with the bits of an undisturbed run.

`pytest tests/faults/test_repeated_kills.py -m prove -s` prints the cost of runs with 50 kills each.
"""

import json
from typing import Any

import pytest

from tests.faults.repeated_kills import RepeatedKills, draw
from tests.faults.small_run import Ranks, weights
from tests.launcher import Launcher, Result

BASE = "--eval-interval 50 --save-interval 4 --train-iters"
ZERO = "--zero-stage 2 --overlap-grad-reduce --ddp-bucket-size 20000"
BEHIND = "--async-save --keep-last-k 2"
RUNS = {  # name: (ranks, tp, pp, flags)
    "dp 2, zero 2": (2, 1, 1, ZERO),
    "dp 2, zero 2, saves behind the training, two kept": (2, 1, 1, f"{ZERO} {BEHIND}"),
    "tp 2, two kept": (2, 2, 1, "--keep-last-k 2"),
    "pp 2, saves behind the training": (2, 1, 2, "--num-layers 4 --async-save"),
}


def state(result: Result, step: int) -> dict[str, Any]:
    """Return what a checkpoint says beside the tensors, without the two that name its folder."""
    path = result.folder / "saved" / f"step_{step:08d}" / "state.json"
    found = json.loads(path.read_text())
    return {key: value for key, value in found.items() if key not in ("config", "command_line")}


@pytest.mark.prove
@pytest.mark.parametrize(
    "name, kills, steps, seed",
    [
        ("dp 2, zero 2, saves behind the training, two kept", 2, 16, 1),
        *((name, 50, 200, 2) for name in RUNS),
    ],
)
def test_repeated_kills_end_like_a_run_that_nobody_disturbed(
    launcher: Launcher, name: str, kills: int, steps: int, seed: int
) -> None:
    ranks = Ranks(launcher)
    count, tp, pp, flags = RUNS[name]
    command = dict(ranks=count, tp=tp, pp=pp, flags=f"{flags} {BASE} {steps}")
    oracle = ranks.run(**command)
    assert set(oracle.codes) == {0}, oracle.said(0)

    drawn = draw(seed, kills, steps, count, flags + " --pipeline" * (pp > 1))
    kills_of_one_run = RepeatedKills(ranks, command, drawn)
    report = kills_of_one_run.run()
    report.useful = sum(row.get("step_seconds", 0.0) for row in oracle.rows())
    print(f"\n{name}, {steps} steps, a save every 4, seed {seed}: {report}")
    ended = kills_of_one_run.result
    assert set(ended.codes) == {0}, ended.said(0)
    assert report.kills == kills
    assert weights(ended, steps) == weights(oracle, steps)
    assert state(ended, steps) == state(oracle, steps)
    # a step that was done twice has two rows: they are the same, too
    assert set(ended.losses()) == set(oracle.losses())
    assert len(ended.rows()) > len(oracle.rows()), "no step was lost: were there kills?"
    assert [name for name in ended.saved() if "." in name] == []
