# SPDX-License-Identifier: Apache-2.0
"""A rank is killed as it starts a collective of context parallelism: the others name it in 5 s.

The short form takes one kill, the long form each collective of a micro-batch's forward and
backward, of each --cp-comm-type.
"""

import functools
import signal

import pytest

import pretrain_llama
from forecast.recording import record
from mpu.pipeline.schedules import Action
from tests.faults.small_run import MODEL, Ranks, check_blame, fault_during
from tests.launcher import Launcher
from training.flags.parse import parse

SOON = 5.0  # seconds from the death to the last survivor's end
HEARD = {"beat": 0.1}  # seconds between a rank's words on what it is doing
AXES = ["cp"]
DOING = {
    "F": "F chunk 0 micro-batch 1 in stage 0 of iteration 3",
    "B": "BW chunk 0 micro-batch 1 in stage 0 of iteration 3",
}
FLAGS = "--context-parallel-size {} --cp-comm-type {}"
KINDS = {  # name: (ranks, flags)
    "p2p": (2, FLAGS.format(2, "p2p")),
    "all_gather": (2, FLAGS.format(2, "all_gather")),
    "a2a": (2, FLAGS.format(2, "a2a")),
}
GLOO = " --no-shared-memory"


@functools.cache
def collectives(kind: str, phase: str) -> int:
    """Return how many a rank starts in a micro-batch, as a recording has them."""
    ranks, flags = KINDS[kind]
    config = parse([*MODEL, *flags.split(), "--device", "cpu"], ranks)
    sent = record(config, pretrain_llama)[0].recorder.transfers
    return sum(each.axis in AXES and each.action == Action(phase, 0, 0) for each in sent)


def kill(ranks: Ranks, kind: str, phase: str, call: int, victim: int, more: str = "") -> None:
    count, flags = KINDS[kind]
    fault = fault_during(DOING[phase], "collective", victim, "kill", call) | {"axis": AXES}
    result = ranks.run(count, 1, fault, flags=flags + more, monitor=HEARD)
    assert result.codes[victim] == -signal.SIGKILL, result.said(victim)
    check_blame(result, victim, "the process died (killed?)")
    assert max(result.ended) - result.ended[victim] < SOON


@pytest.fixture
def ranks(launcher: Launcher) -> Ranks:
    return Ranks(launcher)


def test_a_rank_killed_in_attention_is_named(ranks):
    kill(ranks, "all_gather", "B", call=2, victim=1)


@pytest.mark.prove
@pytest.mark.parametrize("more", ["", GLOO], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("phase", DOING)
@pytest.mark.parametrize("kind", KINDS)
def test_in_each_collective(ranks, kind, phase, more):
    count = collectives(kind, phase)
    assert count >= 2, "a collective a layer, at least"
    for call in range(1, count + 1):
        kill(ranks, kind, phase, call, victim=call % KINDS[kind][0], more=more)
