# SPDX-License-Identifier: Apache-2.0
"""Whole runs at every ZeRO level log the same, and each level resumes any other's checkpoints.

They do so over any number of ranks. All train on the same samples, are evaluated on the way and log
the norm of the weights, in fp32 and bf16, with one thread. The checkpoints are in model
coordinates, so they are compared as whole tensors.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cached_runs import CachedRuns
from tests.launcher import Launcher, Result
from tests.saved import check_equal, tensors

LATER = pytest.mark.prove
STEPS, AT = 5, 3  # a run is resumed after step AT
MODEL = f"""
    --mock-data --vocab-size 203 --num-layers 3 --hidden-size 40 --num-attention-heads 4
    --seq-length 24 --num-workers 0 --device cpu --train-iters {STEPS} --lr 1e-2 --clip-grad 0.5
    --global-batch-size 8 --eval-interval 2 --eval-iters 1 --log-interval 1 --log-params-norm
    --ddp-bucket-size 9000 --overlap-grad-reduce --save-interval {AT} --save {{dir}}/saved
"""
KEYS = ("iteration", "consumed_samples", "loss", "grad_norm", "params_norm", "validation_loss")


class Way(NamedTuple):
    """How a run is shared: ZeRO level, data-parallel ranks, and other flags."""

    level: int
    dp: int
    more: str = ""
    others: int = 1  # ranks along other axes


AHEAD, GROUPS = "--overlap-param-gather", "--num-distributed-optimizer-instances 2"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
BF16, FP32 = "--bf16", ""


class Runs(CachedRuns):
    """Runs of `MODEL`."""

    def run(self, way: Way, dtype: str, load: Path | None = None) -> Result:
        """Return a run to the last step, from the first or from what was saved at AT."""
        words = f"{MODEL} --zero-stage {way.level} {way.more} {dtype}"
        return self.once(way.dp * way.others, words, load)


@pytest.fixture(scope="module")
def runs(launcher: Launcher) -> Runs:
    return Runs(launcher, AT)


def rows(result: Result, after: int = 0) -> list[tuple[Any, ...]]:
    """Return what the log says of each step, evaluations included."""
    found = [tuple(row.get(key) for key in KEYS) for row in result.rows()]
    return [row for row in found if row[0] > after]


def check_rows(here: list[tuple[Any, ...]], there: list[tuple[Any, ...]], digits: float) -> None:
    """Compare the numbers of two logs: to the bit, or within a relative error."""
    assert len(here) == len(there) > 0
    for mine, theirs in zip(here, there, strict=True):
        assert [v is None for v in mine] == [v is None for v in theirs]
        values = [v for v in mine if v is not None], [v for v in theirs if v is not None]
        assert values[0] == (pytest.approx(values[1], rel=digits) if digits else values[1])


@pytest.mark.prove
@pytest.mark.parametrize(
    "way, dtype",
    [
        (Way(3, 2, AHEAD), BF16),
        (Way(3, 2), FP32),
        (Way(3, 4, AHEAD), FP32),
        (Way(2, 2, AHEAD), BF16),
        (Way(1, 2, AHEAD), FP32),
        (Way(3, 2, f"{AHEAD} {TP}", 2), BF16),
        (Way(3, 2, f"{AHEAD} {PP}", 2), FP32),
    ],
)
def test_a_level_logs_and_saves_what_level_0_does(runs: Runs, way: Way, dtype: str) -> None:
    """Losses, norms of gradients and weights, evaluations between the steps, checkpoints."""
    plain = runs.run(Way(0, way.dp, way.more.replace(AHEAD, ""), way.others), dtype)
    shared = runs.run(way, dtype)
    found = rows(plain)
    assert [row[0] for row in found if row[-1] is not None][:2] == [2, 4]
    assert len({row[2] for row in found if row[2] is not None}) == STEPS
    assert all(row[4] > 0 for row in found if row[2] is not None)
    assert rows(shared) == found
    for step in (AT, STEPS):
        check_equal(*(tensors(run.folder / "saved", step) for run in (plain, shared)))


WAYS = [Way(0, 1), Way(0, 2), Way(1, 2, AHEAD), Way(2, 2), Way(3, 2, AHEAD)]
WAYS += [Way(0, 4), Way(1, 4, GROUPS), Way(2, 4), Way(3, 4), Way(3, 4, f"{GROUPS} {AHEAD}")]
PAIRS = [(one, other) for i, one in enumerate(WAYS) for other in (WAYS[i - 3], WAYS[i - 8])]
PAIRS += [(one, other) for one, other in zip(WAYS[1:5], WAYS[4:0:-1], strict=True)]
PAIRS += [(Way(3, 2, TP, 2), Way(2, 4)), (Way(1, 2, PP, 2), Way(3, 2, TP, 2))]
PAIRS += [(Way(3, 2), Way(3, 2, PP, 2)), (Way(3, 2, f"{PP} {AHEAD}", 2), Way(0, 1))]
CASES = [pytest.param(*pair, dtype, marks=LATER) for pair in PAIRS for dtype in (BF16, FP32)]


@pytest.mark.prove
@pytest.mark.parametrize(
    "first, then, dtype",
    [(Way(0, 2), Way(3, 2, AHEAD), BF16), *CASES],
)
def test_what_a_level_saves_any_other_takes_up(
    runs: Runs, first: Way, then: Way, dtype: str
) -> None:
    """All that is loaded is all that was saved, to the bit, and training continues with it: to the
    bit where as many ranks share the batch, else like the lowest level from the same
    checkpoint."""
    undisturbed = runs.run(first, dtype)
    saved = undisturbed.folder / "saved"
    resumed = runs.run(then, dtype, saved)
    state = tensors(saved, AT)
    kinds = {"exp_avg", "exp_avg_sq"} | ({"master"} if dtype else set())
    assert all(any(kind in name for name in state) for kind in kinds), sorted(state)
    check_equal(state, tensors(resumed.folder / "saved", AT))
    alike = sums_of(first) == sums_of(then)
    check_rows(rows(resumed, AT), rows(undisturbed, AT), 0 if alike else 1e-2 if dtype else 1e-4)
    if not alike:
        plain = Way(int(GROUPS in then.more), then.dp, then.more.replace(AHEAD, ""), then.others)
        undisturbed = runs.run(plain, dtype, saved)
        assert rows(resumed) == rows(undisturbed)
    check_equal(*(tensors(run.folder / "saved", STEPS) for run in (undisturbed, resumed)))


def sums_of(way: Way) -> tuple[Any, ...]:
    """Return what the bits of a run depend on: not on its level, nor on a pipeline."""
    return way.dp, GROUPS in way.more, TP in way.more
