# SPDX-License-Identifier: Apache-2.0
"""A run of two ranks goes on, and saves again, after its disk fills up, breaks, closes or vanishes.

Steps 3, 6 and 8 are saved, and the second save meets the fault. Then all ranks agree that step 6
was not saved, what was saved before is untouched, nothing unfinished is left, step 8 is saved, and
the run ends with the bits of an undisturbed one.
"""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.small_run import Ranks, weights
from tests.launcher import Launcher, Result

LATER = pytest.mark.prove
FLAGS = "--zero-stage 2 --ddp-bucket-size 20000 --num-workers 0"
BACKGROUND = "--async-save"


@pytest.fixture
def ranks(launcher: Launcher) -> Ranks:
    return Ranks(launcher)


@pytest.fixture(scope="module")
def oracle(launcher: Launcher) -> Result:
    result = Ranks(launcher).run(2, 1, flags=FLAGS)
    assert result.codes == [0, 0], result.said(0)
    assert result.saved() == ["step_00000003", "step_00000006", "step_00000008"]
    return result


@pytest.fixture
def folder(launcher: Launcher, tmp_path: Path) -> Path:
    """An empty folder for a run; its `saved` is what --save names."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def disk(folder: Path) -> Iterator[Callable[[str], Path]]:
    """disk(options) -> a file system in memory, in the place of folder/saved."""
    path = folder / "saved"

    def mount(options: str) -> Path:
        path.mkdir(mode=0o700)
        command = ["mount", "-t", "tmpfs", "-o", f"mode=0700,{options}", "none", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a small disk needs the right to mount one: {done.stderr.strip()}")
        return path

    yield mount
    if path.is_mount():
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def at(point: str, rank: int, how: str, call: int = 1, **more: Any) -> dict[str, Any]:
    """Describe a fault of the second save."""
    return {"point": point, "rank": rank, "call": call, "how": how, "save": 2} | more


def check_survived(
    result: Result, oracle: Result, why: str, kept: tuple[int, ...] = (3, 8), says: str = ""
) -> None:
    assert result.codes == [0, 0], result.said(0)
    (line,) = [line for line in result.said(0, "out").splitlines() if "was not saved" in line]
    assert line.startswith("the checkpoint of step 6 was not saved: ")
    assert why in line and says in line and line.endswith("; training continues"), line
    assert result.saved() == [f"step_{step:08d}" for step in kept]
    assert set(result.losses()) == set(oracle.losses())
    steps = [step for step in kept if step in (3, 8)]
    assert all(weights(result, step) == weights(oracle, step) for step in steps)


BROKEN = {  # what a rank's system call answers: (point, rank, how, calls, what is told)
    "a file may not grow, rank 0": ("saving", 0, "short", [1], "rank 0: File too large"),
    "a file may not grow, rank 1": ("saving", 1, "short", [1], "rank 1: File too large"),
    "no space on rank 1 alone": ("save: piece", 1, "ENOSPC", [4], "rank 1: No space left on"),
    "over quota on rank 1": ("save: piece", 1, "EDQUOT", [2], "rank 1: Disk quota exceeded"),
    "fsync of a shard, rank 1": ("fsync", 1, "EIO", [1], "rank 1: Input/output error"),
    "fsync of rank 0": ("fsync", 0, "EIO", [1, 2, 3, 4, 5], "rank 0: Input/output error"),
    "rename": ("rename", 0, "EIO", [1], "rank 0: Input/output error"),
    "stale handle": ("save: piece", 0, "ESTALE", [1], "rank 0: Stale file handle"),
}
CASES = [
    (name, calls[i % len(calls)], ("", BACKGROUND)[i % 2])
    for i, (name, (_, _, _, calls, _)) in enumerate(BROKEN.items())
]


@pytest.mark.prove
@pytest.mark.parametrize(
    "name, call, flags", CASES
)
def test_one_rank_s_disk_fails_and_all_go_on(
    ranks: Ranks, oracle: Result, name: str, call: int, flags: str
) -> None:
    point, rank, how, _, why = BROKEN[name]
    result = ranks.run(2, 1, at(point, rank, how, call), flags=f"{FLAGS} {flags}")
    check_survived(result, oracle, why)


@LATER
def test_a_rename_that_may_not_be_durable_is_told_of(ranks: Ranks, oracle: Result) -> None:
    """The sixth fsync is that of the directory above, after the rename: the checkpoint is there."""
    result = ranks.run(2, 1, at("fsync", 0, "EIO", 6), flags=FLAGS)
    check_survived(result, oracle, "rank 0: Input/output error", kept=(3, 6, 8))


@pytest.mark.prove
@pytest.mark.parametrize(
    "when, why",
    [
        ("save: start", "a checkpoint needs"),
        ("save: shards", "rank 0: No space left on device"),
    ],
)
def test_a_disk_is_full(
    ranks: Ranks, oracle: Result, disk: Any, folder: Path, when: str, why: str
) -> None:
    """Another program's file takes all that is left, and is gone again at the third save."""
    small = disk("size=30m")
    fill = at(when, 0, "fill", path=str(small))
    empty = at("save: start", 0, "empty", path=str(small), save=3)
    result = ranks.run(2, 1, [fill, empty], folder, flags=FLAGS)
    check_survived(result, oracle, why, says=str(small))


