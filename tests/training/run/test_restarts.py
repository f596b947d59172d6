# SPDX-License-Identifier: Apache-2.0
"""Which attempts of torchrun's start a run again, by what the one before left: its exit codes,
causes and steps. The program here imports nothing but what decides that.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from training.run.restarts import End, final, note_step, tell_next, write_error_file

ROOT = Path(__file__).resolve().parents[3]
DIED = "rank 1 failed first during start-up: the process died (killed?)"
PROGRAM = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from training.run.restarts import end_again
end_again(os.environ)
assert "torch" not in sys.modules
print("goes on")
"""


def error_file(run: Path, attempt: int, rank: int) -> str:
    folder = run / f"attempt_{attempt}" / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / "error.json")


# the ends of the ranks, each a code and a cause, or None of one that told nothing; whether a step
# was made; the code and the reason for which no attempt follows, or None where one does
ENDS: list[tuple[list[Any], bool, Any]] = [
    ([(2, "--lr is bad"), (2, "--lr is bad")], False, (2, "--lr is bad")),
    ([(138, "ended by SIGUSR1"), (138, "ended by SIGUSR1")], False, (138, "ended by SIGUSR1")),
    ([(143, "ended by SIGTERM"), None], False, (1, "local rank 1 died and left no message")),
    ([(1, DIED), None], False, (1, DIED)),
    ([(143, "ended by SIGTERM"), None], True, None),
]  # fmt: skip


@pytest.mark.parametrize("ends, stepped, wanted", ENDS)
def test_what_an_attempt_leaves_decides_on_the_next(
    tmp_path: Path, ends: list[Any], stepped: bool, wanted: Any
) -> None:
    for rank, end in enumerate(ends):
        path = error_file(tmp_path, 0, rank)
        if end:
            tell_next(End(*end), path)
            tell_next(End(1, "what came of it"), path)  # what was told first counts
    if stepped:
        note_step(error_file(tmp_path, 0, len(ends) - 1))
    found = final(tmp_path / "attempt_0")
    assert (found is None) == (wanted is None)
    if found is not None:
        assert found.code == wanted[0] and found.why.startswith(wanted[1])


def run(folder: Path, attempt: int, rank: int) -> subprocess.CompletedProcess[str]:
    path = error_file(folder, attempt, rank)
    (folder / "program.py").write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, str(folder / "program.py")], env={"TORCHELASTIC_ERROR_FILE": path},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_a_useless_attempt_says_its_sentence_once_and_hands_the_code_on(tmp_path: Path) -> None:
    write_error_file("--lr is bad", error_file(tmp_path, 0, 0), End(2, "--lr is bad"))
    says = "not restarted, because the previous attempt ended with a mistake: --lr is bad"
    for attempt in (1, 2):
        ends = [run(tmp_path, attempt, rank) for rank in (0, 1)]
        assert [(end.returncode, end.stdout) for end in ends] == [(2, ""), (2, "")]
        assert [end.stderr for end in ends] == [f"program.py: {says}\n" * (attempt == 1), ""]
        told = json.loads(Path(error_file(tmp_path, attempt, 0)).read_text())
        assert told["message"]["message"] == says  # torchrun's report ends with it


def test_an_attempt_goes_on_where_nothing_is_known(tmp_path: Path) -> None:
    """It is the first one, or the folder of the one before is gone, or damaged."""
    assert run(tmp_path, 0, 0).stdout == "goes on\n"
    assert run(tmp_path, 4, 0).stdout == "goes on\n"
    note_step(error_file(tmp_path, 4, 0))
    (tmp_path / "attempt_4" / "0" / "end.json").write_text('{"code": []}')
    assert run(tmp_path, 5, 0).stdout == "goes on\n"


def test_nothing_is_written_beside_another_launcher_s_error_file(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_error_file("broken", str(path))
    note_step(str(path))
    assert list(tmp_path.iterdir()) == [path]
