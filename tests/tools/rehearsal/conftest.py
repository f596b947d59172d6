# SPDX-License-Identifier: Apache-2.0
"""Give tests a process that rehearses: `rehearse(flags, world=8)` returns what it found."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

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


@pytest.fixture(scope="session")
def rehearse(tmp_path_factory: Any) -> Iterator[Callable[..., Rehearsal]]:
    """Return rehearse(flags, world=1, small=True): flags come behind those of a small model."""
    program = Path(__file__).with_name("rehearser.py")
    file = tmp_path_factory.mktemp("rehearsal") / "report.json"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, program], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        ask, answers = process.stdin, process.stdout

        def run(flags: str, world: int = 1, small: bool = True) -> Rehearsal:
            argv = [*(SMALL if small else []), *flags.split()]
            ask.write(json.dumps({"world": world, "argv": argv, "file": str(file)}) + "\n")
            ask.flush()
            line = answers.readline()
            assert line, "the rehearsing process has died"
            return Rehearsal(**json.loads(line))

        yield run
        ask.close()
