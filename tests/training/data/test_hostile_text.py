# SPDX-License-Identifier: Apache-2.0
"""Text files that are hostile: half characters, bombs, pipes, depth."""

import gzip
import os

import pytest

from training.data import shards
from training.data.shards import Shard, documents

BAD = [
    (b'{"text": "\\ud800"}', "no JSON object with a text"),
    (b'{"text": "\\udc00 and more"}', "no JSON object with a text"),
    (b'{"text": ' + b"[" * 100_000, "no JSON object with a text"),
    (b'{"text": 4294967295}', "no JSON object with a text"),
    (b'{"text": {"encode": 1}, "b": "\\u0041"}', "no JSON object with a text"),
    (b'"text"', "no JSON object with a text"),
    (b'{"text": "\xed\xa0\x80"}', "not UTF-8"),
]


@pytest.mark.parametrize(("line", "says"), BAD, ids=range(len(BAD)))
def test_a_line_that_is_no_document_is_named(tmp_path, line, says):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one \\ud83d\\ude00"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"a.jsonl, line 2, byte \\d+: {says}"):
        list(documents(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("name", ["bomb.txt.gz", "bomb.jsonl.gz", "large.txt", "large.jsonl"])
def test_no_more_than_the_limit_is_read(tmp_path, name, monkeypatch):
    monkeypatch.setattr(shards, "MOST", 1000)
    opened = gzip.open if name.endswith(".gz") else open
    with opened(tmp_path / name, "wb") as file:
        file.write(bytes(100_000))
    with pytest.raises(ValueError, match=f"{name}.*: a document of more than 1,000 bytes"):
        list(Shard(str(tmp_path / name), 0, None).texts("text", lines=False))


@pytest.mark.parametrize("name", ["pipe.txt", "pipe.jsonl", "pipe.jsonl.gz"])
def test_a_pipe_is_refused(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name}: cannot be read .*not a plain file"):
        list(documents(tmp_path / name))
