# SPDX-License-Identifier: Apache-2.0
"""Checkpoints made to harm whoever loads them are refused in a sentence; none of their code runs.

The attacker can compute hashes and digests, so every JSON file and every header is checked by its
own rules. Nothing waits for a pipe, no memory grows beyond the files' size, nothing is unpickled.
"""

import json
import os
import pickle
import resource
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mpu.grid import Grid
from tests.sampling import sampled
from tools.checkpoints.show import verify
from training.checkpoint import CheckpointError, SaveError, check_writable, find_latest, save
from training.checkpoint.files import SUMS
from training.checkpoint.lock import DirectoryLock
from training.checkpoint.manifest import self_digest

SHARD = "rank_00000-000.safetensors"
JSONS = ("manifest.json", "index.json", "state.json")
ROOM = 1 << 30  # bytes of address space that a load may take
PATIENCE = 20  # seconds


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.fixture(autouse=True)
def guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hold every test to it: nothing unpickled, no wait without end, no memory without bound."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was to be unpickled")

    def late(*args: Any) -> None:
        raise AssertionError("the load hangs")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"),
                        (torch, "load")):  # fmt: skip
        monkeypatch.setattr(owner, name, refuse)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, limits[1]))
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    resource.setrlimit(resource.RLIMIT_AS, limits)
    assert not (tmp_path / "marker").exists(), "code ran"


@pytest.fixture
def evil(tmp_path: Path) -> bytes:
    return pickle.dumps(Evil(tmp_path / "marker"))


@pytest.fixture
def bad(tmp_path: Path, write: Any) -> Path:
    """The directory of step 2; step 1 is sound."""
    write(tmp_path, 1)
    return write(tmp_path, 2)


