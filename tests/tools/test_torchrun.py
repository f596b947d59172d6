# SPDX-License-Identifier: Apache-2.0
"""tools/torchrun.py: no warning before our words, no traceback after, the rank's exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tools.torchrun import last_word

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    kept = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    command = [sys.executable, str(ROOT / "tools" / "torchrun.py"), "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node", "2", *flags, str(folder / "program.py")],
        env=kept,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.prove
def test_a_rank_that_fails_has_the_last_word(tmp_path):
    words = {"message": {"message": "--lr is missing", "extraInfo": {"timestamp": "1"}}}
    done = run(
        tmp_path,
        f"""import os, pathlib, time
assert os.environ["OMP_NUM_THREADS"] == "1"
if os.environ["RANK"] == "1":
    pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text({json.dumps(json.dumps(words))})
    raise SystemExit(2)
time.sleep(60)
""",
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "torchrun: rank 1: --lr is missing\n"


@pytest.mark.prove
def test_a_mistake_of_the_launcher_itself_is_a_line():
    command = [sys.executable, str(ROOT / "tools" / "torchrun.py"), "--nproc-per-node", "many"]
    done = subprocess.run([*command, "x.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("torchrun: ValueError: ") and "many" in done.stderr


@pytest.mark.parametrize(
    "code, shell, how",
    [
        (7, 7, "ended with exit code 7"),
        (-9, 137, "was ended by SIGKILL"),
        (143, 143, "was ended by SIGTERM"),
    ],
)
def test_a_rank_that_left_no_word_is_named(code, shell, how):
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="/no")
    said = last_word(ChildFailedError("program", {3: failure}))
    assert said == (shell, f"torchrun: rank 3 {how} without a message")


@pytest.mark.prove
def test_a_program_called_as_a_function_returns(tmp_path):
    """Torchrun waits for a value of each rank, and a process that ends without one sends none."""
    ends = "import os\nfrom training.run.process import as_process\n"
    ends += 'as_process(lambda: 0, os.environ["TORCHELASTIC_ERROR_FILE"])\n'
    done = run(tmp_path, ends, "--run-path")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
