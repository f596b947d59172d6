# SPDX-License-Identifier: Apache-2.0
"""Runs over context-parallel ranks log what one rank does, and any layout resumes any other's.

Their samples are packed documents of any length; evaluations, replica checks and the norm of the
weights are on. fp32, to 1e-5.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.launcher import Launcher, Result
from tests.saved import check_equal, tensors
from tests.test_zero_run import check_rows, rows

LATER = pytest.mark.prove
STEPS, AT = 5, 3  # a run is resumed after step AT
MODEL = f"""
    --mock-data --vocab-size 53 --num-layers 4 --hidden-size 40 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --seq-length 48 --num-workers 1 --device cpu
    --train-iters {STEPS} --lr 1e-2 --clip-grad 0.5 --global-batch-size 4 --eval-interval 2
    --eval-iters 1 --log-interval 1 --log-params-norm --ddp-bucket-size 9000 --overlap-grad-reduce
    --check-replicas 2 --save-interval {AT} --save {{dir}}/saved
"""
DOCUMENTS = " --reset-position-ids --reset-attention-mask --eod-mask-loss"


class Way(NamedTuple):
    """How a run is laid out: context-parallel ranks, other flags, ranks along other axes."""

    cp: int
    more: str = ""
    others: int = 1


ONE = Way(1)
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP = "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v"
A2A_P2P = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
EACH = "--cp-comm-type p2p all_gather a2a p2p"
WAYS = [
    Way(2, "--cp-comm-type all_gather"),
    Way(2, "--cp-comm-type a2a --recompute-granularity full"),
    Way(4, "--cp-comm-type p2p --no-shared-memory"),
    Way(4, A2A_P2P),
    Way(2, f"{EACH} --zero-stage 3 --overlap-param-gather {TP}", 2),
    Way(2, f"--cp-comm-type p2p --zero-stage 1 {PP}", 2),
    Way(2, "--zero-stage 2 --num-distributed-optimizer-instances 2", 2),
    Way(2, "--cp-comm-type all_gather --checksum-messages"),
]


class Runs:
    """Runs of the program; one that many compare with is made once."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.made: dict[tuple[Any, ...], Result] = {}

    def run(self, way: Way, flags: str = DOCUMENTS, load: Path | None = None) -> Result:
        """Return a run to the last step, from the first or from what was saved at AT."""
        key = (way, flags, load)
        if key not in self.made:
            words = f"{MODEL} --context-parallel-size {way.cp} {way.more} {flags}"
            words += f" --load {load} --ckpt-step {AT}" if load else ""
            count = way.cp * way.others
            result = self.launcher.run(count, words.split(), save_first=bool(load))
            assert result.codes == [0] * count, [result.said(rank) for rank in range(count)]
            self.made[key] = result
        return self.made[key]


@pytest.fixture(scope="module")
def runs(launcher: Launcher) -> Runs:
    return Runs(launcher)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=LATER) for way in (Way(2, "--zero-stage 1"), *WAYS)]
)
def test_a_run_logs_what_one_rank_does_and_each_resumes_the_other(runs: Runs, way: Way) -> None:
    one, several = runs.run(ONE), runs.run(way)
    check_rows(rows(several), rows(one), 1e-5)
    assert f"on each of {way.cp} ranks, --cp-comm-type" in several.said(0, "out")
    saved = several.folder / "saved"
    back = runs.run(ONE, load=saved)
    check_equal(tensors(saved, AT), tensors(back.folder / "saved", AT))
    check_rows(rows(back, AT), rows(one, AT), 1e-5)
    there = runs.run(way, load=one.folder / "saved")
    check_equal(tensors(one.folder / "saved", AT), tensors(there.folder / "saved", AT))
    check_rows(rows(there, AT), rows(one, AT), 1e-5)


@pytest.mark.prove
def test_rows_without_documents(runs: Runs) -> None:
    for way in WAYS[:4]:
        check_rows(rows(runs.run(way, "")), rows(runs.run(ONE, "")), 1e-5)
