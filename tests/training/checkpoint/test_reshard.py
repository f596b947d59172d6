# SPDX-License-Identifier: Apache-2.0
"""Any layout saves, any other loads: weights and optimizer, exactly, and training continues alike.

There is one canonical state (tests/training/checkpoint/canonical.py). For each of N layouts, (i) it
saves that state, bit for bit, each byte once; (ii) it loads that state, as one rank alone saved it,
exactly, padding included. A checkpoint does not depend on a layout, so these 2N cases prove all N^2
pairs. (iii) The two steps after the load have the losses of every other layout: the first depends
on the weights, the second on masters, moments and the count of updates.
"""

import itertools
import json
import random
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from threading import Event

import pytest
from torch import Tensor

from mpu.grid import Grid
from tests.saved import stored
from tests.training.checkpoint import canonical
from tests.training.checkpoint.canonical import STEPS, Canonical, same_bits, saver_of, train
from training.settings import pipeline_schedule
from training.settings.config import UsageError

SAMPLES = 240  # consumed, as the canonical checkpoint says
DTYPES = ("float64", "bfloat16", "float32")
SCHEDULES = ("1f1b", 1), ("interleaved", 2), ("zb-v", 2), ("interleaved", 3), ("v-half", 2)
PIPELINES = [dict(schedule=schedule, v=v) for schedule, v in SCHEDULES]
CLOSE = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 2e-2}  # losses, relative
Case = dict


def alone(case: Case) -> Case:
    """Return the same model and dtype on one rank."""
    same = {key: case[key] for key in ("model", "tied", "dtype", "groups") if key in case}
    return same | dict(tp=1, pp=1, dp=1, sp=False, zero=0)


def every_case() -> list[Case]:
    """List the layouts of up to 8 ranks: tp, pp, dp, sp, ZeRO; tied and untied embeddings each.

    Layouts that must agree to the bit have one dtype, and the dtypes take turns; so do schedules.
    """
    found: list[Case] = []
    dtypes: dict[tuple, str] = {}
    turns = itertools.count()

    def add(tp: int, pp: int, dp: int, sp: bool, zero: int, tied: bool, **more: int) -> None:
        model = 35 if {5, 7} & {tp, pp, dp} else 24
        case = dict(model=model, tp=tp, pp=pp, dp=dp, sp=sp, zero=zero, tied=tied, **more)
        case["dtype"] = dtypes.setdefault(sums(case), DTYPES[len(dtypes) % 3])
        if pp > 1:
            at = next(turns) % len(PIPELINES)
            order = PIPELINES[at:] + PIPELINES[:at]
            case |= next(way for way in map(dict, order) if admitted(case | way))
        found.append(case)

    for tp, pp, dp in itertools.product(range(1, 9), repeat=3):
        if tp * pp * dp > 8:
            continue
        for sp, zero in itertools.product((False, True), range(4)):
            if (sp and tp == 1) or (zero and dp == 1):
                continue  # the same as without
            for tied in (False, True):
                add(tp, pp, dp, sp, zero, tied)
                if zero and dp in (4, 6, 8):
                    add(tp, pp, dp, sp, zero, tied, instances=2)
    return found


def admitted(case: Case) -> bool:
    try:
        pipeline_schedule.check(canonical.config_of(case))
    except UsageError:
        return False
    return True


def ranks(case: Case) -> int:
    return case["tp"] * case["pp"] * case["dp"]


def sums(case: Case) -> tuple:
    """Return what the bits of a step depend on: docs/numerics.md leaves out ZeRO and pipelines."""
    keys = ("model", "dtype", "tied", "tp", "sp", "dp", "instances", "groups")
    return tuple(case.get(key) for key in keys)


def name_of(case: Case) -> str:
    return " ".join(f"{key} {value}" for key, value in case.items())


def save_and_load(comm, some: list[tuple[Case, str, str]]) -> list[dict]:
    """On one rank, for each (case, a directory to save in, one to load from): save the canonical
    state, load it into other weights, train two steps."""
    found = []
    for case, here, there in some:
        more = {"instances": case.get("instances", 1), "query_groups": case.get("groups", 0)}
        grid = comm.grid(case["tp"], pp=case["pp"], **more)
        state = Canonical(case)
        try:
            run = canonical.build(grid, case)
            state.fill(run)
            saver_of(run, here).save(STEPS, SAMPLES, must=True)
            run = canonical.build(grid, case, seed=6)
            state.check_fresh(run)
            assert saver_of(run, there).resume.load() == (STEPS, SAMPLES)
            count = state.check(run)
        except AssertionError as error:
            raise AssertionError(f"{name_of(case)}: rank {comm.rank}: {error}") from error
        found.append({"losses": train(run, range(2)), "elements": count})
    return found


