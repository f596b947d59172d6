# SPDX-License-Identifier: Apache-2.0
"""Text as people have it: each kind of nasty document is left out and counted, or refused by place.

Packages that Weft can do without (zstandard, pyarrow) are tested where they are installed.
"""

import gzip
import importlib
import json
import os
import re
import struct
from importlib.util import find_spec

import pytest

from tools.preprocess_data import preprocess
from training.data import shards, text_files
from training.data.bad_documents import BadDocuments
from training.data.shards import cut_files, documents
from training.data.text_files import find_files, split_names, stat_files

GOOD = b'{"text": "one"}\n'
NASTY = {  # name: (a line, what it is counted as, what the refusal says after file and line)
    "latin-1": (b'{"text": "caf\xe9"}\n', "not UTF-8", "byte 29: not UTF-8"),
    "cut inside a character": (b'{"text": "\xe2\x98"}\n', "not UTF-8", "byte 26: not UTF-8"),
    "no JSON": (b"one two\n", "not JSON", "byte 16: no JSON object.*Expecting value"),
    "a comma too many": (b'{"text": "a",}\n', "not JSON", "byte 29: no JSON object"),
    "cut short": (b'{"text": "a\n', "not JSON", "byte 27: .*Invalid control character"),
    "another key": (
        b'{"body": 1, "n": 1}\n',
        "without a text",
        "has 'body', 'n'; --json-keys names",
    ),
    "no object": (b'["text"]\n', "without a text", "byte 16: no .* .the line is a list."),
    "a string": (b'"text"\n', "without a text", "byte 16: no .* .the line is a string."),
    "no key": (b"{}\n", "without a text", "byte 16: no .* .it has no key; --json-keys"),
    **{
        f"the text is {name}": (
            b'{"n": 1, "text": %s}\n' % value,
            f"without a text, but {name}",
            f"byte 16: no JSON object with a text 'text' .'text' is {name}.",
        )
        for name, value in {
            "null": b"null",
            "a number": b"7.5",
            "a list": b'["text"]',
            "an object": b'{"text": "a"}',
            "true or false": b"false",
        }.items()
    },
    "half a surrogate": (
        b'{"text": "a \\ud83d\\ude00 \\uD83d"}\n',
        "without a text, but half of a surrogate pair",
        r"byte 16: no .* .'text' has half of a surrogate pair, .ud83d, after 4 characters.",
    ),
    "ten thousand levels": (b"[" * 10_000 + b"\n", "without a text", "byte 16: .*too many levels"),
    "empty": (b'{"text": ""}\n', "empty", "byte 16: an empty document"),
    "too long": (b'{"text": "' + b"a" * 99_999 + b'"}\n', "too long", "more than 60,000 bytes"),
}


@pytest.fixture(autouse=True)
def _limit(monkeypatch):
    monkeypatch.setattr(shards, "MOST", 60_000)


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("name", NASTY)
def test_a_nasty_line(tmp_path, name, packed):
    line, kind, says = NASTY[name]
    path, raw = tmp_path / f"a.jsonl{packed}", GOOD + line + GOOD
    path.write_bytes(gzip.compress(raw) if packed else raw)
    skip = BadDocuments("skip")
    assert list(documents(path, bad=skip)) == ["one", "one"]
    ((found, (count, first)),) = skip.kinds.items()
    assert (found, count) == (kind, 1) and first.startswith(f"{path}, line 2, byte ")
    assert skip.line() == f"1 document(s) left out: 1 {kind} (first: {first})"
    with pytest.raises(ValueError, match=rf"a.jsonl{packed}, line 2, .*{says}"):
        list(documents(path, bad=BadDocuments("error")))
    if kind == "empty":
        assert list(documents(path)) == ["one", "one"]
    else:
        with pytest.raises(ValueError, match="--on-bad-document skip leaves such documents out"):
            list(documents(path))


@pytest.mark.parametrize("size", [4, 11, 1000])
def test_files_with_a_byte_order_mark_put_together(tmp_path, size):
    """`cat` leaves the marks before lines. The right texts are those of the single files."""
    for name, join in (("a.txt", "{}"), ("a.jsonl", '{{"text": "{}"}}')):
        one, two = ("".join(join.format(word) + end for word in words) for words, end in (
            (["eins", "zwei ☃"], "\n"), (["drei", "\ufeff", "vier"], "\r\n")))  # fmt: skip
        (tmp_path / name).write_bytes(one.encode("utf-8-sig") + 2 * two.encode("utf-8-sig"))
        parts = cut_files([str(tmp_path / name)], True, size)
        found = [(part.place(at), text) for part in parts for at, text in part.texts("text", True)]
        texts = ["eins", "zwei ☃", *2 * (["drei", *["\ufeff"] * (name == "a.jsonl"), "vier"])]
        assert [text for _, text in found] == texts
        at = 3 + len(one.encode()) + 3
        assert found[2][0] == f"{tmp_path / name}, line 3, byte {at}"


