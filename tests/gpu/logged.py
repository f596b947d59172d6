# SPDX-License-Identifier: Apache-2.0
"""Run the program as a user starts it, and return the lines of its --log-json."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.row import ROOT, Row

PROGRAM = (str(Path(__file__).with_name("program.py")),)


def logged(
    row: Row,
    words: Sequence[str],
    ranks: int = 1,
    program: Sequence[str] = PROGRAM,
    env: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Return the log's lines of a run with these flags. Raises RuntimeError where it fails.

    program: a script and its own arguments, before the flags. env: added to the environment.
    """
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.json"
        command += [*program, *words, "--device", row.device.type, "--log-json", str(log)]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **(env or {})}, check=False)
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if done.returncode:
        raise RuntimeError(f"the program ended with {done.returncode} after {len(lines)} lines")
    return lines
