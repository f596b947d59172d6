# SPDX-License-Identifier: Apache-2.0
"""The storm of `make chaos`: what it draws, how it judges, a few of its faults, and all of them.

`pytest tests/chaos -m prove -s` plays 120 faults, prints the table and holds it to the promises.
"""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.fault import LAYOUTS, draw
from tests.chaos.judge import judge
from tests.chaos.kinds import BY_NAME, KINDS
from tests.chaos.play import Oracle, play
from tests.chaos.scene import Seen
from tests.faults.fault_injection import POINTS
from tests.launcher import Launcher
from tests.sampling import sampled

ROOT = Path(__file__).resolve().parents[2]


def test_a_storm_is_drawn_from_its_seed_alone_and_has_every_kind() -> None:
    faults = draw(5, 300, KINDS)
    assert faults == draw(5, 300, KINDS) != draw(6, 300, KINDS)
    counts = Counter(fault.kind for fault in faults)
    assert len(KINDS) == len(BY_NAME) == len(counts) >= 25
    assert {fault.layout for fault in faults} == set(LAYOUTS)
    assert [fault.number for fault in faults] == list(range(1, 301))
    assert draw(5, 10, KINDS) == faults[:10]
    assert {fault.kind for fault in faults[: len(KINDS)]} == set(BY_NAME)


def seen(name: str, **more: Any) -> Seen:
    """Return what a run looks like that keeps its promise: killed in the update, named, resumed."""
    kind = BY_NAME[name]
    fault = replace(draw(1, 1, [kind])[0], rank=1)
    words = ["[rank 0] stopping: rank 1 failed first: the process died (killed?)", ""]
    good: dict[str, Any] = dict(struck=10.0, codes=[1, -9], ended=[12.0, 10.0], words=words)
    good |= dict(told=11.0, reached=5, again=[0, 0], began_at=(3, 3), recovered=14.0, equal=True)
    return Seen(fault, kind, **good | more)


KILL = "kill: in the update"


def test_a_run_that_keeps_its_promise_is_judged_so() -> None:
    verdict = judge(seen(KILL))
    assert verdict.broken == [] and verdict.detected and verdict.named and verdict.equal
    assert (verdict.detection, verdict.ended, verdict.recovery, verdict.lost) == (1.0, 2.0, 4.0, 2)


@pytest.mark.parametrize(
    "more, why",
    [
        (dict(struck=None), "the fault never struck"),
        (dict(codes=[0, -9]), "rank 0 ended with 0"),
        (dict(words=["Traceback", ""]), "named wrong"),
        (
            dict(words=["rank 1 failed first: the process died; rank 0 failed first", ""]),
            "named wrong",
        ),
        (dict(codes=[0, -9], words=["", ""]), "nobody noticed"),
        (dict(ended=[40.0, 10.0]), "ended after 30.0 s"),
        (dict(late=True), "ended after 2.0 s"),
        (dict(again=[0, 2]), "the same command ended with [0, 2]"),
        (dict(began_at=(0, 3)), "went on from step 0; the newest sound one is 3"),
        (dict(equal=False), "the end differs"),
        (dict(left=["process 7"]), "left behind: process 7"),
    ],
)
def test_each_broken_promise_is_told(more: dict[str, Any], why: str) -> None:
    assert any(line.startswith(why) for line in judge(seen(KILL, **more)).broken)


def test_every_place_where_a_fault_strikes_is_in_the_program() -> None:
    """The long forms alone strike at most of them."""
    gone = [name for name, (owner, call) in POINTS.items() if not hasattr(owner, call)]
    assert gone == []


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("oracle"))


SHORT = ("kill: in a save", "disk: ENOSPC under a checkpoint", "checkpoint: bit flipped")


@pytest.mark.parametrize("name", sampled(SHORT, 3))
def test_a_fault_is_found_named_and_healed(
    launcher: Launcher, tmp_path: Path, oracle: Oracle, name: str
) -> None:
    kind = replace(BY_NAME[name], layouts=("dp 2",))
    verdict = judge(play(launcher, tmp_path, draw(2, 1, [kind])[0], kind, oracle))
    assert verdict.broken == [], verdict.words


@pytest.mark.prove
def test_the_storm_keeps_every_promise(tmp_path: Path) -> None:
    """120 faults of every kind over tp 2, pp 2, dp 2 and ZeRO 3."""
    words = ["--cases", "120", "--seed", "7", "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "tests/chaos/storm.py", *words], cwd=ROOT, check=False)
    print((tmp_path / "out" / "table.md").read_text())
    assert done.returncode == 0
