# SPDX-License-Identifier: Apache-2.0
"""Texts are read unchanged, and a file without any is refused by name and line."""

import gzip
import json

import pytest

from training.data.shards import documents

TEXTS = ["naïve\r\nlines\n\n", "", "\tcode:\n    漢字\n"]


def test_reads_every_form_of_a_file_as_it_is(tmp_path):
    lines = "".join(json.dumps({"body": text}) + "\n" for text in TEXTS).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.txt").write_bytes(TEXTS[0].encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(TEXTS[0].encode()))
    for name in ("a.jsonl", "a.jsonl.gz"):
        assert list(documents(tmp_path / name, key="body")) == [text for text in TEXTS if text]
    for name in ("a.txt", "a.txt.gz"):
        assert list(documents(tmp_path / name)) == TEXTS[:1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": 1}\n',
            "a.jsonl, line 2, byte 14: no JSON object with a text",
        ),
        ("a.jsonl", b"[]\n", "line 1"),
        ("a.jsonl", b"{\n", "line 1"),
        ("a.txt", b"caf\xe9", "a.txt, line 1, byte 3: not UTF-8"),
        ("a.txt.gz", b"not gzip", "a.txt.gz: cannot be read"),
        ("a.md", b"text", "a.md: neither .txt nor .jsonl"),
    ],
)
def test_a_file_that_is_no_text_is_refused_by_name(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(documents(tmp_path / name))


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="none.txt: cannot be read .*No such file"):
        list(documents(tmp_path / "none.txt"))
