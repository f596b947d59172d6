# SPDX-License-Identifier: Apache-2.0
"""Runs over context-parallel ranks log what one rank does, and any layout resumes any other's.

The run of docs/long_context.md is one of them, with the lengths that stand there. The others'
samples are packed documents of any length; evaluations, replica checks and the norm of the
weights are on. fp32, to 1e-5.
"""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cached_runs import CachedRuns
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
WAYS = [
    Way(2, "--cp-comm-type all_gather"),
    Way(2, "--cp-comm-type a2a --recompute-granularity full"),
    Way(4, "--cp-comm-type p2p --no-shared-memory"),
    Way(4, "--cp-comm-type a2a"),
    Way(2, f"--zero-stage 3 --overlap-param-gather {TP}", 2),
    Way(2, f"--cp-comm-type p2p --zero-stage 1 {PP}", 2),
    Way(2, "--zero-stage 2 --num-distributed-optimizer-instances 2", 2),
]


class Runs(CachedRuns):
    """Runs of `MODEL`."""

    def run(self, way: Way, flags: str = DOCUMENTS, load: Path | None = None) -> Result:
        """Return a run to the last step, from the first or from what was saved at AT."""
        words = f"{MODEL} --context-parallel-size {way.cp} {way.more} {flags}"
        return self.once(way.cp * way.others, words, load)


@pytest.fixture(scope="module")
def runs(launcher: Launcher) -> Runs:
    return Runs(launcher, AT)


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


@pytest.mark.prove
def test_the_run_of_the_page(launcher: Launcher) -> None:
    """Its own commands: documents of 4,096 tokens on one rank, then rows of 32,768 on four ranks,
    and on one, which also loads what four saved.
    """
    page = (Path(__file__).parent.parent / "docs/long_context.md").read_text()
    page = page[page.index("## A run to try") :]
    (flags,) = re.findall(r'FLAGS="(.*?)"', page, re.DOTALL)
    (long,) = re.findall(r'LONG="(.*?)"', page, re.DOTALL)
    saved, results = dict[str, Path](), list[Result]()

    def run(words: str, **job: bool) -> Result:
        ranks = 4 if "--context-parallel-size 4" in words else 1
        for name, folder in saved.items():
            words = words.replace(f"--load {name} ", f"--load {folder} ")
        result = launcher.run(ranks, shlex.split(words), limit=1800, **job)
        assert result.codes == [0] * ranks, [result.said(rank) for rank in range(ranks)]
        return result

    for command in re.findall(r"pretrain_llama.py (\$FLAGS .*)", page):
        words = command.replace("$LONG", long).replace("$FLAGS", flags)
        words = re.sub(r"--log-json \S+", "", words)
        (name,) = re.findall(r"--save (\S+)", words)
        results.append(run(words.replace(f"--save {name}", "--save {dir}/saved")))
        saved[name] = results[-1].folder / "saved"
    short, four, one = results
    assert "8,192 of a sample's 32,768 tokens on each of 4 ranks" in four.said(0, "out")
    assert len(rows(short)) == len(rows(four)) == 20
    check_rows(rows(four), rows(one), 1e-5)
    more = f"{flags} {long} --load {four.folder}/saved --save {{dir}}/saved --train-iters 21"
    back = run(more.replace("--finetune", ""), save_first=True)
    check_equal(tensors(four.folder / "saved", 20), tensors(back.folder / "saved", 20))
    assert [row[0] for row in rows(back)] == [21]
    for name, result in (("4,096", short), ("32,768, cp 4", four), ("cp 1", one), ("", back)):
        print(name, *(f"{row['loss']:.7f}" for row in result.rows() if "loss" in row))
