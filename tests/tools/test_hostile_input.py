# SPDX-License-Identifier: Apache-2.0
"""The tools print no escape codes of what they are given, and name what they cannot read."""

import json
import os

import pytest

from tools import checkpoint, draw_schedule, generate, plot_loss, preprocess_data
from tools.command_line import integer
from training.checkpoint.lock import DirectoryLock, _holder

ESCAPE = "esc\x1b[2Jape\u202e"


def said(capsys, code, main, *words):
    """Run a tool that is to refuse; return the last line of what it said."""
    try:
        found = main(list(words))
    except SystemExit as end:
        found = end.code
    told = capsys.readouterr()
    text = told.out + told.err + (found if isinstance(found, str) else "")
    assert found == code or isinstance(found, str), text
    assert "\x1b" not in text and "\u202e" not in text and "Traceback" not in text
    return text.splitlines()[-1]


def test_names_with_escape_codes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokens = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--output-prefix", "out")
    line = said(capsys, 1, preprocess_data.main, "--input", f"{ESCAPE}.txt", *tokens)
    assert "esc\\x1b[2Jape\\u202e.txt" in line
    assert "\\x1b" in said(capsys, 2, preprocess_data.main, "--workers", ESCAPE, "--input", "a.txt")
    assert "\\x1b" in said(capsys, 2, checkpoint.main, "show", ESCAPE)
    assert "\\x1b" in said(capsys, 2, checkpoint.main, ESCAPE)
    assert "\\x1b" in said(capsys, 2, draw_schedule.main, "--schedule", ESCAPE)
    assert "\\x1b" in said(capsys, 2, generate.main, "--load", "a", "--seed", ESCAPE)


@pytest.mark.parametrize(
    "words", [["--workers", "1000000"], ["--workers", "0"], ["--vocab-size", "4294967296"]]
)
def test_counts_have_bounds(words, capsys):
    flags = "--input a.txt --output-prefix out --tokenizer-type NullTokenizer".split()
    assert "must be a whole number from 1 to" in said(
        capsys, 2, preprocess_data.main, *flags, *words
    )


@pytest.mark.parametrize("text", ["", "-", "1.0", "1e3", "\u0663", "1_0", "--1", "+1"])
def test_what_is_no_whole_number(text):
    with pytest.raises(Exception, match="is not a whole number"):
        integer()(text)
    assert integer(-3)("-3") == -3
    with pytest.raises(Exception, match="^1{40} must be a whole number from 1 to 9$"):
        integer(1, 9)("1" * 5000)


@pytest.mark.parametrize(
    "line", ["[" * 9999, "3", '{"iteration": 1e999}', '{"iteration": 1, "loss": "a"}']
)
def test_a_log_that_is_none(tmp_path, line):
    (tmp_path / "log").write_text(json.dumps({"iteration": 1, "loss": 2.0}) + f"\n{line}\n")
    with pytest.raises(ValueError, match="log, line 2: not a line"):
        plot_loss.read_log(tmp_path / "log")


def test_pipes_hang_no_tool(tmp_path, capsys):
    for name in ("log", "lock", "text.jsonl"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match="not a plain file"):
        plot_loss.read_log(tmp_path / "log")
    with pytest.raises(OSError):
        DirectoryLock(tmp_path, print, patience=0)
    flags = f"--output-prefix {tmp_path}/out --tokenizer-type NullTokenizer --vocab-size 9".split()
    line = said(capsys, 1, preprocess_data.main, "--input", f"{tmp_path}/text.jsonl", *flags)
    assert "text.jsonl: cannot be read (not a plain file)" in line


@pytest.mark.parametrize("text", ["[" * 999, '{"pid": 1}', "\\ud800", '{"host":"\x1b","pid":1}'])
def test_a_lock_file_that_says_nothing(text):
    assert _holder(text.encode()) == "its file `lock` does not say which"
