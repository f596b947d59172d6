# SPDX-License-Identifier: Apache-2.0
"""A run resumes after kill -9 of one rank or all, at each phase of a save and anywhere in a step.

It loads the last checkpoint that was committed, never a directory that was being written, and ends
with the losses, weights and optimizer state of an undisturbed run, bit for bit. All of it is long;
in `make test` tests/chaos kills a rank and compares the bits.
"""

import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.small_run import LIMIT, Ranks, check_blame, weights
from tests.launcher import Launcher, Result

BACKGROUND = "--async-save --keep-last-k 1 "
ZERO = "--zero-stage 2 --overlap-grad-reduce --ddp-bucket-size 20000"
LAYOUTS = {  # name: (ranks, tp, pp, flags)
    "tp": (2, 2, 1, ""),
    "dp": (2, 1, 1, ZERO),
    "pp": (2, 1, 2, "--num-layers 4"),
    "tp, pp": (4, 2, 2, "--num-layers 4"),
    "dp, in the background": (2, 1, 1, BACKGROUND + ZERO),
    "pp, in the background": (2, 1, 2, BACKGROUND + "--num-layers 4"),
}
# Steps 3, 6 and 8 are saved; the second save is struck. place: (point, call, which step is loaded)
SAVE = {
    "nothing is written yet": ("save: start", 1, 3),
    "a shard is begun": ("save: piece", 1, 3),
    "half a shard is written": ("save: piece", 6, 3),
    "all shards are written": ("save: shards", 1, 3),
    "before the hash of each file is told": ("committing", 2, 3),
    "the manifest is written aside": ("save: manifest", 1, 3),
    "renamed": ("save: renamed", 1, 6),
}
LATER = {
    "nothing is staged yet": ("staging", 2, 3),
    "staged": ("staged", 1, 3),
    "an old one is about to go": ("save: pruning", 1, 6),
    "an old one is renamed": ("save: trash", 1, 6),
}
RANK_0_ALONE = ("committing", "save: manifest", "save: aside", "save: renamed")
RANK_0_ALONE += ("save: pruning", "save: trash")
STEP = {  # in iteration 5
    "data": ("data", 1, 3),
    "forward": ("layer", 3, 3),
    "backward": ("backward", 4, 3),
    "reduction": ("gradient sums", 1, 3),
    "update": ("update", 1, 3),
}
MESSAGES = {"receive": ("receive", 2, 3), "wait": ("wait", 2, 3), "send": ("send", 2, 3)}
PLACES = SAVE | LATER | STEP | MESSAGES
ALL = -1
PAIRS = [
    (layout, place)
    for layout, (_, _, pp, _) in LAYOUTS.items()
    for place in PLACES
    if (pp > 1 or place not in MESSAGES) and ("background" in layout or place not in LATER)
]
KILLS = [  # all ranks and each rank in turn
    (layout, place, victim)
    for n, (layout, place) in enumerate(PAIRS)
    for victim in [n % (LAYOUTS[layout][0] + 1) - 1]
    if victim <= 0 or PLACES[place][0] not in RANK_0_ALONE
]


@pytest.fixture
def ranks(launcher: Launcher) -> Ranks:
    return Ranks(launcher)


@pytest.fixture(scope="module")
def oracle(launcher: Launcher) -> Callable[[str], Result]:
    """oracle(layout) -> the run that nobody disturbs."""
    known: dict[str, Result] = {}

    def get(layout: str) -> Result:
        if layout not in known:
            known[layout] = run(Ranks(launcher), layout)
            assert set(known[layout].codes) == {0}, known[layout].said(0)
        return known[layout]

    return get


def run(ranks: Ranks, layout: str, fault: Any = None, **job: Any) -> Result:
    count, tp, pp, flags = LAYOUTS[layout]
    return ranks.run(count, tp, fault, pp=pp, flags=flags, **job)


def fault_of(place: str, victim: int) -> dict[str, Any]:
    point, call, _ = PLACES[place]
    how = {"rank": max(victim, 0), "how": "kill all" if victim == ALL else "kill"}
    when = {"from": 5} if place in {*STEP, *MESSAGES, "staged"} else {}
    when = {"save": 2} if point.startswith("save: ") else when
    return {"point": point, "call": call, **how, **when}


@pytest.mark.prove
@pytest.mark.parametrize("layout, place, victim", KILLS)
def test_a_killed_run_goes_on_from_its_last_checkpoint_to_the_bit(
    ranks: Ranks, oracle: Any, layout: str, place: str, victim: int
) -> None:
    undisturbed = oracle(layout)
    killed = run(ranks, layout, fault_of(place, victim))
    if victim == ALL:
        assert set(killed.codes) == {-signal.SIGKILL}, "the fault was never reached"
    else:
        assert killed.codes[victim] == -signal.SIGKILL, "the fault was never reached"
        check_blame(killed, victim, "the process died (killed?)")
    assert max(killed.ended) - min(killed.ended) < LIMIT
    assert killed.orphans() == []

    committed = [name for name in killed.saved() if "." not in name]
    newest = [f"step_{PLACES[place][2]:08d}"]
    if "background" in layout and place not in SAVE | LATER:  # step 3's save may be under way
        assert committed in ([], newest)
    elif victim <= 0:  # where another rank dies, rank 0 may commit what all had written
        assert committed[-1:] == newest

    resumed = run(ranks, layout, folder=killed.folder)
    assert set(resumed.codes) == {0}, resumed.said(0)
    loaded = re.findall(r"^loaded (\S+): at iteration", resumed.said(0, "out"), re.M)
    assert loaded == [str(killed.folder / "saved" / name) for name in committed[-1:]]
    assert weights(resumed) == weights(undisturbed)
    assert set(resumed.losses()) == set(undisturbed.losses())
    assert [name for name in resumed.saved() if "." in name] == [], "the rubbish is gone"
    assert resumed.saved() == undisturbed.saved()


@pytest.mark.prove
def test_a_run_killed_in_its_first_save_begins_again(ranks: Ranks, oracle: Any) -> None:
    layout = "dp, in the background"
    undisturbed = oracle(layout)
    fault = {"point": "save: shards", "call": 1, "save": 1, "rank": 0, "how": "kill all"}
    killed = run(ranks, layout, fault)
    assert set(killed.codes) == {-signal.SIGKILL} and [n for n in killed.saved() if "." in n]
    resumed = run(ranks, layout, folder=killed.folder)
    assert set(resumed.codes) == {0}, resumed.said(0)
    assert "no checkpoint there; starting fresh" in resumed.said(0, "out")
    assert weights(resumed) == weights(undisturbed) and resumed.saved() == undisturbed.saved()
    assert set(resumed.losses()) == set(undisturbed.losses())
