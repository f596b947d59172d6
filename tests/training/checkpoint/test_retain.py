# SPDX-License-Identifier: Apache-2.0
"""Old checkpoints go, and never the one that a run would resume from."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpu.grid import Grid
from training.checkpoint import Checkpoint, CheckpointError, find_latest, save
from training.checkpoint.manifest import holds_a_save, step_name
from training.checkpoint.pieces import whole
from training.checkpoint.retain import clear_rubbish, evaluations, prune

SHARD = "rank_00000-000.safetensors"


class Killed(BaseException):
    """Stands for a process that ends right here: nothing may clean up after it."""


def steps(root: Path) -> list[str]:
    """The directories left, without what people read (`latest`); step_00000012 as "12"."""
    names = sorted(n for n in os.listdir(root) if n != "latest")
    return [n.removeprefix("step_").lstrip("0") or "0" for n in names]


def flip(directory: Path, name: str = SHARD) -> None:
    """Flip a bit: the size stays, so only a hash can tell."""
    data = bytearray((directory / name).read_bytes())
    data[-1] ^= 1
    (directory / name).write_bytes(data)


def known(*numbers: int) -> set[str]:
    return {step_name(n) for n in numbers}


@pytest.fixture
def run(tmp_path: Path, write: Any) -> Callable[..., Path]:
    """run(10, 20, ...) -> a directory with those checkpoints."""

    def run(*numbers: int) -> Path:
        for n in numbers:
            write(tmp_path, n)
        return tmp_path

    return run


def silent(line: str) -> None:
    raise AssertionError(f"nothing to tell, but: {line}")


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_damaged_newest_counts_as_none(run: Any, newest: Any, keep_last: int) -> None:
    root = run(1, 2, 3, 4)
    flip(root / step_name(4))
    notes: list[str] = []
    prune(root, keep_last, None, set(), notes.append)
    assert steps(root) == ["2", "3", "4"][2 - keep_last :]
    assert len(notes) == 1 and "step_00000004 is left in place and not counted" in notes[0]
    assert f"{SHARD} has another XXH3-128" in notes[0]
    assert newest(root)[0] == 3


def test_what_this_run_wrote_is_not_hashed_but_must_have_its_sizes(run: Any) -> None:
    root = run(1, 2, 3)
    os.truncate(root / step_name(3) / SHARD, 5)
    flip(root / step_name(2))
    notes: list[str] = []
    prune(root, 1, None, known(1, 2, 3), notes.append)
    assert steps(root) == ["2", "3"], "2 is believed, 3 is not"
    assert len(notes) == 1 and "has 5 bytes" in notes[0]


def test_what_is_no_directory_of_ours_is_left(run: Any, tmp_path_factory: Any) -> None:
    root, other = run(5, 6), tmp_path_factory.mktemp("other")
    (other / "precious").write_text("")
    (root / "step_00000001").symlink_to(other)
    (root / "step_00000002").write_text("a file")
    for name in ("step_3", "mystep_00000004", "step_00000004.bak", "logs"):
        (root / name).mkdir()
    before = set(os.listdir(root))
    assert prune(root, 1, None, set(), silent) == [step_name(5)]
    assert set(os.listdir(root)) == before - known(5)
    assert (other / "precious").exists()


def test_a_step_set_aside(run: Any, newest: Any) -> None:
    """Without a whole successor it is the checkpoint of its step, with one it is rubbish."""
    root = run(1, 2)
    os.rename(root / step_name(2), root / f"{step_name(2)}.old-aa")
    prune(root, 1, None, set(), silent)
    assert steps(root) == ["2.old-aa"] and newest(root)[0] == 2
    clear_rubbish(root, set(), silent)
    assert steps(root) == ["2.old-aa"]
    run(2)
    (root / step_name(2)).joinpath(SHARD).unlink()
    notes: list[str] = []
    prune(root, 1, None, set(), notes.append)
    clear_rubbish(root, set(), silent)
    assert steps(root) == ["2", "2.old-aa"] and len(notes) == 1
    flip(root / f"{step_name(2)}.old-aa")
    shutil.rmtree(root / step_name(2))
    run(2)
    assert prune(root, 9, None, set(), silent) == [f"{step_name(2)}.old-aa"]
    assert steps(root) == ["2"]


def test_a_save_leaves_what_a_prune_removes_meanwhile(run: Any) -> None:
    root, notes = run(1, 2), []

    def hook(now: str) -> None:
        if now == "trash":
            clear_rubbish(root, set(), notes.append)

    assert prune(root, 1, None, set(), notes.append, hook) == [step_name(1)]
    assert not notes and steps(root) == ["2"]


def test_what_a_killed_save_left_is_cleared(run: Any, newest: Any) -> None:
    root = run(1, 2)
    for name in ("step_00000003.tmp-ab", "step_00000002.old-ab"):
        shutil.copytree(root / step_name(2), root / name)
    (root / ".latest-ab").write_text("")
    (root / ".probe-cd").mkdir()
    (root / ".probe-cd" / "state.json").write_text("")
    kept = ("notes.tmp-ab", "step_00000001.old-x", ".latest-", "step_00000001.trash")
    for name in kept:
        (root / name).mkdir()
    clear_rubbish(root, set(), silent)
    assert sorted(os.listdir(root)) == sorted(["latest", *known(1, 2), *kept])
    assert newest(root) == (2, [])


def test_what_cannot_be_removed_is_told(
    run: Any, newest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, notes = run(1, 2, 3), []

    def refuse(*paths: Any, **more: Any) -> None:
        raise PermissionError(13, "Permission denied", str(paths[0]))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        assert prune(root, 1, None, set(), notes.append) == []
    assert len(notes) == 2 and "step_00000001 was not removed: Permission denied" in notes[0]
    notes.clear()
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        assert prune(root, 1, None, set(), notes.append) == [step_name(1), step_name(2)]
    assert len(notes) == 2 and ".trash-" in notes[0] and "could not be removed" in notes[0]
    assert newest(root) == (3, [])
    prune(root, None, None, set(), silent)
    assert steps(root) == ["3"], "the next prune clears it, also one that has nothing to remove"
    assert prune(root / "no", 1, None, set(), notes.append) == []
    assert notes[-1].startswith("no checkpoint was removed: No such file or directory")


def make(root: Path, step: int, good: bool) -> None:
    pieces = [whole("a", torch.full((3,), float(step)))]
    save(root, step=step, pieces=pieces, state={}, grid=Grid())
    if not good:
        flip(root / step_name(step))


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(st.integers(0, 12), st.booleans(), max_size=6),
    st.one_of(st.none(), st.integers(1, 4)),
    st.one_of(st.none(), st.integers(1, 5)),
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.one_of(st.none(), st.integers(0, 12)),
)
def test_any_directory_keeps_what_it_should(
    found: dict[int, bool],
    keep_last: int | None,
    interval: int | None,
    told: list[bool],
    kill: int | None,
) -> None:
    """found: step -> whether it is whole; told: of which whole ones the caller knows that."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for step, good in found.items():
            make(root, step, good)
        sure = {step_name(n) for n, t in zip(found, told, strict=False) if t and found[n]}
        count = 0

        def hook(phase: str) -> None:
            nonlocal count
            count += 1
            if kill is not None and count > kill:
                raise Killed

        try:
            prune(root, keep_last, interval, sure, lambda line: None, hook)
        except Killed:
            pass
        whole_steps = sorted(n for n in found if found[n])
        if whole_steps:
            latest = find_latest(root, Grid(), pieces=[whole("a", torch.zeros(3))], note=str)
            assert latest is not None and latest.step == whole_steps[-1]
        prune(root, keep_last, interval, sure, lambda line: None)
        left = {int(n) for n in steps(root)}
    window = keep_last or 1
    if keep_last is interval is None or len(whole_steps) < window:
        assert left == set(found)
    else:
        edge = whole_steps[-window]
        assert left == {n for n in found if n >= edge or (interval and n % interval == 0)}


