# SPDX-License-Identifier: Apache-2.0
"""Seconds of a layout from records of few layers and micro-batches: those of a whole rehearsal."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

import pretrain_llama
from benchmarks import plan_clocks
from forecast.like_ranks import shortened
from forecast.planner.cluster import read_cluster
from forecast.planner.model import read_flags, read_model
from forecast.planner.played import (
    Play,
    Point,
    Unplayable,
    Worker,
    composed,
    prepared,
    without_negatives,
)
from forecast.planner.recorded import Recorded, play
from forecast.planner.table import breakdown
from forecast.rehearsal.clock import Timing
from mpu.zero.bucket_layout import automatic_size
from tools import plan
from training.run.pipeline_stages import rank_stages
from training.settings.pipeline_schedule import micro_batch_counts

SMALL = (
    "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 4 --vocab-size 32000 "
    "--untie-embeddings-and-output-weights"
)
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 3"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as found:
        yield found


def run_of(flags: str, cluster: str = "8xh100", model: str = SMALL) -> Recorded:
    return Recorded(read_model(model, 2048), read_cluster(cluster), flags)


def whole(run: Recorded, worker: Worker) -> Timing:
    """Return the time of a run from one record of all layers, and all micro-batches."""
    few = prepared(run.model, run.cluster, run.argv)
    job = {**few.jobs[0], "few": {"micro_batches": max(micro_batch_counts(run.config))}}
    worker.ask([job])
    answer = worker.answer()
    every = Play(few.config, few.cut, len(few.cut), few.again, few.device, [Point(0, 0)], [job])
    return composed(every, [{"points": answer["points"][-1:]}])


@pytest.mark.prove
@pytest.mark.parametrize(
    "flags",
    [
        f"{ZERO} {BLOCK} --micro-batch-size 2 --global-batch-size 160",
        f"{TP} {PP} {ZERO} --micro-batch-size 1 --global-batch-size 16",
        f"{TP} {PP} --num-virtual-stages-per-pipeline-rank 4 {ZERO} --micro-batch-size 1 "
        "--global-batch-size 32",
    ],
)
def test_few_layers_take_what_all_take(flags: str, worker: Worker) -> None:
    run = run_of(flags)
    (found,) = play([run], worker)
    assert found is run
    all_of_them = whole(run, worker)
    assert run.played.step_seconds == pytest.approx(all_of_them.step_seconds, rel=0.02)
    for one in (run.played, all_of_them):
        assert sum(breakdown(one).values()) == pytest.approx(one.step_seconds, rel=4e-3)
    assert run.played.mfu == pytest.approx(all_of_them.mfu, rel=0.02)


def test_layers_that_differ_are_recorded_with_all_of_them() -> None:
    """And buckets of few layers are as large as those of all."""
    alike, few = run_of(f"{ZERO} --micro-batch-size 1 --global-batch-size 64"), run_of("")
    few = replace(few, model=read_model(f"{SMALL} --num-layers 1", 2048))
    both = prepared(alike.model, alike.cluster, alike.argv)
    assert len(both.points) == 2 and len(both.jobs) == 2
    size = both.jobs[0]["few"]["bucket"]
    numbers = 8 * (1024 * (1024 + 2 * 512 + 1024) + 3 * 1024 * 2816 + 2 * 1024)
    assert size == pytest.approx(automatic_size(numbers + 2 * 32000 * 1024), rel=0.01)
    assert prepared(few.model, few.cluster, few.argv).points == [Point(0, 0)]
    muon = replace(alike, flags=f"{alike.flags} --optimizer muon")  # whose matrices have owners
    assert prepared(muon.model, muon.cluster, muon.argv).points == [Point(0, 0)]


@pytest.mark.parametrize(
    "flags",
    [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
        f"{PP} --num-layers-per-virtual-pipeline-stage 2",
        f"{PP} --pipeline-schedule zb-v",
        "--train-iters 10000 --lr-warmup-iters 2000 --lr-decay-iters 10000",
    ],
)
def test_a_users_own_flags_are_those_that_are_recorded(flags: str) -> None:
    """The run is read as a whole; it is cut to few layers afterwards."""
    run = run_of(f"{flags} --micro-batch-size 1 --global-batch-size 64")
    plan = prepared(run.model, run.cluster, run.argv)
    config, size = run.config, plan.config.parallel.pipeline_model_parallel_size
    for job in plan.jobs:
        whole = read_flags(job["argv"], job["world"])
        assert whole.optimizer == config.optimizer and whole.parallel == config.parallel
        few = shortened(whole, **job["few"])
        ranks = [rank_stages(few, pretrain_llama.model_provider, rank) for rank in range(size)]
        layers = job["few"]["layers"] or plan.cut[0]
        assert [len(s.layers) for own in ranks for s in own] == [layers] * size * plan.chunks
        assert micro_batch_counts(few) == [job["few"]["micro_batches"]]


@pytest.mark.prove
def test_more_questions_than_a_pipe_holds_are_answered(worker: Worker) -> None:
    run = run_of("--micro-batch-size 1 --global-batch-size 64")
    job = prepared(run.model, run.cluster, run.argv).jobs[0]
    for _ in range(150):
        worker.ask([{**job, "argv": [*job["argv"], "--no-" + "x" * 2000]}])
    assert all("--no-xx" in worker.answer()["error"] for _ in range(150))


def test_no_part_is_below_zero() -> None:
    assert without_negatives({"dp": 5.0, "tp": 1.0, "host link": -2.0}) == {
        "dp": 3.0, "tp": 1.0, "host link": 0.0,
    }  # fmt: skip


@pytest.mark.prove
def test_a_record_that_fails_says_why(worker: Worker) -> None:
    run = run_of("--micro-batch-size 1 --global-batch-size 64")
    few = prepared(run.model, run.cluster, run.argv)
    job = {**few.jobs[0], "argv": [*few.jobs[0]["argv"], "--no-such-flag"]}
    with pytest.raises(Unplayable, match="UsageError: .*--no-such-flag"):
        worker.ask([job, few.jobs[1]])
        composed(few, [worker.answer() for _ in few.jobs])


@pytest.mark.prove
def test_a_worker_that_has_died_is_said() -> None:
    with pytest.raises(Unplayable), Worker() as ended:
        ended._process.kill()
        ended.ask([{"argv": []}])
        ended.answer()


@pytest.mark.prove
@pytest.mark.parametrize(
    "only",
    ["--zero-stage 3", "ethernet", "zb-v", "Mixtral", "muon", "overlap ring --micro", "Qwen3"],
)
def test_plan_and_rehearsal_have_the_same_seconds(only: str) -> None:
    (row,) = plan_clocks.compared(only)
    assert abs(float(row[2].rstrip("%"))) < 2, row


@pytest.mark.prove
def test_why_prints_the_seconds_of_the_rehearsal(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{TP} {ZERO} --micro-batch-size 1 --global-batch-size 64"
    assert plan.main([SMALL, "8xh100", "--seq-length", "2048", "--why", flags]) == 0
    step = re.search(r"^step +([\d.]+)", capsys.readouterr().out, re.MULTILINE)
    timing = plan_clocks.rehearsed(run_of(flags))
    assert step and float(step[1]) == pytest.approx(timing.step_seconds, rel=0.02)
