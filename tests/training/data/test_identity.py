# SPDX-License-Identifier: Apache-2.0
"""A corpus is known by every token of it; what was hashed once is not hashed again."""

import os

import numpy as np
import pytest
import xxhash

from training.data import cache, identity
from training.data.cache import IndexCache
from training.data.indexed import IndexedTokens, IndexedWriter
from training.files import untrusted

TOKENS = 300_000
DOCUMENTS = 30


@pytest.fixture
def prefix(tmp_path):
    tokens = np.arange(TOKENS) % 60_000
    with IndexedWriter(str(tmp_path / "corpus"), np.dtype(np.uint16)) as out:
        for part in np.split(tokens, DOCUMENTS):
            out.add(part)
    return str(tmp_path / "corpus")


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Return a function that opens a file with a cache that also keeps small files' digests."""
    monkeypatch.setattr(identity, "CACHE_FROM", 0)
    return lambda prefix: IndexedTokens(prefix, IndexCache(str(tmp_path / "cache"), print))


def unlooked(prefix):
    """Return the places of the tokens in none of the 64 blocks that the sketch reads."""
    places = np.ones(TOKENS, bool)
    for first in np.linspace(0, TOKENS - 2048, 64).astype(np.int64):
        places[first : first + 2048] = False
    return np.flatnonzero(places)


def overwrite(prefix, places):
    tokens = np.fromfile(prefix + ".bin", np.uint16)
    tokens[places] = 7
    with open(prefix + ".bin", "r+b") as file:
        file.write(tokens.tobytes())


def forbid_reading(monkeypatch):
    def fill(*args):
        raise AssertionError("hashed again")

    monkeypatch.setattr(identity.WatchedFile, "fill", fill)


def test_every_token_counts(prefix):
    before = IndexedTokens(prefix)
    known = before.digest, before.sketch
    places = unlooked(prefix)
    assert len(places) > TOKENS / 2
    overwrite(prefix, places)
    after = IndexedTokens(prefix)
    assert after.sketch == known[1] and after.digest != known[0]
    overwrite(prefix, places[:1])
    assert len({known[0], after.digest, IndexedTokens(prefix).digest}) == 2


def test_the_digest_is_what_it_is_said_to_be(prefix, monkeypatch):
    """Compute it anew from the files, in parts of another number of reads; it never changes."""
    monkeypatch.setattr(identity, "PART", 1 << 16)
    monkeypatch.setattr(identity, "READ", 1000)
    data = IndexedTokens(prefix)
    facts = f"<u2 {DOCUMENTS} {TOKENS * 2}".encode()
    facts += np.full(DOCUMENTS, TOKENS // DOCUMENTS, "<i4").tobytes()
    with open(prefix + ".bin", "rb") as file:
        while part := file.read(1 << 16):
            facts += xxhash.xxh3_128_digest(part)
    assert data.digest == xxhash.xxh3_128_hexdigest(facts)


def test_one_part_and_its_frozen_value(prefix):
    assert IndexedTokens(prefix).digest == "4b7f7b295fa99fb655be98c81e6f3e58"


def test_a_second_start_reads_nothing(prefix, cached, monkeypatch):
    first = cached(prefix).digest
    again = cached(prefix)
    forbid_reading(monkeypatch)
    assert again.digest == first


def test_a_file_with_another_time_is_hashed_again(prefix, cached, monkeypatch):
    first, before = cached(prefix).digest, os.stat(prefix + ".bin")
    overwrite(prefix, [5])
    os.utime(prefix + ".bin", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cached(prefix).digest != first
    os.utime(prefix + ".idx")
    index = cached(prefix)
    forbid_reading(monkeypatch)
    with pytest.raises(AssertionError, match="hashed again"):
        index.digest  # noqa: B018


def test_an_entry_of_somebody_else_is_not_believed(prefix, cached, monkeypatch):
    cached(prefix).digest  # noqa: B018
    data, trusting, owner = cached(prefix), cached(prefix), os.geteuid()
    data._cache._owner = trusting._cache._owner = owner + 12345
    forbid_reading(monkeypatch)
    monkeypatch.setattr(cache, "trusted", lambda user: user != owner)
    with pytest.raises(AssertionError, match="hashed again"):
        data.digest  # noqa: B018
    monkeypatch.setattr(cache, "trusted", untrusted.trusted)
    monkeypatch.setattr(untrusted, "_trusted", {owner})  # --trust-owner
    monkeypatch.setattr(os, "geteuid", lambda: owner + 12345)
    assert trusting.digest


def test_a_long_hash_tells_how_far_it_is(prefix, tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "CACHE_FROM", 0)
    monkeypatch.setattr(identity, "QUIET", 0.0)
    said = []
    digest = IndexedTokens(prefix, IndexCache(str(tmp_path / "cache"), said.append)).digest
    assert digest == IndexedTokens(prefix).digest
    assert len(said) == 1 and "corpus.bin: 100% of 600,000 bytes hashed" in said[0]


def test_a_file_cut_short_while_it_is_hashed(prefix):
    data = IndexedTokens(prefix)
    os.truncate(prefix + ".bin", 1000)
    with pytest.raises(
        ValueError, match=r"corpus.bin: 600000 bytes were wanted at byte 0 and 1000 "
    ):
        data.digest  # noqa: B018
