# SPDX-License-Identifier: Apache-2.0
"""What the network does to a real run: ranks that never meet, strangers, resets, partitions."""

import os
import signal
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.faults.small_run import Ranks
from tests.launcher import Launcher


@pytest.fixture
def ranks(launcher: Launcher) -> Ranks:
    return Ranks(launcher)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_comes_is_named_in_one_sentence(ranks: Ranks, absent: int) -> None:
    """It is no mistake: the exit code is one after which job scripts try again."""
    result: Any = ranks.run(2, 2, absent=[absent], meeting=1.0)
    other = 1 - absent
    assert result.codes[other] == 1
    (line,) = result.said(other).splitlines()
    assert line.startswith(f"pretrain_llama.py: rank {absent} did not come to MASTER_ADDR:MASTER_P")


def test_a_rank_0_that_dies_at_the_meeting_is_named_in_one_sentence(ranks: Ranks) -> None:
    """Rank 0 keeps the store, and dies while rank 1 waits for rank 2."""
    folder = ranks.start(3, 1, absent=[2], meeting=20.0)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", ranks.launcher.port), timeout=1).close()
            break
        time.sleep(0.02)
    store = dist.TCPStore("127.0.0.1", ranks.launcher.port, is_master=False)
    store.wait(["weft/hello/1"], timedelta(seconds=30))
    os.kill(int((folder / "pid.0").read_text()), signal.SIGKILL)
    result: Any = ranks.launcher.wait()
    assert result.codes[:2] == [-signal.SIGKILL, 1]
    (line,) = result.said(1).splitlines()
    assert line.startswith("pretrain_llama.py: rank 0's store at MASTER_ADDR:MASTER_PORT (127.0.")
    assert result.ended[1] - result.ended[0] < 5
