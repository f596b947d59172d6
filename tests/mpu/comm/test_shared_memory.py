# SPDX-License-Identifier: Apache-2.0
"""csrc/shared_memory.h under ThreadSanitizer, with threads as ranks (shared_memory_race.cpp).

The workspace's protocol is clean, and every mistake in its use is found.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("shared_memory_race.cpp")
FLAGS = ["-std=c++17", "-fsanitize=thread", "-g", "-O1", "-pthread"]
FOUND, WRONG_DATA = 66, 3  # exit codes


def execute(binary: Path, *words: int | str) -> subprocess.CompletedProcess[str]:
    options = {**os.environ, "TSAN_OPTIONS": f"halt_on_error=1 exitcode={FOUND}"}
    words = [str(binary), *map(str, words)]
    return subprocess.run(words, capture_output=True, text=True, env=options, timeout=300)


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    compiler, made = shutil.which("g++"), tmp_path / "race"
    if compiler is None:
        pytest.skip("there is no g++")
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}\n")
    words = [compiler, *FLAGS, str(probe), "-o", str(tmp_path / "probe")]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"g++ has no ThreadSanitizer: {done.stderr.splitlines()[-1]}")
    if (ran := execute(tmp_path / "probe")).returncode:
        pytest.skip(f"ThreadSanitizer does not run here: {ran.stderr.strip()}")
    words = [compiler, *FLAGS, "-Wall", "-Wextra", "-Werror", str(SOURCE), "-o", str(made)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


def test_protocol_is_clean(binary: Path) -> None:
    for ranks in (2, 3, 4):
        ran = execute(binary, ranks, 1000)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout == f"{ranks} ranks, 1000 epochs: clean\n"
    for broken in ("skip-closed", "close-all", "one-phase"):
        ran = execute(binary, 4, 2000, broken)
        assert ran.returncode in (FOUND, WRONG_DATA), (broken, ran.stdout, ran.stderr)
