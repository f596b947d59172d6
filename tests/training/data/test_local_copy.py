# SPDX-License-Identifier: Apache-2.0
"""--data-local-copy copies once a host, whole or not at all; --data-args-path is a shard list."""

import fcntl
import itertools
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.training.small_llama import SMALL, read
from training.data import local_copy as module
from training.data.dataset import DataError
from training.data.indexed import IndexedTokens, IndexedWriter
from training.data.local_copy import local_copy
from training.files import untrusted
from training.settings.config import UsageError


@pytest.fixture
def prefix(tmp_path):
    (tmp_path / "far").mkdir()
    with IndexedWriter(str(tmp_path / "far" / "corpus"), np.dtype(np.uint16)) as out:
        for i in range(50):
            out.add(np.arange(i, i + 40))
    return str(tmp_path / "far" / "corpus")


def test_a_copy_is_the_same_corpus_and_is_made_once(prefix, tmp_path, monkeypatch):
    near = str(tmp_path / "near")
    copy = local_copy(prefix, near)
    assert copy.startswith(near) and os.path.basename(copy) == "corpus"
    assert IndexedTokens(copy).digest == IndexedTokens(prefix).digest
    with open(os.path.join(os.path.dirname(copy), "lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it any more
    monkeypatch.setattr(module, "_copy", lambda *given: pytest.fail("copied again"))
    assert local_copy(prefix, near) == copy


def test_another_original_is_another_copy_and_a_torn_copy_is_made_anew(prefix, tmp_path):
    near = str(tmp_path / "near")
    copy = local_copy(prefix, near)
    os.truncate(copy + ".bin", 100)
    assert local_copy(prefix, near) == copy
    assert open(copy + ".bin", "rb").read() == open(prefix + ".bin", "rb").read()
    os.utime(prefix + ".bin", ns=(1, 1))
    assert local_copy(prefix, near) != copy


def test_a_copy_of_a_trusted_user_is_read_and_not_made_again(prefix, tmp_path, monkeypatch):
    near = str(tmp_path / "near")
    copy, owner = local_copy(prefix, near), os.geteuid()
    monkeypatch.setattr(module, "_copy", lambda *given: pytest.fail("copied again"))
    monkeypatch.setattr(os, "geteuid", lambda: owner + 12345)
    with pytest.raises(ValueError, match=f"--data-local-copy .* number {owner}: --trust-owner"):
        monkeypatch.setattr(module, "trusted", lambda user: user != owner)
        local_copy(prefix, near)
    monkeypatch.setattr(module, "trusted", untrusted.trusted)
    monkeypatch.setattr(untrusted, "_trusted", {owner})
    os.remove(os.path.join(os.path.dirname(copy), "lock"))  # which the other user alone may open
    assert local_copy(prefix, near) == copy and not os.path.exists(os.path.dirname(copy) + "/lock")


def test_ranks_that_ask_at_once_copy_once(prefix, tmp_path, monkeypatch):
    made, gate, copy = [], threading.Event(), module._copy

    def slowly(*given):
        made.append(given[1])
        gate.wait(0.3)
        copy(*given)

    monkeypatch.setattr(module, "_copy", slowly)
    found = []
    ask = lambda: found.append(local_copy(prefix, str(tmp_path / "near")))  # noqa: E731
    ranks = [threading.Thread(target=ask) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(set(found)) == 1 and len(found) == 4 and len(made) == 2


def test_an_original_that_was_written_over_is_copied_again(prefix, tmp_path):
    """Also where its modification time was set back."""
    first, was = local_copy(prefix, str(tmp_path / "near")), os.stat(prefix + ".bin")
    data = bytes(was.st_size)
    with open(prefix + ".bin", "r+b") as file:
        file.write(data)
    while os.stat(prefix + ".bin").st_ctime_ns == was.st_ctime_ns:  # within a tick of the clock
        os.utime(prefix + ".bin", ns=(was.st_atime_ns, was.st_mtime_ns))
    os.utime(prefix + ".bin", ns=(was.st_atime_ns, was.st_mtime_ns))
    again = local_copy(prefix, str(tmp_path / "near"))
    assert again != first and Path(again + ".bin").read_bytes() == data


def test_progress_has_rate_and_time_left(prefix, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "QUIET", 0.0)
    monkeypatch.setattr(module, "BLOCK", 1000)
    said = []
    local_copy(prefix, str(tmp_path / "near"), said.append)
    assert any("corpus.bin: 25% of 4,000 bytes copied to" in line for line in said)
    assert all("GB/s, " in line and line.endswith(" s left") for line in said)


def test_what_cannot_be_copied_is_named(prefix, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--data-local-copy .*file: .*: Not a directory"):
        local_copy(prefix, str(tmp_path / "file"))
    with pytest.raises(ValueError, match="gone.idx: cannot be read: No such file"):
        local_copy(str(tmp_path / "gone"), str(tmp_path))
    full = SimpleNamespace(free=100)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="and 100 are free"):
        patch.setattr(module.shutil, "disk_usage", lambda folder: full)
        local_copy(prefix, str(tmp_path / "near"))
    real, times = os.fstat, itertools.count(1)

    def grows(fd):
        found, now = real(fd), next(times)
        os.utime(prefix + ".idx", ns=(now, now))
        return found

    monkeypatch.setattr(module.os, "fstat", grows)
    with pytest.raises(DataError, match="corpus.idx was changed while it was copied"):
        local_copy(prefix, str(tmp_path / "new"))
    assert not list((tmp_path / "new").rglob("*.idx*"))


BASE = SMALL.replace("--mock-data", "--tokenizer-type NullTokenizer")


def test_a_shard_list_is_what_data_path_would_be(tmp_path):
    (tmp_path / "list").write_text("# from the crawl\n0.5 /data/a\n0.5 '/data/b c' # two\n")
    listed = read(f"--data-args-path {tmp_path}/list", 1, BASE)
    given = read("--data-path 0.5 /data/a 0.5 '/data/b c'", 1, BASE)
    assert listed.data == given.data and listed.digest() == given.digest()
    assert listed.data.data_path == ("0.5", "/data/a", "0.5", "/data/b c")
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "odd").write_text("'/data/a\n")
    (tmp_path / "raw").write_bytes(b"\xff\xfe")
    real = BASE.replace("--dry-run", "")
    for name, says in (
        ("empty", "it names no data"),
        ("odd", "No closing quotation"),
        ("raw", "it is not a list of names"),
        ("gone", "No such file or directory"),
    ):
        with pytest.raises(UsageError, match=f"--data-args-path .*{name}: {says}"):
            read(f"--data-args-path {tmp_path}/{name}", 1, real)
    assert read(f"--data-args-path {tmp_path}/gone", 1, BASE).data.data_path
    with pytest.raises(UsageError, match="--data-path and --data-args-path exclude each other"):
        read(f"--data-args-path {tmp_path}/list --data-path a", 1, BASE)