def sign(directory: Path, **changes: Any) -> None:
    """Make sizes, hashes and digest of a manifest right; `changes` of its entries come first."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text()) | changes
    for name, info in manifest["files"].items():
        if (directory / name).is_file():
            data = (directory / name).read_bytes()
            info |= {kind: new(data).hexdigest() for kind, (new, _) in SUMS.items()}
            info["size"] = len(data)
    path.write_text(json.dumps({**manifest, "digest": self_digest(manifest)}))


def check_sentence(text: str) -> None:
    assert "\n" not in text.strip() and len(text) < 2000, text
    assert "Traceback" not in text and "MemoryError" not in text, text


def check_passed_over(newest: Any, root: Path, why: str = "") -> None:
    """Step 1 is taken, and one line says why step 2 is not."""
    step, notes = newest(root)
    assert step == 1 and len(notes) == 1, notes
    assert "step_00000002 is skipped: rank 0: " in notes[0] and why in notes[0], notes
    check_sentence(notes[0])


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "common.pt"])
def test_a_pickled_checkpoint_of_another_program_is_refused(
    bad: Path, evil: bytes, newest: Any, name: str
) -> None:
    (bad.parent / name).write_bytes(evil)
    with pytest.raises(CheckpointError, match="Megatron-LM"):
        newest(bad.parent)


@pytest.mark.parametrize("name", [*JSONS, SHARD])
def test_a_pickle_in_the_place_of_a_file(bad: Path, evil: bytes, newest: Any, name: str) -> None:
    (bad / name).write_bytes(evil)
    if name != "manifest.json":
        sign(bad)
    check_passed_over(newest, bad.parent)
    assert [sound for sound, _ in verify([bad])] == [False]


def tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [5, 3], "data_offsets": [0, 60], **changes}


@pytest.mark.parametrize(
    "value", [[*range(1, 10_002)], [0], [-1], ["1"], [1.5], [True], {"1": 1}, "12", 7]
)
def test_iterations_to_pass_over_are_a_short_list(bad: Path, newest: Any, value: Any) -> None:
    """A state may not keep a run from training by passing over all of its steps."""
    state = json.loads((bad / "state.json").read_text()) | {"passed_over": value}
    (bad / "state.json").write_text(json.dumps(state))
    sign(bad)
    check_passed_over(newest, bad.parent, "passed_over must be a list of at most 10,000")


OUTSIDE = ("../secret", "../step_00000001/" + SHARD, "/etc/passwd", "a/../b", "a\0b", "", ".", "..")


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_name_leaves_the_directory(bad: Path, newest: Any, name: str) -> None:
    (bad.parent / "secret").write_bytes((bad / SHARD).read_bytes())
    index = json.loads((bad / "index.json").read_text())
    files = json.loads((bad / "manifest.json").read_text())["files"]
    for listed in (False, True):
        for entry in index.values():
            for part in entry["parts"]:
                part[0] = name
        (bad / "index.json").write_text(json.dumps(index))
        sign(bad, files={**files, name: dict(files[SHARD])} if listed else files)
        check_passed_over(newest, bad.parent, "bad entry for the ")


KINDS = ("pipe", "socket", "link", "dangling link", "loop", "device", "folder")
PLACES = [
    (name, KINDS[(i + j) % len(KINDS)])
    for i, name in enumerate((*JSONS, SHARD, ""))
    for j in (0, 2)
]


@pytest.mark.parametrize("name, kind", sampled(PLACES, 3))
def test_what_is_no_plain_file(
    bad: Path, tmp_path: Path, newest: Any, name: str, kind: str
) -> None:
    """name: "" is the directory of the step itself."""
    path = bad / name
    aside = tmp_path / "aside"
    os.rename(path, aside)
    path = Path(str(path))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            here = os.getcwd()
            os.chdir(path.parent)  # a socket's path may have 107 characters
            made.bind(path.name)
            os.chdir(here)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        try:
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            pytest.skip("only root makes devices")
    else:
        path.symlink_to({"link": aside, "loop": path}.get(kind, tmp_path / "nowhere"))
    step, notes = newest(tmp_path)
    assert step == 1 and len(notes) == 1 and "step_00000002" in notes[0], notes
    check_sentence(notes[0])


def test_links_and_pipes_in_the_place_of_latest_and_lock(
    tmp_path: Path, write: Any, newest: Any
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("untouched")
    root = tmp_path / "run"
    write(root, 1)
    for make in (lambda p: p.symlink_to(secret), os.mkfifo):
        (root / "latest").unlink()
        make(root / "latest")
        write(root, 2)
        assert (root / "latest").read_text() == "step_00000002\n"
        assert newest(root) == (2, [])
    (root / "lock").symlink_to(secret)
    with pytest.raises((OSError, SaveError)):
        DirectoryLock(root)
    assert secret.read_text() == "untouched"


@pytest.mark.parametrize("what", ["", *JSONS, SHARD])
def test_a_foreign_owner_is_refused(bad: Path, newest: Any, what: str) -> None:
    try:
        os.chown(bad / what, 54321, -1)
    except PermissionError:
        pytest.skip("only root gives files away")
    check_passed_over(newest, bad.parent, "belongs to the user with number 54321")


def test_saves_are_nobody_else_s_to_read(tmp_path: Path, write: Any) -> None:
    before = os.umask(0)
    try:
        check_writable(tmp_path / "run", Grid())
        write(tmp_path / "run", 1)
    finally:
        os.umask(before)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "run").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_state_is_data(bad: Path, newest: Any) -> None:
    """Keys that look like Python's are keys."""
    state = json.loads((bad / "state.json").read_text())
    state |= {"__class__": "os.system", "__reduce__": ["touch marker"], "py/object": "os.system"}
    (bad / "state.json").write_text(json.dumps(state))
    sign(bad)
    assert newest(bad.parent) == (2, [])


def test_an_attached_file_stays_in_the_directory(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    path = save(tmp_path / "run", step=1, pieces=[], state={}, grid=Grid(), attach={"t": b"x"})
    sign(path)
    assert find_latest(tmp_path / "run", Grid()) is not None
