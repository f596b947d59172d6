# SPDX-License-Identifier: Apache-2.0
"""A bit that flips in a weight of one rank of a real run: found in time, named, replayed."""

from typing import Any

import pytest

from tests.faults.small_run import MODEL, weights
from tests.launcher import Launcher, Result

FLAGS = [flag for flag in MODEL if flag != "--sequence-parallel"]
CHECKED = "--check-replicas 2 --save-interval 3 --save {dir}/saved --load {dir}/saved".split()


def flip(rank: int, *calls: int) -> list[dict[str, Any]]:
    """Describe a bit that flips before these updates, counted over the process."""
    return [{"point": "update", "rank": rank, "call": call, "how": "flip"} for call in calls]


def run(launcher: Launcher, ranks: int, *more: str, fault: Any = None) -> Result:
    flags = [*FLAGS, "--global-batch-size", "8", *CHECKED, *more]
    return launcher.run(ranks, flags, fault=fault, monitor={"silence": 8.0})


@pytest.mark.prove
def test_a_transient_flip_is_replayed_and_the_run_goes_on_as_if_it_had_not_been(
    launcher: Launcher,
) -> None:
    """Two ranks hold the weight: only the replay tells which of them was wrong."""
    want = run(launcher, 2)
    assert want.codes == [0, 0], want.said(0)
    result = run(launcher, 2, "--on-replica-mismatch", "rewind", fault=flip(1, 5))
    assert result.codes == [0, 0], result.said(0)
    said = result.said(0, "out")
    assert "replicas differ at iteration 6: " in said
    assert "differs on rank 0 or rank 1 of the ranks [0, 1]" in said
    assert "rank 1 had other bits: the fault was transient; continuing from there" in said
    assert weights(result) == weights(want) and result.saved()[1:] == want.saved()


@pytest.mark.prove
def test_a_flip_ends_the_run_with_its_rank(launcher: Launcher) -> None:
    result = run(launcher, 2, fault=flip(0, 4))
    assert result.codes == [1, 1] and result.saved() == ["step_00000003"]
    for rank in range(2):
        (line,) = result.said(rank).splitlines()
        assert "replicas differ at iteration 4" in line and "rank 0 had other bits" in line


@pytest.mark.prove
def test_a_flip_that_comes_again_is_called_persistent(launcher: Launcher) -> None:
    """Iterations 4 to 6 are made twice: update 5 is the process's 5th and its 8th."""
    result = run(launcher, 2, "--on-replica-mismatch", "rewind", fault=flip(1, 5, 8))
    assert result.codes == [1, 1] and "the fault is persistent" in result.said(0)
    assert result.saved() == ["step_00000000", "step_00000003"]


@pytest.mark.prove
def test_three_copies_name_the_rank_without_a_replay(launcher: Launcher) -> None:
    more = ["--tensor-model-parallel-size", "1", "--global-batch-size", "12"]
    flags = [*FLAGS, *more, "--check-replicas", "1"]
    result = launcher.run(3, flags, fault=flip(2, 3), monitor={"silence": 8.0})
    assert result.codes == [1, 1, 1]
    line = result.said(0)
    assert "replicas differ at iteration 3" in line and "differs on rank 2 of the ranks" in line
    assert "the steps since the checkpoint were not replayed (there is no --save)" in line
