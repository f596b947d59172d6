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
from collections.abc import Callable, Iterator
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


def check_refused(newest: Any, root: Path, what: Any) -> None:
    """Passed over, or the load ends with a sentence."""
    try:
        check_passed_over(newest, root)
    except CheckpointError as error:
        check_sentence(str(error))
        assert "step_00000002" in str(error), (what, error)


def test_the_pickle_of_these_tests_would_do_harm(tmp_path: Path, evil: bytes) -> None:
    import pickletools

    assert any(op.name == "REDUCE" for op, _, _ in pickletools.genops(evil))
    fn, args = Evil(tmp_path / "other").__reduce__()
    fn(*args)
    assert (tmp_path / "other").exists()
    with pytest.raises(AssertionError, match="unpickled"):
        pickle.loads(evil)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "common.pt"])
def test_a_pickled_checkpoint_of_another_program_is_refused(
    bad: Path, evil: bytes, newest: Any, name: str
) -> None:
    (bad.parent / name).write_bytes(evil)
    with pytest.raises(CheckpointError, match="Megatron-LM"):
        newest(bad.parent)


@pytest.mark.parametrize("name", ["x.pt", "pytorch_model.bin", "x.pkl", "x.npy", "__init__.py"])
def test_pickles_that_lie_about_are_not_looked_at(
    bad: Path, evil: bytes, newest: Any, name: str
) -> None:
    for place in (bad, bad.parent):
        (place / name).write_bytes(evil)
    for name in (".metadata", "__0_0.distcp"):
        (bad / name).write_bytes(evil)
    assert newest(bad.parent) == (2, [])


@pytest.mark.parametrize("name", [*JSONS, SHARD])
def test_a_pickle_in_the_place_of_a_file(bad: Path, evil: bytes, newest: Any, name: str) -> None:
    (bad / name).write_bytes(evil)
    if name != "manifest.json":
        sign(bad)
    check_passed_over(newest, bad.parent)
    assert [sound for sound, _ in verify([bad])] == [False]


DEEP = [400, 900, 990, 3000, 10**5, 10**6]
TEXTS: dict[str, bytes] = {
    **{f"{n} lists deep": b'{"a":' + b"[" * n + b"]" * n + b"}" for n in DEEP},
    **{f"{n} objects deep": b'{"a":' * n + b"1" + b"}" * n for n in DEEP},
    "unclosed": b"[" * 10**6,
    "an integer of 5000 digits": b'{"step":' + b"9" * 5000 + b"}",
    "an integer of 4000 digits": b'{"step":' + b"9" * 4000 + b"}",
    "1e999": b'{"step": 1e999}',
    "NaN": b'{"step": NaN}',
    "Infinity": b'{"step": -Infinity}',
    "a list": b"[]",
    "a number": b"7",
    "null": b"null",
    "nothing": b"",
    "zeros": b"\0" * 100,
    "no UTF-8": b'{"\xff": 1}',
    "half a surrogate": rb'{"\ud800": 1}',
    "UTF-16": '{"format": 1}'.encode("utf-16"),
    "a key twice": b'{"format": "weft-checkpoint", "format": "weft-checkpoint"}',
    "of another format": b'{"format": "x"}',
}


@pytest.mark.parametrize("name", sampled(JSONS, 3))
def test_json_made_to_break_the_reader(bad: Path, newest: Any, name: str) -> None:
    good = {path: (bad / path).read_bytes() for path in JSONS}
    for what, text in TEXTS.items():
        (bad / name).write_bytes(text)
        if name != "manifest.json":
            sign(bad)
        check_refused(newest, bad.parent, (name, what))
        for path, data in good.items():
            (bad / path).write_bytes(data)
    assert newest(bad.parent) == (2, [])


@pytest.mark.parametrize("n", [400, 900, 3000, 10**5])
def test_a_deep_entry_in_a_sound_manifest(bad: Path, newest: Any, n: int) -> None:
    text = (bad / "manifest.json").read_text().rstrip().removesuffix("}")
    (bad / "manifest.json").write_text(f'{text}, "more": {"[" * n}{"]" * n}}}')
    check_passed_over(newest, bad.parent)


HUGE = (2**62, 2**63, 2**64, 10**30)


def tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [5, 3], "data_offsets": [0, 60], **changes}


