# SPDX-License-Identifier: Apache-2.0
"""benchmarks/loss_curve.py: one model with Weft and with megatron-core, and what is drawn of it."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.loss_curve import PICTURE, differences, draw
from tests.benchmarks.test_bench_shakespeare import text_of

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "loss_curve.py"


def test_losses_are_compared_step_by_step():
    assert differences({1: 2.5, 2: 2.0}, {1: 2.5, 2: 2.25}) == {1: 0.0, 2: 0.25}
    with pytest.raises(ValueError, match="2 and 1 losses"):
        differences({1: 2.5, 2: 2.0}, {1: 2.5})


def test_the_picture_tells_the_largest_difference(tmp_path):
    ours = {i: 4 - i / 100 for i in range(1, 101)}
    theirs = {i: loss + (3e-5 if i == 50 else 0) for i, loss in ours.items()}
    draw(ours, theirs, "about it", tmp_path / "a.svg")
    words = (tmp_path / "a.svg").read_text()
    assert "at most 3.0e-05 apart in 100 steps" in words and "at step 1: 0.0e+00" in words
    # the picture of README: of how many steps it is, and that it is as small as promised there
    (found,) = re.findall(r"at most ([\d.e-]+) apart in 1,000 steps", PICTURE.read_text())
    assert float(found) < 1e-4


@pytest.mark.prove
@pytest.mark.parametrize("python", ["/bin/false", "/no/python"])
def test_a_python_without_megatron_core_is_one_sentence(tmp_path, python):
    words = [sys.executable, str(SCRIPT), str(tmp_path / "none.txt"), "--megatron-python", python]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and "pip install psutil megatron-core==0.16.1" in done.stderr


@pytest.mark.prove
def test_thirty_steps_are_those_of_megatron_core(tmp_path):
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install psutil megatron-core==0.16.1")
    (tmp_path / "words.txt").write_text(text_of(4000))
    words = [sys.executable, str(SCRIPT), str(tmp_path / "words.txt"), "--steps", "30"]
    words += ["--work-dir", str(tmp_path / "work"), "--output", str(tmp_path / "curve.svg")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = re.findall(r"largest difference of a step: ([\d.e-]+)", done.stdout)
    assert 0 < float(found) < 2e-6
    assert (tmp_path / "curve.svg").is_file()
