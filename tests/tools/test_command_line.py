# SPDX-License-Identifier: Apache-2.0
"""A tool's flags may be typed with _, and an unknown one is answered with the one that is meant."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import (
    build_corpus,
    checkpoint,
    evaluate,
    explain,
    generate,
    plot_loss,
    preprocess_data,
    train_tokenizer,
)

ROOT = Path(__file__).resolve().parents[2]
EACH = """
import os, runpy, sys
import torch
for path in sys.argv[1:]:
    if os.fork() == 0:
        sys.argv = [path, "--help"]
        runpy.run_path(path, run_name="__main__")
        os._exit(9)
    os.wait()
"""
TYPED = [  # a tool, what is typed, what the message holds
    (generate, "--out_dir=out --start=hi", "--out_dir (did you mean --load?); --start (did"),
    (generate, "--load x --max_tokens 9", "--max_tokens (did you mean --max-new-tokens?)"),
    (generate, "--load x --num_sample 3", "--num_sample (did you mean --num-samples?)"),
    (evaluate, "--model hf --tasks a", "--model (did you mean --load?)"),
    (evaluate, "--load x --tasks a --output_path b", "--output_path (did you mean --output?)"),
    (plot_loss, "a.jsonl --out a.png", "--out (did you mean --output?)"),
    (preprocess_data, "--input a --output b", "--output (did you mean --output-prefix?)"),
    (checkpoint, "convert --load-dir a", "--load-dir (did you mean --load?)"),
    (explain, "--micro-batches 0", "--micro-batches: 0 must be a whole number from 1"),
    (generate, "--load x --banana 3", "not a flag of this tool: --banana\n"),
]


@pytest.mark.parametrize("tool, typed, says", TYPED, ids=[typed for _, typed, _ in TYPED])
def test_an_unknown_flag_is_answered_with_the_one_that_is_meant(
    tool, typed, says, capsys, monkeypatch
):
    monkeypatch.setattr("sys.argv", [tool.__name__, *typed.split()])
    with pytest.raises(SystemExit) as end:
        tool.main()
    assert end.value.code == 2 and says in capsys.readouterr().err


def test_a_flag_may_be_typed_with_underscores(tmp_path, capsys):
    """It goes as far as with dashes: to the folder in which there is no checkpoint."""
    said = set()
    for flags in ("--num_samples 2 --max_new_tokens=3", "--num-samples 2 --max-new-tokens=3"):
        with pytest.raises(SystemExit):
            generate.main(f"--load {tmp_path} --prompt a_b {flags}".split())
        said.add(capsys.readouterr().err)
    assert len(said) == 1 and "no checkpoint there" in said.pop()


@pytest.mark.prove
def test_each_tool_says_how_it_is_used_without_docstrings_too(tmp_path):
    """As python -OO leaves it. Each is started as a program, and ends with its usage alone."""
    files = sorted((ROOT / "tools").glob("*.py"))
    tools = [path for path in files if "__main__" in path.read_text()]
    assert len(tools) > 15
    started = [sys.executable, "-OO", "-c", EACH, *map(str, tools)]
    end = subprocess.run(started, capture_output=True, text=True, cwd=tmp_path)
    assert end.returncode == 0, end.stderr
    assert (end.stdout + end.stderr).count("usage: ") == len(tools)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("tool", [preprocess_data, train_tokenizer])
@pytest.mark.parametrize("prefix", ["", "/", "data/", "..", "data/."])
def test_a_prefix_without_a_name_is_refused(tool, prefix, capsys, monkeypatch):
    """As that of an unset variable: its files would be hidden ones, or of the folder above."""
    typed = ["--input", "a.txt", "--output-prefix", prefix]
    more = ["--tokenizer-type", "NullTokenizer"] if tool is preprocess_data else []
    monkeypatch.setattr("sys.argv", [tool.__name__, *typed, *more])
    with pytest.raises(SystemExit):
        tool.main()
    assert f"--output-prefix: {prefix!r} must end in a name" in capsys.readouterr().err


@pytest.mark.parametrize(
    "tool, typed, flag",
    [
        (checkpoint, ["prune", "", "--keep-last-k", "1"], "RUN"),
        (checkpoint, ["consolidate", "a", "--save", ""], "--save"),
        (checkpoint, ["convert", "--to-hf=", "--load", "a"], "--to-hf"),
        (build_corpus, ["--input", "a.txt", "--output-dir", ""], "--output-dir"),
        (plot_loss, [""], "LOG"),
    ],
)
def test_an_empty_path_is_not_the_folder_one_stands_in(tool, typed, flag, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [tool.__name__, *typed])
    with pytest.raises(SystemExit) as end:
        tool.main()
    assert end.value.code == 2 and f"argument {flag}: the path is empty" in capsys.readouterr().err