def test_a_whole_text_names_line_and_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n\xff\n")
    with pytest.raises(ValueError, match="a.txt, line 3, byte 8: not UTF-8"):
        list(documents(tmp_path / "a.txt"))
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n\xff\n")
    with pytest.raises(ValueError, match="b.txt, line 3, byte 11: not UTF-8"):
        list(documents(tmp_path / "b.txt"))
    assert list(documents(tmp_path / "a.txt", bad=BadDocuments("skip"))) == []


def test_what_is_no_fault(tmp_path):
    """A byte order mark, line ends of Windows, blank lines, a NUL, no line end at the end."""
    text = b'\xef\xbb\xbf{"text": "one"}\r\n\r\n \n{"text": "a\\u0000b"}'
    (tmp_path / "a.jsonl").write_bytes(text)
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone\r\n")
    found = [
        list(documents(tmp_path / name, bad=BadDocuments("error"))) for name in os.listdir(tmp_path)
    ]
    assert sorted(found) == [["one", "a\0b"], ["one\r\n"]]


FILES = {  # name: (contents, sentence)
    "utf16.txt": ("text".encode("utf-16"), "utf16.txt: it is UTF-16; text must be UTF-8"),
    "le.jsonl": ('{"text": "a"}\n'.encode("utf-16-le"), "le.jsonl: it is UTF-16; text must be"),
    "be.txt": ("text".encode("utf-16-be"), "be.txt: it is UTF-16; text must be UTF-8"),
    "utf32.txt": ("text".encode("utf-32"), "utf32.txt: it is UTF-32; text must be UTF-8"),
    "be32.txt": ("text".encode("utf-32-be"), "be32.txt: it is UTF-32; text must be UTF-8"),
    "renamed.jsonl.gz": (GOOD, "renamed.jsonl.gz: it does not begin as a .gz file does"),
    "renamed.parquet": (GOOD, "renamed.parquet: it does not begin as a .parquet file does"),
    "packed.jsonl": (gzip.compress(GOOD), "packed.jsonl: it is a .gz file; rename it"),
    "table.csv": (b"a,b", "table.csv: neither .txt nor .jsonl"),
    "empty.txt": (b"", "no document with text in 1 file"),
    "array.json": (b' [{"text": "one"}]', "array.json: it is one JSON array; one JSON object"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_nasty_file_is_found_before_anything_is_read(tmp_path, name):
    contents, says = FILES[name]
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(ValueError, match=f"--input .*{says}|{says}"):
        stat_files(find_files([str(tmp_path / name)]))


def test_more_nasty_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nothing")
    (tmp_path / "bare").mkdir()
    names = {
        "pipe.txt": "cannot be read .not a plain file",
        "dangling.txt": "cannot be read .a link to .*nothing, which is not there",
        "missing.txt": "cannot be read .No such file",
        "bare": "a folder without a file of text",
        "*.jsonl": "no file matches",
    }
    for name, says in names.items():
        with pytest.raises(ValueError, match=f"DATA .*{says}"):
            stat_files(find_files([str(tmp_path / name)], "DATA"), "DATA")


def test_names_with_spaces(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("my text/b.txt", "my text/deep/er/e.jsonl", "c [1].txt", "d.txt"):
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        (tmp_path / name).write_text("one")
    assert find_files(["c [1].txt"]) == ["c [1].txt"], "a name, though it looks like a pattern"
    assert split_names("d.txt my text  c [1].txt *.txt no.txt") == [
        "d.txt", "my text", "c [1].txt", "*.txt", "no.txt"
    ]  # fmt: skip
    assert split_names("d.txt my text/**/*.jsonl") == ["d.txt", "my text/**/*.jsonl"]


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.parquet"])
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes({"zst": b"\x28\xb5\x2f\xfd", "uet": b"PAR1"}[name[-3:]])
    monkeypatch.setattr(text_files, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match="which is not installed: .venv/bin/pip install "):
        stat_files([str(tmp_path / name)])


def library(name):
    if find_spec(name) is None:
        pytest.skip(f"the optional package {name} is not installed here")
    return importlib.import_module(name)


def test_zst(tmp_path):
    zstandard = library("zstandard")
    pack = zstandard.ZstdCompressor().compress
    lines = [json.dumps({"text": f"{n} " * 999}).encode() + b"\n" for n in range(300)]
    whole = pack(b"".join(lines[:100])) + pack(b"".join(lines[100:]))  # two frames
    pzstd = skippable(b"size") + pack(b"".join(lines[:7])) + skippable(b"")
    pzstd += pack(b"".join(lines[7:])) + skippable(b"seek table" * 999, 15)
    for packed in (whole, pzstd):
        (tmp_path / "a.jsonl.zst").write_bytes(packed)
        (path,) = find_files([str(tmp_path / "*.zst")])
        assert stat_files([path])[0][1] == len(packed)
        found = [text.split()[0] for text in documents(path)]
        assert found == [str(n) for n in range(300)]
    for spoilt in (whole[:-9], whole[:50] + b"\0\0\0\0" + whole[54:], pzstd[:-9]):
        (tmp_path / "b.jsonl.zst").write_bytes(spoilt)
        with pytest.raises(ValueError, match="b.jsonl.zst: cannot be read"):
            list(documents(tmp_path / "b.jsonl.zst"))


def skippable(content, kind=0):
    """Return a skippable frame (RFC 8878, 3.1.2), with which pzstd begins."""
    return struct.pack("<II", 0x184D2A50 + kind, len(content)) + content


@pytest.mark.parametrize("kind", [0, 15])
def test_a_zst_may_begin_with_a_skippable_frame(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(text_files, "find_spec", lambda package: True)
    (tmp_path / "a.txt.zst").write_bytes(skippable(b"size", kind))
    assert [size for _, size, _ in stat_files([str(tmp_path / "a.txt.zst")])] == [12]


def test_a_long_window_names_the_remedy(tmp_path):
    zstandard = library("zstandard")
    for log in (27, 28, 31):
        parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=log)
        pack = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        path = tmp_path / "my a.txt.zst"
        path.write_bytes(pack.compress(b"text") + pack.flush())
        if log == 27:
            assert list(documents(path)) == ["text"]
            continue
        says = f"unpack it by zstd -d --long=31 '{path}'"
        with pytest.raises(ValueError, match=re.escape(f"{path}: cannot be read (it was")) as error:
            list(documents(path))
        assert says in str(error.value)


TYPES = "string large_string string_view binary large_binary binary_view".split()


@pytest.mark.parametrize("coded", [False, True], ids=["plain", "dictionary"])
@pytest.mark.parametrize("name", TYPES)
def test_each_way_in_which_arrow_stores_text(tmp_path, name, coded):
    pyarrow = library("pyarrow")
    texts = ["one", "zwei ☃", "", "one"] * 200
    values = pyarrow.array([text.encode() for text in texts] if "binary" in name else texts)
    try:
        values = values.cast(getattr(pyarrow, name)())
        values = values.dictionary_encode() if coded else values
        table = pyarrow.table({"n": range(800), "text": values})
        importlib.import_module("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    except pyarrow.ArrowNotImplementedError as error:
        pytest.skip(f"pyarrow {pyarrow.__version__} cannot write it: {error}")
    assert list(documents(tmp_path / "a.parquet")) == [text for text in texts if text]


def test_parquet(tmp_path):
    pyarrow = library("pyarrow")
    write = importlib.import_module("pyarrow.parquet").write_table
    texts = ["one", None, "", "zwei ☃\n", *map(str, range(600))]
    table = pyarrow.table({"text": texts, "n": range(604)})
    write(table, tmp_path / "a.parquet")
    skip = BadDocuments("skip")
    assert list(documents(tmp_path / "a.parquet", bad=skip)) == ["one", *texts[3:]]
    lines = documents(tmp_path / "a.parquet", bad=BadDocuments("skip"), lines=True)
    assert list(lines) == ["one", *texts[3:]], "--lines is about .txt alone"
    assert skip.kinds == {
        "without a text, but null": (1, f"{tmp_path}/a.parquet, row 2"),
        "empty": (1, f"{tmp_path}/a.parquet, row 3"),
    }
    with pytest.raises(ValueError, match="a.parquet, row 2: null in place of a text"):
        list(documents(tmp_path / "a.parquet"))
    nulls = pyarrow.table({"text": pyarrow.nulls(3)})
    write(nulls, tmp_path / "nulls.parquet")
    with pytest.raises(ValueError, match="nulls.parquet, row 1: null in place of a text"):
        list(documents(tmp_path / "nulls.parquet"))
    twice = pyarrow.Table.from_arrays([table["text"], table["text"]], ["text", "text"])
    write(twice, tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match="twice.parquet: several columns 'text'"):
        list(documents(tmp_path / "twice.parquet"))
    for column, says in (("body", "no column 'body'; it has text, n"), ("n", "which is not text")):
        with pytest.raises(ValueError, match=says):
            list(documents(tmp_path / "a.parquet", column))
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-40])
    with pytest.raises(ValueError, match="b.parquet: cannot be read"):
        list(documents(tmp_path / "b.parquet"))


@pytest.mark.parametrize("workers", [1, 2])
def test_preprocess_counts_over_parts(tmp_path, workers):
    """The same tokens whatever the parts, and one line on all that was left out."""
    good, bad = b'{"text": "1 2 3"}\n', b'{"text": "\xff"}\n{"text": ""}\n'
    (tmp_path / "a.jsonl").write_bytes((good * 40 + bad) * 5)
    said = []
    options = {"vocab_size": 9, "on_bad_document": "skip", "report": said.append}
    (made,) = preprocess(
        [str(tmp_path)], str(tmp_path / "out"), "NullTokenizer", **options,
        workers=workers, shard_bytes=1000,
    )  # fmt: skip
    assert (made.documents, made.tokens) == (200, 600)
    (line,) = [line for line in said if "left out" in line]
    assert "10 document(s) left out: 5 not UTF-8 (first: " in line and "a.jsonl, line 41, " in line
    assert "5 empty (first: " in line and "a.jsonl, line 42, byte " in line
    with pytest.raises(ValueError, match="a.jsonl, line 41, byte 730: not UTF-8"):
        preprocess([str(tmp_path / "a.jsonl")], str(tmp_path / "b"), "NullTokenizer", vocab_size=9)