@pytest.fixture
def lossy(tmp_path: Path, write: Any) -> Callable[..., Path]:
    """lossy({10: (4.0, True), ...}) -> a directory with checkpoints of these losses; True: saved
    for its loss alone; None in place of a pair: without a loss.
    """

    def lossy(found: dict[int, tuple[float, bool] | None], of: str = "a") -> Path:
        for n, pair in found.items():
            entry = {"set": "", "digest": of}
            more = {"evaluation": {**entry, "loss": pair[0], "only": pair[1]}} if pair else {}
            write(tmp_path, n, more=more)
        return tmp_path

    return lossy


LOSSES = {10: (4.0, False), 20: (2.0, False), 30: (3.0, True), 40: None, 50: (2.0, False)}


@pytest.mark.parametrize(
    ("keep_last", "interval", "outdone", "left"),
    [
        (1, None, False, "20 50"),  # of equal losses the first is the best
        (2, None, True, "20 40 50"),
        (3, None, True, "20 30 40 50"),  # the newest stay, whatever they were saved for
        (None, 30, True, "20 50"),  # one saved for its loss alone is no multiple
        (None, None, True, "10 20 40 50"),  # only what was saved for its loss goes
        (None, None, False, "10 20 30 40 50"),
    ],
)
def test_the_lowest_loss_stays(
    lossy: Any, keep_last: int | None, interval: int | None, outdone: bool, left: str
) -> None:
    root = lossy(LOSSES)
    prune(root, keep_last, interval, set(), silent, outdone=outdone)
    assert steps(root) == left.split()


