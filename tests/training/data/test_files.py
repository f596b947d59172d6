# SPDX-License-Identifier: Apache-2.0
"""A file written aside appears whole or not at all."""

import os

import pytest

from training.data.files import replacing


def test_file_appears_whole(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with replacing(str(path)) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


def test_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replacing(str(path)) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]