def go_on(comm, case: Case, load: str, save: str, steps: range) -> list[float]:
    """On one rank: take up what another layout saved, if it did, train, save; return the losses."""
    grid = comm.grid(case["tp"], pp=case["pp"], instances=case.get("instances", 1))
    run = canonical.build(grid, case, seed=6 if load else 5)
    if load:
        at = steps.start, steps.start * case["model"]
        assert saver_of(run, load).resume.load() == at
    losses = train(run, steps)
    saver_of(run, save).save(steps.stop, steps.stop * case["model"], must=True)
    return losses


def stop_and_go_on(comm, case: Case, root: str, behind: bool) -> list[float]:
    """On one rank: four steps with a save after the second; then the last two again from that save,
    to the same bits of all that the rank keeps. behind: it is written when the third has changed
    the weights already, during the fourth."""
    grid = comm.grid(case["tp"], pp=case["pp"], instances=case.get("instances", 1))
    if behind and grid.background.transport is None:
        grid.add_background(timedelta(seconds=60))
    state, straight = Canonical(case), canonical.build(grid, case)
    with saver_of(straight, root, behind) as saver:
        assert saver.begin() == (0, 0)
        losses = train(straight, range(2))
        after_a_step, start = Event(), saver._background.start
        saver._background.start = lambda work: start(lambda: after_a_step.wait(60) and work())
        saver.save(2, 2 * case["model"], must=False)
        losses += train(straight, range(2, 3))
        after_a_step.set()
        losses += train(straight, range(3, 4))
    resumed = canonical.build(grid, case, seed=6)
    assert saver_of(resumed, root).resume.load() == (2, 2 * case["model"])
    assert train(resumed, range(2, 4)) == losses[2:]
    for (what, one, _, _), (_, other, _, _) in zip(
        state.held(straight), state.held(resumed), strict=True
    ):
        assert same_bits(one, other), f"{name_of(case)}: {what}"
    return losses


class Prover:
    """Runs cases on worlds of ranks, and holds them to the canonical state and to each other."""

    def __init__(self, world, folder: Path) -> None:
        self.world, self.folder, self.count = world, folder, 0
        self.states: dict[str, dict[str, Tensor]] = {}
        self.losses: dict[str, list[float]] = {}
        self.bits: dict[tuple, tuple[list[float], Case]] = {}

    def canonical(self, case: Case) -> str:
        """Return a directory with the canonical state, saved by one rank alone; made once."""
        one = alone(case)
        path = self.folder / name_of(one)
        if not path.exists():
            state, run = Canonical(one), canonical.build(Grid(), one)
            state.fill(run)
            saver_of(run, str(path)).save(STEPS, SAMPLES, must=True)
            self.check_saved(one, path)
        return str(path)

    def wanted(self, case: Case) -> dict[str, Tensor]:
        """Return what a checkpoint of the canonical state must hold."""
        key = name_of(alone(case))
        if key not in self.states:
            self.states[key] = Canonical(case).tensors()
        return self.states[key]

    def check_saved(self, case: Case, path: Path) -> None:
        """Hold what lies on the disk to the canonical state."""
        (directory,) = path.glob("step_*")
        assert directory.name == f"step_{STEPS:08d}"
        state = json.loads((directory / "state.json").read_text())
        keys = ("iteration", "optimizer_steps", "consumed_samples")
        assert [state[key] for key in keys] == [STEPS, STEPS, SAMPLES]
        found, wanted = stored(directory), self.wanted(case)
        assert found.keys() == wanted.keys(), name_of(case)
        bad = [name for name in wanted if not same_bits(found[name], wanted[name])]
        assert not bad, f"{name_of(case)}: on the disk: {bad}"

    def prove(self, cases: list[Case], at_once: int = 5) -> None:
        """Run cases, those of a world's size together, and compare."""
        for size in sorted({ranks(case) for case in cases}):
            here = [case for case in cases if ranks(case) == size]
            for first in range(0, len(here), at_once):  # a world answers within its time-out
                some = here[first : first + at_once]
                saved = [self.folder / f"{size}-{first + i}" for i in range(len(some))]
                jobs = [(c, str(p), self.canonical(c)) for c, p in zip(some, saved, strict=True)]
                results = self.world(size).run(save_and_load, jobs)
                for i, (case, path) in enumerate(zip(some, saved, strict=True)):
                    self.compare(case, [result[i] for result in results])
                    self.check_saved(case, path)
                    shutil.rmtree(path)

    def compare(self, case: Case, results: list[dict]) -> None:
        """Hold a case's losses to those before it."""
        losses = results[0]["losses"]
        assert all(result["losses"] == losses for result in results), name_of(case)
        every = sum(tensor.numel() for tensor in self.wanted(case).values())
        assert sum(result["elements"] for result in results) >= every
        same = self.bits.setdefault(sums(case), (losses, case))
        assert losses == same[0], f"not the bits of {name_of(same[1])}: {name_of(case)}"
        first = self.losses.setdefault(name_of(alone(case)), losses)
        assert losses == pytest.approx(first, rel=CLOSE[case["dtype"]]), name_of(case)
        assert losses[0] != losses[1]
        self.count += 1