def test_the_lowest_loss_of_each_held_out_data_stays(lossy: Any) -> None:
    lossy({10: (4.0, False), 20: (5.0, False)})
    root = lossy({30: (7.0, False), 40: (8.0, False), 50: (9.0, False)}, of="b")
    prune(root, 1, None, set(), silent)
    assert steps(root) == ["10", "30", "50"]


def test_a_damaged_one_is_not_the_best(lossy: Any) -> None:
    """It stays for inspection, and the next one is the best of those that can be loaded."""
    root, notes = lossy(LOSSES), list[str]()
    flip(root / step_name(20))
    prune(root, 1, None, known(50), notes.append)
    assert steps(root) == ["20", "50"]
    (note,) = notes
    assert "step_00000020 is left in place and is not the best" in note
    flip(root / step_name(50))
    assert prune(root, 1, None, set(), lambda line: None) == []


@pytest.mark.parametrize("loss", ["2.0", 2, None])
def test_a_false_loss_is_refused(
    lossy: Any, loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is none that a run loads, nor is it the best."""
    saving = sys.modules["training.checkpoint.save"]
    monkeypatch.setattr(saving, "check_state", lambda state: None)  # as another program saves
    root = lossy({10: (9.0, False), 20: (loss, False)})
    with pytest.raises(CheckpointError, match="evaluation must hold set, digest, loss, only"):
        Checkpoint(root / step_name(20))
    assert [*evaluations(root)] == [step_name(10)]


@pytest.mark.parametrize("tokenizer", ["weft.model", "llama3.tiktoken", "tokenizer.json"])
@pytest.mark.parametrize("own", ["", "notes.txt"])
def test_a_killed_save_is_known_by_the_names_of_its_files(tmp_path, tokenizer, own):
    folder = tmp_path / "step_00000003.tmp-0123456789abcdef"
    folder.mkdir()
    for name in ("rank_00000-000.safetensors", "index.json", tokenizer, own or "state.json"):
        (folder / name).write_bytes(b"x")
    assert holds_a_save(folder) == (not own)


@pytest.mark.parametrize("moment", range(8))
@pytest.mark.parametrize("does", ["save", "prune"])
def test_a_kill_leaves_nothing_that_stays_with_a_tokenizer_of_any_name(
    run: Any, write: Any, monkeypatch: pytest.MonkeyPatch, does: str, moment: int
) -> None:
    """A save is killed before it writes one of its files, a removal before it removes one."""
    attach = {"gpt2-vocab.json": b"{}", "merges.txt": b""}
    more = {"tokenizer_model": "gpt2-vocab.json"}
    root, count = run(), 0

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Path, *args: Any, **how: Any) -> Any:
            nonlocal count
            count += 1
            if count > moment:
                raise Killed
            return call(path, *args, **how)

        return called

    write(root, 8, more, attach=attach)
    with monkeypatch.context() as patch, suppress(Killed):
        if does == "save":
            saving = sys.modules["training.checkpoint.save"]
            for name in ("write_bytes", "write_json", "write_safetensors"):
                patch.setattr(saving, name, dying(getattr(saving, name)))
            write(root, 9, more, attach=attach)
        else:
            write(root, 9)
            patch.setattr(os, "unlink", dying(os.unlink))
            prune(root, 1, None, set(), silent)
    write(root, 10, more, attach=attach)
    prune(root, 1, None, set(), silent)
    assert sorted(os.listdir(root)) == ["latest", "step_00000010"]
