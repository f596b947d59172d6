#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rehearse a run: make the real steps of one rank of any world on a device without memory.

    WORLD_SIZE=512 python pretrain_llama.py --rehearse --rehearse-rank 17 FLAG...
    make rehearse WORLD=8 ARGS="..."

pretrain_llama.py --rehearse starts this with its own path, so that a changed copy of it is itself
rehearsed. The exit code is 0 without findings, 1 with findings, 2 for a mistake in the flags.
"""

import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # as a script, find mpu

from mpu.needs import explain_missing_packages  # noqa: E402

if __name__ == "__main__":
    explain_missing_packages()

from training.run.waiting import waiting  # noqa: E402


def main(path: str, argv: list[str]) -> int:
    """Rehearse the program at `path` with these flags; return the exit code."""
    from forecast.rehearsal import guard

    fake = guard.flag(argv, "--rehearse-device") != "cpu"
    try:
        if fake:
            guard.load()
        from forecast.rehearsal import main as rehearsal  # with torch, so after the guard

        with waiting("rehearsing") as progress:
            return rehearsal.main(load(path), argv, progress)
    except guard.GuardError as error:
        print(f"pretrain_llama.py --rehearse: {error}", file=sys.stderr)
        return 2


def load(path: str) -> ModuleType:
    """Return the program as a module."""
    if Path(path).resolve() == ROOT / "pretrain_llama.py":
        import pretrain_llama

        return pretrain_llama
    sys.path.insert(0, os.path.dirname(path))
    module = ModuleType("pretrain_llama_fork")
    module.__dict__.update(runpy.run_path(path, run_name="pretrain_llama_fork"))
    return module


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        sys.exit("usage: pretrain_llama.py --rehearse FLAG...; it starts tools/rehearse.py itself")
    code = main(sys.argv[1], sys.argv[2:])
    sys.stdout.flush()
    os._exit(code)  # threads of the trainer may still be waiting
