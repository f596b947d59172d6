# SPDX-License-Identifier: Apache-2.0
"""Flags of faults that contradict each other."""

import pytest

from training.flags.parse import parse
from training.settings.config import UsageError

MODEL = (
    "--mock-data --vocab-size 100 --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 32 --train-iters 2 --lr 1e-3"
).split()


def test_a_hang_timeout_ends_before_the_timeout_of_collectives() -> None:
    given = [*MODEL, "--distributed-timeout-minutes", "2", "--hang-timeout"]
    assert parse([*given, "120"], 1).fault.hang_timeout == 120
    with pytest.raises(UsageError) as error:
        parse([*given, "121"], 1)
    assert str(error.value) == (
        "--hang-timeout 121: must be at most the 120 s of --distributed-timeout-minutes 2, after "
        "which the run ends in any case"
    )


def test_a_hang_timeout_is_no_shorter_than_beats_allow() -> None:
    with pytest.raises(UsageError, match="--hang-timeout 4: must be"):
        parse([*MODEL, "--hang-timeout", "4"], 1)
