# SPDX-License-Identifier: Apache-2.0
"""Ranks that answer, fail, die and hang: what tools/compare/launch.py says of each."""

import os
import signal
import time
from functools import partial

import pytest

from tools.compare.launch import launch, where


def work(how, rank, tell):
    if how == "answers":
        tell([rank] * 100_000)  # more than a pipe holds
    elif how == "dies" and rank:
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "leaves" and rank:
        os._exit(3)
    elif how == "hangs" and rank:
        time.sleep(60)


@pytest.mark.parametrize(
    "how, code, says",
    [
        ("answers", 0, ""),
        ("dies", -signal.SIGSEGV, "rank 1 ended: signal 11 (Segmentation fault)"),
        ("leaves", 3, "rank 1 ended: exit code 3"),
        ("hangs", 1, "rank 1 ended: it took longer than 1 s; rank 1 was in test_launch.py line"),
    ],
)
def test_how_a_rank_ended_is_said(how, code, says, tmp_path):
    ended = launch(2, partial(work, how), tmp_path, 1.0 if how == "hangs" else 60.0)
    assert [each.code for each in ended] == [0, code]
    assert where(ended, tmp_path, 1.0).startswith(says)
    if how == "answers":
        assert [each.answer[-1] for each in ended] == [0, 1]
