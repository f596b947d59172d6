# SPDX-License-Identifier: Apache-2.0
"""Give tests a process that rehearses: `rehearse(flags, world=8)` returns what it found."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import pretrain_llama
from forecast import dry_run
from forecast.recording import record
from mpu.launch import Launch
from training.settings.config import Config

SMALL = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-layers 4 --hidden-size 64
    --num-attention-heads 4 --group-query-attention --num-query-groups 2 --ffn-hidden-size 176
    --seq-length 64 --max-position-embeddings 128 --micro-batch-size 1 --lr 1e-3 --train-iters 8
    --untie-embeddings-and-output-weights --bf16
""".split()


class Rehearsal(NamedTuple):
    """An exit code, the report as JSON, and what was printed."""

    code: int
    report: dict[str, Any]
    text: str


def stated(config: Config, rank: int = 0) -> dict[str, int]:
    """Return the bytes of each kind that the dry run has for a rank of the world."""
    grid = pretrain_llama.make_grid(config, Launch(rank, config.parallel.world_size))
    recorded = record(config, pretrain_llama, [grid.pp.rank], member=rank)
    return dry_run.memory(config, recorded[grid.pp.rank])


class Process:
    """A process that rehearses (rehearser.py)."""

    def __init__(self, file: Path) -> None:
        self.file, pipe = file, subprocess.PIPE
        program = Path(__file__).with_name("rehearser.py")
        self.process = subprocess.Popen(
            [sys.executable, program], stdin=pipe, stdout=pipe, text=True
        )

    def rehearse(self, argv: list[str], world: int, every: bool = False) -> Rehearsal:
        """Return what a rehearsal finds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        asked = {"world": world, "argv": argv, "file": str(self.file), "all": every}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the rehearsing process has died"
        return Rehearsal(**json.loads(line))

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@pytest.fixture(scope="session")
def rehearse(rehearser: Process) -> Callable[..., Rehearsal]:
    """Return rehearse(flags, world=1, small=True, every=False): flags come behind those of a small
    model; every: all micro-batches run. Equal arguments are rehearsed once.
    """

    @cache
    def run(flags: str, world: int = 1, small: bool = True, every: bool = False) -> Rehearsal:
        return rehearser.rehearse([*(SMALL if small else []), *flags.split()], world, every)

    return run
