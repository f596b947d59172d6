# SPDX-License-Identifier: Apache-2.0
"""csrc/shared_memory.h under ThreadSanitizer, with threads as ranks (shared_memory_race.cpp).

The workspace's protocol is clean, and every mistake in its use is found.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("shared_memory_race.cpp")
FLAGS = ["-std=c++17", "-fsanitize=thread", "-g", "-O1", "-pthread"]
FOUND, WRONG_DATA = 66, 3  # exit codes


def execute(binary: Path, *words: int | str) -> subprocess.CompletedProcess[str]:
    options = {**os.environ, "TSAN_OPTIONS": f"halt_on_error=1 exitcode={FOUND}"}
    words = [str(binary), *map(str, words)]
    return subprocess.run(words, capture_output=True, text=True, env=options, timeout=300)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that compiles the binary with some macros."""
    compiler, folder = shutil.which("g++"), tmp_path_factory.mktemp("race")
    if compiler is None:
        pytest.skip("there is no g++")
    probe = folder / "probe.cpp"
    probe.write_text("int main() {}\n")
    words = [compiler, *FLAGS, str(probe), "-o", str(folder / "probe")]
    made = subprocess.run(words, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"g++ has no ThreadSanitizer: {made.stderr.splitlines()[-1]}")
    if (ran := execute(folder / "probe")).returncode:
        pytest.skip(f"ThreadSanitizer does not run here: {ran.stderr.strip()}")

    def compiled(*macros: str) -> Path:
        binary = folder / "-".join(["race", *macros])
        words = [compiler, *FLAGS, "-Wall", "-Wextra", "-Werror", *(f"-D{m}" for m in macros)]
        made = subprocess.run([*words, str(SOURCE), "-o", str(binary)], capture_output=True)
        assert made.returncode == 0, made.stderr.decode()
        return binary

    return compiled


def test_protocol_is_clean(build: Callable[..., Path]) -> None:
    binary = build()
    for ranks in (2, 3, 4):
        ran = execute(binary, ranks, 1000)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout == f"{ranks} ranks, 1000 epochs: clean\n"
    for broken in ("skip-closed", "close-all", "one-phase"):
        ran = execute(binary, 4, 2000, broken)
        assert ran.returncode in (FOUND, WRONG_DATA), (broken, ran.stdout, ran.stderr)
