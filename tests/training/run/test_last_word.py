# SPDX-License-Identifier: Apache-2.0
"""Under torchrun the run's sentence is the last line; elsewhere it is printed at once.

A small process plays torchrun: it starts a rank, waits for it, and then prints a report. The long
form in tests/faults/test_torchrun.py has the real one.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LAUNCHER = """
import os, subprocess, sys
ranks, more = int(sys.argv[1]), dict(pair.split("=") for pair in sys.argv[2:])
env = {**os.environ, "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "0",
       "TORCHELASTIC_MAX_RESTARTS": "0", **more}
error = env.pop("STDERR", None)
for name in [name for name, value in env.items() if not value]:
    del env[name]
rank = '''
import sys
from training.run.last_word import say_last
text, error_file = sys.argv[1:]
if not say_last(text, error_file):
    print("at once: " + text, file=sys.stderr)
'''
for i in range(ranks):
    os.makedirs(f"attempt_0/{i}", exist_ok=True)
    command = [sys.executable, "-c", rank, f"rank {i} says\\x1b", f"{os.getcwd()}/attempt_0/{i}/e"]
    subprocess.run(command, env=env, stderr=open(error, "w") if error else None)
print("torchrun's report", file=sys.stderr)
"""


def said(tmp_path, ranks, *more):
    """Return the lines on standard error, all of which end before the pipe does."""
    command = [sys.executable, "-c", LAUNCHER, str(ranks), f"PYTHONPATH={ROOT}", "SLURM_JOB_ID="]
    done = subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True)
    return done.stderr.splitlines()


def test_the_first_ranks_sentence_is_the_last_line_once(tmp_path):
    assert said(tmp_path, 2) == ["torchrun's report", "rank 0 says\\x1b"]


@pytest.mark.parametrize(
    "more",
    ["TORCHELASTIC_MAX_RESTARTS=3", "SLURM_JOB_ID=7", "TORCHELASTIC_RUN_ID=", "STDERR=file"],
    ids=["restarts", "slurm", "no torchrun", "stderr in a file"],
)
def test_where_nobody_could_print_it_last_it_is_printed_at_once(tmp_path, more):
    lines = said(tmp_path, 1, more)
    if more.startswith("STDERR"):
        lines = [(tmp_path / "file").read_text().strip(), *lines]
    assert lines == ["at once: rank 0 says\x1b", "torchrun's report"]
