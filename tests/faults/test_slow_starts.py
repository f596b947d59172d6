# SPDX-License-Identifier: Apache-2.0
"""A start that takes long says what it waits for: real ranks, held at one place after another."""

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launcher import Launcher, Result
from training.data.indexed import IndexedWriter

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --lr 1e-3 "
    "--tokenizer-type NullTokenizer --vocab-size 200 --micro-batch-size 1 --global-batch-size 2 "
    "--device cpu --eval-interval 100 --save-interval 1 --save {dir}/saved --load {dir}/saved"
).split()
# in `make test` a start is slow after less than a second
TOLD = [
    pytest.param({"first": 0.4}, id="0.4 s"),
    pytest.param({}, marks=pytest.mark.prove, id="5 s"),
]
POINT = r"MASTER_ADDR:MASTER_PORT \(127\.0\.0\.1:\d+\)"
SECONDS = r": waited \d+ s of \d+ s$"
# place: (rank held there, what a rank that waits for it says, what is said when it is over)
HELD = {
    "before the meeting": (
        1,
        rf"\[rank 0\] waiting for rank 1 \(on .*\) to connect to {POINT}{SECONDS}",
        r"\[rank 0\] rank 1 \(.*\) connected, after \d+ s",
    ),
    "connect": (1, r"\[rank 0\] connecting .*; rank 1 is at: connecting .*: \d+ s so far$", "done"),
    "loading": (
        1,
        r"\[rank 0\] reading .*step_00000001, at .*; waiting for others: rank 1 is at: reading .*"
        r"step_00000001.*: \d+ s so far$",
        r"\[rank 0\] reading .*step_00000001: done, after \d+ s",
    ),
    "index": (  # in the process that comes first, for which the other one waits
        -1,
        r"\[rank 0\] (making the sample order of .*/corpus in .*corpus-cache, at .*s so far"
        r"|waiting for the sample order of .*, which another process makes \(.*: waited .*)$",
        "making .* done|the sample order of .* is ready, after",
    ),
}


@pytest.fixture
def saved(launcher: Launcher) -> Any:
    """Save one step of a run; return its folder and its flags."""
    folder = launcher.folder / f"slow{launcher.jobs}"
    folder.mkdir()
    with IndexedWriter(str(folder / "corpus"), np.dtype(np.uint16)) as out:
        for _ in range(500):  # the order of a smaller corpus is not cached
            out.add(np.arange(50))
    argv = [*MODEL, "--data-path", f"{folder}/corpus", "--split", "1,0,0"]
    launcher.start(2, [*argv, "--train-iters", "1"], folder)
    assert launcher.wait().codes == [0, 0]
    return folder, [*argv, "--train-iters", "2", "--data-cache-path", f"{folder}/corpus-cache"]


def said(folder: Path, rank: int, pattern: str, seconds: float) -> str:
    """Return the line of a rank that fits, once it is there."""
    deadline, text = time.monotonic() + seconds, ""
    while time.monotonic() < deadline:
        text = (folder / f"err.{rank}").read_text()
        for line in text.splitlines():
            if re.search(pattern, line):
                return line
        time.sleep(0.02)
    raise AssertionError(f"rank {rank} did not say {pattern}, but:\n{text}")


@pytest.mark.prove
@pytest.mark.parametrize("told", TOLD)
def test_each_wait_for_a_late_rank_is_told_and_its_end(
    launcher: Launcher, saved: Any, told: dict[str, float]
) -> None:
    folder, argv = saved
    # what a rank does is known only after some seconds
    held = {place: HELD[place] for place in HELD if place != "connect" or not told}
    faults = [
        {"point": place, "rank": rank, "call": 1, "how": "wait", "file": f"go {place}"}
        for place, (rank, _, _) in held.items()
    ]
    launcher.start(2, argv, folder, fault=faults, **told)
    for place, (_, waits, _) in held.items():
        said(folder, 0, waits, 40)
        (folder / f"go {place}").touch()
    result = launcher.wait()
    assert result.codes == [0, 0], result.said(0) + result.said(1)
    lines = result.said(0).splitlines()
    for _, waits, over in held.values():
        at = [i for i, line in enumerate(lines) if re.search(waits, line)]
        assert any(re.search(over, line) for line in lines[at[-1] + 1 :]), (over, lines)
    assert not re.search("waiting for rank 0", result.said(1)), "rank 0 tells it"


@pytest.mark.parametrize("told", TOLD)
def test_a_rank_0_that_does_not_come_is_told_by_one_rank(
    launcher: Launcher, told: dict[str, float]
) -> None:
    argv = [*MODEL, "--mock-data", "--train-iters", "1", "--global-batch-size", "4"]
    meeting = 2.0 if told else 8.0
    launcher.start(4, argv, absent=[0], meeting=meeting, **told)
    result: Result = launcher.wait()
    lines = [line for rank in (1, 2, 3) for line in result.said(rank).splitlines()]
    waits = rf"waiting for rank 0 to connect to {POINT}: .*refused{SECONDS}"
    tellers = {line.split("]")[0] for line in lines if re.search(waits, line)}
    assert len(tellers) == 1, lines
    for rank in (1, 2, 3):
        assert re.search(rf"rank 0 did not connect to {POINT} in \d+ s", result.said(rank))
    assert result.codes[1:] == [1, 1, 1]
