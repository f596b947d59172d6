# SPDX-License-Identifier: Apache-2.0
"""An index is built once for all ranks, and never used without its seal."""

import errno
import multiprocessing
import os
import time

import numpy as np
import pytest

from training.data.cache import IndexCache
from training.data.files import replacing

ARRAY = np.arange(100, dtype=np.int32)


def fail():
    raise AssertionError("built although it was cached")


def entry(directory):
    (name,) = [name for name in os.listdir(directory) if name.endswith(".npy")]
    return directory / name


def test_second_fetch_reads_the_first(tmp_path):
    cache = IndexCache(str(tmp_path / "new"))
    assert np.array_equal(cache.get({"a": 1}, 100, lambda: ARRAY), ARRAY)
    assert np.array_equal(cache.get({"a": 1}, 100, fail), ARRAY)
    other = IndexCache(str(tmp_path / "new")).get({"a": 2}, 100, lambda: ARRAY + 1)
    assert np.array_equal(other, ARRAY + 1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: b"",
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw[:200] + bytes([raw[200] ^ 1]) + raw[201:],
        lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
        lambda raw: b"PK\x03\x04" + raw[4:],
        lambda raw: b"\x80\x04K\x01.",  # a pickle
        lambda raw: raw.replace(b"<i4", b"<f4"),
    ],
    ids=["empty", "torn", "bit", "seal", "zip", "pickle", "type"],
)
def test_a_damaged_entry_is_built_again(tmp_path, spoil):
    cache = IndexCache(str(tmp_path))
    cache.get({"a": 1}, 100, lambda: ARRAY)
    path = entry(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    assert np.array_equal(cache.get({"a": 1}, 100, lambda: ARRAY), ARRAY)
    assert np.array_equal(cache.get({"a": 1}, 100, fail), ARRAY)


def test_an_entry_of_other_facts_is_not_believed(tmp_path):
    cache = IndexCache(str(tmp_path))
    cache.get({"a": 1}, 100, lambda: ARRAY)
    first = entry(tmp_path)
    cache.get({"a": 2}, 100, lambda: ARRAY + 1)
    for path in tmp_path.glob("*.npy"):
        path.write_bytes(first.read_bytes())
    assert np.array_equal(cache.get({"a": 2}, 100, lambda: ARRAY + 1), ARRAY + 1)


def test_what_was_built_is_used_where_it_cannot_be_written(tmp_path, monkeypatch):
    """As on a full disk. It may have taken an hour."""
    lines, built = [], []

    def no_space(file, *args, **kw):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def build():
        built.append(1)
        return ARRAY

    monkeypatch.setattr(np, "save", no_space)
    cache = IndexCache(str(tmp_path), lines.append)
    assert np.array_equal(cache.get({"a": 1}, 100, build), ARRAY) and len(built) == 1
    assert np.array_equal(cache.get({"a": 2}, 100, lambda: ARRAY + 1), ARRAY + 1)
    assert len(lines) == 1 and "No space left on device; building in memory" in lines[0]


def test_an_unusable_directory_is_said_once(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    said = []
    cache = IndexCache(str(tmp_path / "file" / "cache"), said.append)
    for _ in range(2):
        assert np.array_equal(cache.get({"a": 1}, 100, lambda: ARRAY), ARRAY)
    assert len(said) == 1 and "building in memory" in said[0] and "--data-cache-path" in said[0]


def build_slowly(directory):
    """Return how often this process built the entry, and its last report."""
    built = []

    def build():
        built.append(1)
        time.sleep(0.3)
        return ARRAY

    array = IndexCache(directory).get({"a": 1}, 100, build)
    return len(built), int(array[-1])


def hold_lock_forever(directory, ready):
    def build():
        ready.set()
        time.sleep(600)

    IndexCache(directory).get({"a": 1}, 100, build)


def test_processes_build_once_and_a_dead_one_holds_no_lock(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    victim = context.Process(target=hold_lock_forever, args=(str(tmp_path), ready), daemon=True)
    victim.start()
    assert ready.wait(60)
    said = []
    impatient = IndexCache(str(tmp_path), said.append, patience=0.1)
    assert np.array_equal(impatient.get({"a": 1}, 100, lambda: ARRAY), ARRAY)
    assert len(said) == 1 and "locked" in said[0]
    victim.kill()
    victim.join()
    with context.Pool(3) as pool:
        results = pool.map(build_slowly, [str(tmp_path)] * 3, chunksize=1)
    assert sum(built for built, _ in results) == 1
    assert {last for _, last in results} == {99}


def names(directory):
    """Return the paths of an entry and of its lock, which depend on the facts alone."""
    IndexCache(str(directory)).get({"a": 1}, 100, lambda: ARRAY)
    path = entry(directory)
    return path, directory / f"{path.name}.lock"


def test_a_link_in_a_shared_cache_reaches_no_other_file(tmp_path):
    """Neither the lock, nor the entry, nor the file it is written to first follows a link."""
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    path, lock = names(shared)
    for place in (path, lock):
        victim.write_text("precious")
        path.unlink()
        lock.unlink()
        place.symlink_to(victim)
        said = []
        cache = IndexCache(str(shared), said.append)
        assert np.array_equal(cache.get({"a": 1}, 100, lambda: ARRAY), ARRAY)
        assert victim.read_text() == "precious"
        assert len(said) == (place == lock)
        if place == path:
            assert not path.is_symlink()  # replaced by an entry
        else:
            lock.unlink()
            lock.touch()
            path.touch()
    guess = tmp_path / f"file.{os.getpid()}.tmp"
    guess.symlink_to(victim)
    with replacing(str(tmp_path / "file")) as file:
        file.write(b"new")
    assert victim.read_text() == "precious" and (tmp_path / "file").read_bytes() == b"new"