SECOND = {"b": tensor(data_offsets=[60, 120])}
HEADERS: dict[str, Any] = {
    "overlapping offsets": {"a": tensor(), "b": tensor()},
    "offsets that overlap in part": {"a": tensor(), "b": tensor(data_offsets=[30, 90])},
    "offsets beyond the file": {"a": tensor(), "b": tensor(data_offsets=[60, 10**9])},
    "all beyond the file": {"a": tensor(data_offsets=[10**9, 10**9 + 60]), **SECOND},
    "negative offsets": {"a": tensor(data_offsets=[-60, 0]), **SECOND},
    "reversed offsets": {"a": tensor(data_offsets=[60, 0]), **SECOND},
    "a gap": {"a": tensor(), "b": tensor(data_offsets=[64, 124])},
    "fewer bytes than the shape": {"a": tensor(shape=[500, 3]), **SECOND},
    "a negative shape": {"a": tensor(shape=[-5, -3]), **SECOND},
    "another dtype": {"a": tensor(dtype="I32"), **SECOND},
    "an unknown dtype": {"a": tensor(dtype="PICKLE"), **SECOND},
    "no dtype": {"a": {"shape": [5, 3], "data_offsets": [0, 60]}, **SECOND},
    "one tensor less": {"a": tensor(data_offsets=[0, 120], shape=[10, 3])},
    "metadata that is no text": {"__metadata__": {"a": [1]}, "a": tensor(), **SECOND},
    "not an object": [1, 2],
    **{f"shape {n}": {"a": tensor(shape=[n, 4]), **SECOND} for n in HUGE},
    **{f"offset {n}": {"a": tensor(data_offsets=[0, n]), **SECOND} for n in HUGE},
    "a shape that overflows to 15": {"a": tensor(shape=[2**32, 2**32, 15]), **SECOND},
}
RAW: dict[str, bytes] = {
    "a header of 2^63 bytes": (2**63).to_bytes(8, "little") + b"{}",
    "a header of 2^64 - 1 bytes": b"\xff" * 8 + b"{}",
    "a header longer than the file": (10**6).to_bytes(8, "little") + b"{}",
    "a header of 99 MB": (99_000_000).to_bytes(8, "little") + b"{}",
    "no header": (0).to_bytes(8, "little"),
    "half a length": b"\0\0\0",
    "no JSON": (8).to_bytes(8, "little") + b"12345678",
    "a deep header": (10**6).to_bytes(8, "little") + b"[" * 10**6,
    "deep objects": (10**6).to_bytes(8, "little") + (b'{"a":' * 200_000),
}


def test_absurd_headers_of_safetensors(bad: Path, newest: Any) -> None:
    good = (bad / SHARD).read_bytes()
    length = int.from_bytes(good[:8], "little")
    names = json.loads(good[8 : 8 + length])
    assert names == {"a": tensor(), **SECOND}, "the cases are made for this file"
    cases = dict(RAW)
    for what, header in HEADERS.items():
        text = json.dumps(header).encode()
        cases[what] = len(text).to_bytes(8, "little") + text + good[8 + length :]
    for what, data in cases.items():
        (bad / SHARD).write_bytes(data)
        sign(bad)
        check_passed_over(newest, bad.parent, SHARD)
        ((sound, line),) = verify([bad])
        assert not sound and SHARD in line, what


def test_a_tensor_twice_in_a_header(bad: Path, newest: Any) -> None:
    good = (bad / SHARD).read_bytes()
    one, two = json.dumps(tensor()), json.dumps(SECOND["b"])
    text = f'{{"a": {two}, "b": {two}, "a": {one}}}'.encode()
    body = good[8 + int.from_bytes(good[:8], "little") :]
    (bad / SHARD).write_bytes(len(text).to_bytes(8, "little") + text + body)
    sign(bad)
    check_passed_over(newest, bad.parent, "the key 'a' occurs twice")
    assert [sound for sound, _ in verify([bad])] == [False]


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


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a size of 2^63": lambda files: files[SHARD].update(size=2**63),
    "a negative size": lambda files: files[SHARD].update(size=-1),
    "a size that is true": lambda files: files[SHARD].update(size=True),
    "a size of 1 TB of JSON": lambda files: files["index.json"].update(size=10**12),
    "a hash that is none": lambda files: files["index.json"].update(sha256=None),
    "a quick one that is none": lambda files: files[SHARD].update(xxh3_128=None),
    "a hash of another file": lambda files: files[SHARD].update(files["state.json"]),
    "a file too many": lambda files: files.update(more={"size": 0, "sha256": ""}),
    "no shard": lambda files: files.pop(SHARD),
    "no index": lambda files: files.pop("index.json"),
    "entries that are none": lambda files: files.update({SHARD: []}),
}


@pytest.mark.parametrize("what", LIES)
def test_a_manifest_that_lies(bad: Path, newest: Any, what: str) -> None:
    path = bad / "manifest.json"
    manifest = json.loads(path.read_text())
    LIES[what](manifest["files"])
    path.write_text(json.dumps({**manifest, "digest": self_digest(manifest)}))
    check_passed_over(newest, bad.parent)


def test_json_larger_than_anyone_may_make_us_read(bad: Path, newest: Any) -> None:
    os.truncate(bad / "manifest.json", 10**11)  # a hole: it takes no disk
    check_passed_over(newest, bad.parent, "larger than")


KINDS = ("pipe", "socket", "link", "dangling link", "loop", "device", "folder")
PLACES = [(name, kind) for name in (*JSONS, SHARD, "") for kind in KINDS]


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
