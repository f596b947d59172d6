# SPDX-License-Identifier: Apache-2.0
"""tools/plot_loss.py reads a log across resumes, and draws a PNG of 1200 x 675 pixels."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tools.plot_loss import read_log, smooth

ROOT = Path(__file__).parents[2]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_resumed_run_replaces_what_it_repeats(tmp_path):
    first = [{"iteration": i, "loss": float(i)} for i in (1, 2, 3)]
    first.append({"iteration": 3, "validation_loss": 9.0})
    again = [{"iteration": 2, "loss": 20.0}, {"iteration": 2, "validation_loss": 5.0}]
    curves = read_log(write(tmp_path / "log", [*first, *again]))
    assert curves == {"loss": [(1, 1.0), (2, 20.0)], "validation_loss": [(2, 5.0)]}


def test_a_loss_that_was_not_finite_leaves_a_gap(tmp_path):
    log = write(tmp_path / "log", [{"iteration": 1, "loss": None}, {"iteration": 2, "loss": 1.0}])
    assert read_log(log)["loss"] == [(2, 1.0)]


def test_smoothing_keeps_a_straight_line_and_evens_out_a_saw():
    line = [(i, float(i)) for i in range(50)]
    assert smooth(line) == [(i, pytest.approx(i)) for i in range(50)]
    saw = [(i, float(i % 2)) for i in range(100)]
    assert all(0.3 < value < 0.7 for _, value in smooth(saw, share=0.1)[5:-5])


def run(*arguments):
    command = [sys.executable, "tools/plot_loss.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_draws_a_picture(tmp_path):
    records = [{"iteration": i, "loss": 6.0 / i} for i in range(1, 50)]
    records += [{"iteration": i, "validation_loss": 7.0 / i} for i in (20, 40)]
    log = write(tmp_path / "log", records)
    png = tmp_path / "a" / "loss.png"
    done = run(log, "--output", png, "--reference", "5.9", "unigram entropy", "--title", "Loss")
    assert done.returncode == 0, done.stderr
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", head[16:]) == (1200, 675)


@pytest.mark.parametrize(
    ("content", "said"), [("not json\n", "line 1: not a line"), ("", "holds no loss yet")]
)
def test_a_file_that_is_no_log_is_one_sentence(tmp_path, content, said):
    (tmp_path / "log").write_text(content)
    done = run(tmp_path / "log", "--output", tmp_path / "loss.png")
    assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "loss.png").exists()
