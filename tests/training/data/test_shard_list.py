# SPDX-License-Identifier: Apache-2.0
"""--data-args-path is a shard list."""

import pytest

from tests.training.small_llama import SMALL, read
from training.settings.config import UsageError

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