@pytest.mark.parametrize(
    "when, flags",
    [
        pytest.param("save: start", "", marks=LATER),
        pytest.param("save: piece", BACKGROUND, marks=LATER),
    ],
)
def test_the_directory_is_gone(
    ranks: Ranks, oracle: Result, folder: Path, when: str, flags: str
) -> None:
    fault = at(when, 0, "remove", path=str(folder / "saved"))
    result = ranks.run(2, 1, fault, folder, flags=f"{FLAGS} {flags}")
    if when == "save: start":  # nobody needs it yet: it is made anew
        assert result.codes == [0, 0] and weights(result) == weights(oracle)
        assert result.saved() == ["step_00000006", "step_00000008"]
    else:
        check_survived(result, oracle, "No such file or directory", kept=(8,))


@LATER
@pytest.mark.parametrize("flags", [BACKGROUND])
def test_a_failed_save_ends_the_run_where_that_was_asked_for(
    ranks: Ranks, oracle: Result, flags: str
) -> None:
    flags = f"{FLAGS} {flags} --on-save-failure stop"
    result = ranks.run(2, 1, at("save: piece", 1, "ENOSPC"), flags=flags)
    assert set(result.codes) == {1}
    assert "No space left on device" in result.said(0)
    assert "Traceback" not in result.said(0) + result.said(1)
    assert weights(result, 3) == weights(oracle, 3)
    resumed = ranks.run(2, 1, flags=flags, folder=result.folder)
    assert resumed.codes == [0, 0] and weights(resumed) == weights(oracle)
    assert set(resumed.losses()) == set(oracle.losses())


def test_a_read_only_disk_is_refused_before_the_first_step(
    ranks: Ranks, disk: Any, folder: Path
) -> None:
    path = disk("ro")
    check_refused(ranks.run(2, 1, None, folder, flags=FLAGS), path, "is not writable")


def test_a_path_below_a_file_is_refused_before_the_first_step(ranks: Ranks, folder: Path) -> None:
    (folder / "file").write_text("")
    path = folder / "file" / "saved"
    more = {str(rank): ["--save", str(path)] for rank in range(2)}
    check_refused(ranks.run(2, 1, None, folder, flags=FLAGS, more=more), path, "is not a directory")


def check_refused(result: Result, path: Path, why: str) -> None:
    assert result.codes == [2, 2]
    for rank in range(2):
        (line,) = result.said(rank).splitlines()
        assert line.startswith("pretrain_llama.py: ") and str(path) in line and why in line
    assert not (result.folder / "log.jsonl").exists() or not result.rows()