@pytest.fixture(scope="module")
def prover(world, tmp_path_factory) -> Prover:
    return Prover(world, tmp_path_factory.mktemp("reshard"))


def sample(count: int, sizes: Sequence[int]) -> list[Case]:
    """Draw pairs of layouts whose bits must agree, from all those of some numbers of ranks."""
    groups: dict[tuple, list[Case]] = {}
    for case in every_case():
        if ranks(case) in sizes:
            groups.setdefault(sums(case), []).append(case)
    rng = random.Random(2)
    pairs = [rng.sample(group, 2) for group in groups.values() if len(group) > 1]
    return [case for pair in rng.sample(pairs, count // 2) for case in pair]


def test_a_sample_of_the_layouts(prover, capsys):
    cases = sample(2, (2,))
    prover.prove(cases)
    with capsys.disabled():
        print(f"\n{2 * prover.count} cases: {prover.count} layouts save and load", end=" ")


@pytest.mark.prove
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_more_layouts(prover, size):
    cases = [case for case in every_case() if ranks(case) == size]
    prover.prove(random.Random(size).sample(cases, min(24, len(cases))))


def of_shared_heads(groups: int, dtype: str) -> list[Case]:
    """List layouts of up to 8 ranks of a model with few key/value heads, of two columns each."""
    base = dict(model=24, groups=groups, dtype=dtype, zero=0, sp=False, pp=1, dp=1, tied=False)
    tp, split = 2 * groups, dict(pp=2, schedule="zb-v", v=2)
    found = [base | dict(tp=size) for size in range(1, groups + 1) if groups % size == 0]
    found += [base | dict(tp=tp), base | dict(tp=tp, sp=True)]
    if tp < 8:
        found += [base | dict(tp=tp, **split), base | dict(tp=tp, sp=True, **split)]
        found += [base | dict(tp=tp, dp=2, zero=z, sp=z == 3) for z in range(4)]
    return found


@pytest.mark.prove
def test_layouts_whose_ranks_share_heads(prover):
    prover.prove([c for c in of_shared_heads(1, "bfloat16") if c["zero"] == 3 or c["tp"] == 1])


def pair(sizes: Sequence[int], rng: random.Random) -> list[Case]:
    """Draw two fp64 layouts of one model, whose sums are not the same to the bit."""
    some = [c for c in every_case() if ranks(c) in sizes and c["dtype"] == "float64"]
    one = rng.choice(some)
    others = [c for c in some if alone(c) == alone(one) and sums(c) != sums(one)]
    return [one, rng.choice(others)]


@pytest.mark.prove
@pytest.mark.parametrize("sizes, seeds", [(range(1, 9), range(1, 9))], ids=["many"])
def test_a_run_goes_on_in_any_other_layout(world, tmp_path, sizes, seeds):
    """Two steps here, two there: the losses of four steps on one rank."""
    straight: dict[str, list[float]] = {}
    for seed in seeds:
        one, other = pair(sizes, random.Random(seed))
        saved = [str(tmp_path / f"{seed} {i}") for i in range(2)]
        losses = []
        for case, load, save, at in ((one, "", saved[0], 0), (other, saved[0], saved[1], 2)):
            found = world(ranks(case)).run(go_on, case, load, save, range(at, at + 2))
            assert all(each == found[0] for each in found)
            losses += found[0]
        key = name_of(alone(one))
        if key not in straight:
            serial = canonical.build(Grid(), alone(one))
            straight[key] = train(serial, range(4))
        assert losses == pytest.approx(straight[key], rel=1e-10), (name_of(one), name_of(other))


def resumes(sizes: Sequence[int], count: int) -> list[tuple[Case, bool]]:
    """Draw layouts, every second one to be saved in the background."""
    some = [case for case in every_case() if ranks(case) in sizes]
    return [(case, i % 2 == 0) for i, case in enumerate(random.Random(7).sample(some, count))]


@pytest.mark.prove
@pytest.mark.parametrize(
    "cases",
    [resumes((2, 3, 4, 8), 8)],
    ids=["many"],
)
def test_a_run_goes_on_in_its_own_layout_as_if_it_had_never_stopped(world, tmp_path, cases):
    """Losses, weights, masters and moments, to the bit; also from a save behind the training."""
    for i, (case, behind) in enumerate(cases):
        found = world(ranks(case)).run(stop_and_go_on, case, str(tmp_path / str(i)), behind)
        assert all(len(set(losses)) == 4 for losses in found), name_of(case)
