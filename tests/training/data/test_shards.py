# SPDX-License-Identifier: Apache-2.0
"""The parts of a file, put together, are the file."""

import gzip
import io
import json

import pytest

from training.data import shards
from training.data.bad_documents import BadDocuments
from training.data.shards import Shard, Where, cut_files
from training.data.text_files import kind_of

TEXTS = ["one", "", "naïve ☃\n two", "x" * 40, "last"]


def write(path, raw):
    if path.name.endswith(".gz"):
        raw = gzip.compress(raw)
    path.write_bytes(raw)
    return str(path)


def jsonl(ending=b"\n"):
    return b"\n".join(json.dumps({"text": t, "n": 1}).encode() for t in TEXTS) + ending


def places():
    """Return (the byte at which its line begins, text) of each document."""
    lines = jsonl().splitlines(keepends=True)
    return [(sum(map(len, lines[:i])), text) for i, text in enumerate(TEXTS)]


@pytest.mark.parametrize("ending", [b"\n", b"", b"\n\n \n"])
@pytest.mark.parametrize(
    "name, size", [("a.jsonl", 1), ("a.jsonl", 19), ("a.jsonl", 20), ("a.jsonl.gz", 7)]
)
def test_every_cut_reads_the_same_documents(tmp_path, name, ending, size):
    path = write(tmp_path / name, jsonl(ending))
    parts = cut_files([path, path], False, size)
    assert len(parts) == (2 if name.endswith("gz") else 2 * -(-len(jsonl(ending)) // size))
    found = [(part.place(line), text) for part in parts for line, text in part.texts("text", False)]
    once = [(f"{path}, line {i}, byte {at}", t) for i, (at, t) in enumerate(places(), 1) if t]
    assert found == once + once
    assert sum(part.size for part in parts) == 2 * (tmp_path / name).stat().st_size


class Counted(io.BytesIO):
    """A file that counts the bytes that its lines have."""

    count = 0

    def readline(self, size=-1):
        line = super().readline(size)
        self.count += len(line)
        return line


def test_a_part_inside_a_long_line_does_not_read_the_rest_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "BLOCK", 64)
    text = b"x" * 10_000 + b"\n{}\n"
    path = write(tmp_path / "a.jsonl", text)
    parts = cut_files([path], False, 1000)
    read = []
    for part in parts[1:]:
        lines = list(part._lines(file := Counted(text), BadDocuments()))
        read.append(file.count)
        assert lines == ([((1, 10_001), b"{}\n")] if part is parts[-1] else [])
    assert max(read) <= 1000 + 64


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_text_whole_or_by_lines(tmp_path, name):
    path = write(tmp_path / name, "eins\r\nzwei\n\n \t\ndrei ☃".encode())
    (shard,) = cut_files([path], False, 3)
    assert list(shard.texts("text", False)) == [((0, 0), "eins\r\nzwei\n\n \t\ndrei ☃")]
    assert shard.place(Where(0, 0)) == path
    lines = [t for part in cut_files([path], True, 3) for _, t in part.texts("text", True)]
    assert lines == ["eins", "zwei", "drei ☃"]


@pytest.mark.parametrize("size", [5])
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"{not json", "no JSON object with a text 'text'"),
        (b'{"other": "x"}', "no JSON object with a text 'text'"),
        (b'{"text": 3}', "no JSON object with a text 'text'"),
        (b"[" * 100_000, "no JSON object with a text 'text'"),
        (b'"text"', "no JSON object with a text 'text'"),
        (b'{"text": "\xff"}', "not UTF-8"),
    ],
    ids=["syntax", "key", "type", "depth", "string", "bytes"],
)
def test_a_bad_line_is_named(tmp_path, bad, why, size):
    size = max(size, len(bad) // 100)
    path = write(tmp_path / "a.jsonl", jsonl() + bad + b"\n" + jsonl())
    with pytest.raises(ValueError, match=f"a.jsonl, line 6, byte \\d+: {why}"):
        for part in cut_files([path], False, size):
            list(part.texts("text", False))


@pytest.mark.parametrize("spoil", [lambda raw: raw[:30], lambda raw: raw[:20] + b"x" + raw[21:]])
def test_a_damaged_gz_is_named(tmp_path, spoil):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(spoil(gzip.compress(jsonl())))
    with pytest.raises(ValueError, match="a.jsonl.gz: cannot be read"):
        list(Shard(str(path), 0, None).texts("text", False))


def test_other_names_are_refused():
    assert kind_of("a.b.jsonl.gz") == "jsonl" and kind_of("x.txt") == "txt"
    for name in ("a.csv", "a.parquet.gz", "a.gz", "a"):
        with pytest.raises(ValueError, match=f"{name}: neither .txt nor .jsonl"):
            kind_of(name)
