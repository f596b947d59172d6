# SPDX-License-Identifier: Apache-2.0
"""One run at a time writes to a directory, and a dead run's lock stops nobody."""

import errno
import fcntl
import json
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.training.checkpoint.holder import Holder
from training.checkpoint import SaveError
from training.checkpoint.lock import DirectoryLock


def test_a_second_writer_is_told_of_the_first_and_a_dead_one_is_none(tmp_path: Path) -> None:
    other = Holder(tmp_path)
    with pytest.raises(SaveError, match=f"written by another run: process {other.pid} on .*since"):
        DirectoryLock(tmp_path, patience=0)
    notes: list[str] = []
    threading.Timer(0.5, other.kill).start()
    lock = DirectoryLock(tmp_path, notes.append, patience=20)
    assert len(notes) == 1 and f"process {other.pid}" in notes[0] and "waiting" in notes[0]
    other.process.join(60)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    lock.close()
    other = Holder(tmp_path)  # and closing gives it back
    other.free()


def test_who_waited_for_a_lock_that_was_undone_has_the_one_at_its_path(tmp_path: Path) -> None:
    """Its file was removed: a third run would lock a new one."""
    first, context = DirectoryLock(tmp_path), multiprocessing.get_context("fork")
    at, notes = context.Pipe(duplex=False)

    def wait() -> None:
        DirectoryLock(tmp_path, notes.send, patience=20)
        notes.send("held")
        time.sleep(60)

    second = context.Process(target=wait, daemon=True)
    second.start()
    try:
        assert "waiting" in at.recv()
        first.close(undo=True)
        assert at.recv() == "held"
        with pytest.raises(SaveError, match=f"written by another run: process {second.pid}"):
            DirectoryLock(tmp_path, patience=0)
    finally:
        second.kill()
        second.join()


def test_an_undone_lock_leaves_the_file_of_the_run_before(tmp_path: Path) -> None:
    DirectoryLock(tmp_path).close()
    path = tmp_path / "lock"
    path.write_bytes(json.dumps(json.loads(path.read_bytes()) | {"pid": 12345}).encode())
    before = path.read_bytes()
    lock = DirectoryLock(tmp_path)
    assert path.read_bytes() != before
    lock.close(undo=True)
    assert path.read_bytes() == before


def test_a_child_keeps_no_lock_that_its_parent_lost(tmp_path: Path) -> None:
    """A data worker that outlives the trainer must not keep the next run out."""
    lock = DirectoryLock(tmp_path)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0)
    lock.close()
    other = Holder(tmp_path)
    other.free()
    os.write(write, b"x")
    assert os.waitpid(child, 0)[1] == 0


def test_a_file_system_without_locks_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lockf(*args: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    notes: list[str] = []
    DirectoryLock(tmp_path, notes.append)
    assert len(notes) == 1 and "does not support locks" in notes[0]


def test_a_link_in_the_locks_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("text")
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic link"):
        DirectoryLock(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "text"
