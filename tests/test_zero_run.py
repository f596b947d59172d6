# SPDX-License-Identifier: Apache-2.0
"""Whole runs at every ZeRO level log and save the same.

They do so over any number of ranks. All train on the same samples, are evaluated on the way and log
the norm of the weights, in fp32 and bf16, with one thread. The checkpoints are in model
coordinates, so they are compared as whole tensors. That any level loads what any other saved is in
tests/training/checkpoint/test_reshard.py.
"""

from typing import Any, NamedTuple

import pytest

from tests.cached_runs import CachedRuns
from tests.launcher import Launcher, Result
from tests.saved import check_equal, tensors

STEPS, AT = 5, 3  # it saves after both
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


AHEAD = "--overlap-param-gather"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
BF16, FP32 = "--bf16", ""


class Runs(CachedRuns):
    """Runs of `MODEL`."""

    def run(self, way: Way, dtype: str) -> Result:
        """Return a run to the last step."""
        words = f"{MODEL} --zero-stage {way.level} {way.more} {dtype}"
        return self.once(way.dp * way.others, words, None)


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
