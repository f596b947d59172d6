# SPDX-License-Identifier: Apache-2.0
"""Ranks that share an optimizer: one is killed anywhere in a step, or its gradient is no number.

The short form takes a drawn sample of (place, level, ranks, victim), the long form takes all.
"""

import signal
from typing import Any

import pytest
import torch

import pretrain_llama
from tests.faults.small_run import STEPS, Ranks, check_blame, fault_during
from tests.launcher import Launcher, Result
from tests.model.twin import config_of, micro_batches
from tests.saved import check_equal, tensors
from training.faults.monitor import FailureMonitor
from training.settings.update_rules import optimizer_groups

LATER = pytest.mark.prove
FLAGS = "--num-workers 0 --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
HEARD = {"beat": 0.1}  # seconds between a rank's words on what it is doing
SOON = 15.0  # seconds
FORWARD = "F chunk 0 micro-batch 1 in stage 0 of iteration 3"
BETWEEN = "BW chunk 0 micro-batch 0 in stage 0 of iteration 3"
BACKWARD = "BW chunk 0 micro-batch 1 in stage 0 of iteration 3"
EVALUATION = "F chunk 0 micro-batch 0 in stage 0 of the evaluation after iteration 2"
SUMS, UPDATE = "the gradient sums of iteration 3", "the update of iteration 3"
EACH = " --zero-reduce-each-microbatch"
PLACES = {  # name: (what it is doing, point, call, levels, flags)
    "weights used in forward": (FORWARD.replace("1", "0"), "use of a weight", 1, "0123", ""),
    "weights gathered in forward": (FORWARD, "gather of a block", 1, "3", ""),
    "weights gathered in backward": (BACKWARD, "gather of a block", 1, "3", ""),
    "a bucket leaves in backward": (BACKWARD, "bucket leaves", 2, "0123", ""),
    "a bucket's sum in backward": (BACKWARD, "bucket goes on", 1, "0123", ""),
    "a sum of one micro-batch": (BETWEEN, "bucket goes on", 1, "23", EACH),
    "between micro-batches": (BETWEEN, "action", 1, "0123", ""),
    "the last sums": (SUMS, "bucket goes on", 1, "0123", ""),
    "the norm's gather": (UPDATE, "gather of the norm", 1, "123", ""),
    "the update": (UPDATE, "AdamW", 1, "0123", ""),
    "the gather after the update": (UPDATE, "gather of the weights", 1, "12", ""),
    "the weights' norm": (UPDATE, "gather of the norm", 2, "3", " --log-params-norm"),
    "an evaluation": (EVALUATION, "gather of a block", 1, "3", ""),
}
KILLS = [
    (name, level, count, count - 1 if n % 3 else 0)
    for n, (name, (_, _, _, levels, _)) in enumerate(PLACES.items())
    for level, count in zip(map(int, levels[n % 2 :: 2] or levels), (2, 4), strict=False)
]


@pytest.fixture
def ranks(launcher: Launcher) -> Ranks:
    return Ranks(launcher)


@pytest.mark.prove
@pytest.mark.parametrize("place, level, count, victim", KILLS)
def test_a_killed_rank_is_named_with_what_it_was_doing(
    ranks: Ranks, place: str, level: int, count: int, victim: int
) -> None:
    doing, point, call, _, more = PLACES[place]
    fault = fault_during(doing, point, victim, "kill", call)
    flags = f"{FLAGS} --zero-stage {level}{more}"
    result = ranks.run(count, 1, fault, flags=flags, monitor=HEARD)
    assert result.codes[victim] == -signal.SIGKILL, "the fault was never reached"
    check_blame(result, victim, "the process died (killed?)")
    for survivor in set(range(count)) - {victim} if victim else ():  # rank 0 had the coordinator
        assert result.said(survivor).splitlines()[-1].endswith(f" s before: {doing}")
    assert max(result.ended) - result.ended[victim] < SOON


SIZES = dict(sp=False, recompute=None, tied=True, m=2, rows=8, clip=0.1, lr=1e-2, bucket=500)
WAYS = [
    dict(zero=0),
    dict(zero=1, gather=True),
    dict(zero=2, dtype="bfloat16"),
    dict(zero=3, gather=True, dtype="bfloat16"),
    dict(zero=0, dtype="bfloat16", overlap=False),
    dict(zero=1, dtype="bfloat16", main="bf16", wire=True),
    dict(zero=2, each=True),
    dict(zero=3, overlap=False, masks=True, offload=True),
]
PIPELINE = dict(pp=2, schedule="interleaved", v=2, layers=8)
BAD = 2  # the step whose gradient is spoilt


def spoil_gradient(run: pretrain_llama.Run, value: float) -> None:
    """Write a value into this rank's own gradient, under backward."""
    sink, done, left = run.sink, run.sink.register_grad_ready, [1]

    def spoilt(param: torch.nn.Parameter) -> None:
        if left[0]:
            sink.main_grad(param).view(-1)[-1] = value
        left[0] = 0
        done(param)

    sink.register_grad_ready = spoilt


def spoil_sum(run: pretrain_llama.Run, value: float) -> None:
    """Write a value into the part of a complete sum that this rank owns.

    Ranks that hold the same sum (all at level 0, one of each instance of the optimizer) do it
    together: the sum that they share is what has gone wrong.
    """
    sink, finish = run.sink, run.sink.finish_grad_sync

    def spoilt() -> None:
        finish()
        bucket = next(b for b in sink.buckets if list(b.owned()))
        low = next(bucket.owned())[1]
        bucket.grad_shard[low - bucket.low] = value

    sink.finish_grad_sync = spoilt


def state(run: pretrain_llama.Run) -> list[torch.Tensor]:
    """Copy all that an update may change on this rank; the whole weights where it keeps them."""
    run.sink.wait_for_weights()
    found = [b.param_shard if b.weights is None else b.weights for b in run.sink.buckets]
    found += run.optimizer.masters
    found += [values for _, _, _, values in run.optimizer.named_state()]
    return [tensor.clone() for tensor in found]


def train(comm: Any, case: dict, steps: list[int], spoil: Any = None, value: float = 0) -> dict:
    """Take the steps; in step BAD spoil something on the last rank."""
    grid = comm.grid(case["tp"], pp=case.get("pp", 1), instances=case.get("instances", 1))
    run = pretrain_llama.build(config_of(case), grid, torch.device("cpu"), FailureMonitor())
    if case.get("offload"):  # on a CPU the flag alone does nothing
        how = dict(clip=case["clip"], cpu_offload=True)
        groups = optimizer_groups(run.config)
        run.optimizer = pretrain_llama.Optimizer(run.model, run.sink, grid, groups, **how)
    found, kept = [], True
    for step in steps:
        before, updates = state(run), run.optimizer.steps
        last = grid.dp_cp_shard.rank == grid.dp_cp_shard.size - 1 or not case["zero"]
        if step == BAD and (spoil is spoil_sum and last or comm.rank == comm.size - 1):
            spoil(run, value)
        _, _, found_inf = pretrain_llama.train_step(
            run, micro_batches(case, grid.dp.rank, step), case["lr"]
        )
        run.sink.__dict__.pop("register_grad_ready", None)
        run.sink.__dict__.pop("finish_grad_sync", None)
        found.append(found_inf.item())
        if found[-1]:
            kept = kept and run.optimizer.steps == updates
            kept = kept and all(map(torch.equal, before, state(run)))
    return {"found": found, "kept": kept, "updates": run.optimizer.steps, "end": state(run)}


def train_spoilt(comm: Any, case: dict, places: list[tuple[str, float]]) -> list[Any]:
    """Compare runs with a spoilt step with the one in which it never was."""
    made, want = [], train(comm, case, [0, 1, 3])
    assert want["found"] == [0.0, 0.0, 0.0] and want["updates"] == 3
    for place, value in places:
        spoil = {"gradient": spoil_gradient, "sum": spoil_sum}[place]
        got = train(comm, case, [0, 1, BAD, 3], spoil, value)
        same = all(map(torch.equal, got["end"], want["end"]))
        made.append((got["found"], got["kept"], got["updates"], same))
    return made


NAN, INF = float("nan"), float("inf")


GRADIENT, SUM = ("gradient", NAN), ("sum", INF)


@pytest.mark.parametrize(
    "size, more, ways, places",
    [
        (2, {}, WAYS[:1], [GRADIENT]),
        (2, {}, WAYS[3:4], [SUM]),
        pytest.param(2, {}, WAYS, [GRADIENT, ("gradient", INF)], marks=LATER),
        pytest.param(2, {}, WAYS, [SUM], marks=LATER),
        pytest.param(4, {}, WAYS, [GRADIENT], marks=LATER),
        pytest.param(4, dict(instances=2), WAYS[1:4], [GRADIENT, SUM], marks=LATER),
        pytest.param(4, dict(tp=2, sp=True), WAYS, [GRADIENT], marks=LATER),
        pytest.param(4, PIPELINE, WAYS[:6], [GRADIENT], marks=LATER),
    ],
)
def test_a_step_with_a_nan_in_one_rank_is_as_if_it_had_never_been(
    world, size, more, ways, places
) -> None:
    """Every rank finds it in that step; no weight, master, moment or count of updates changes, and
    the steps after it go on to the bit like those of a run without it."""
    for way in ways:
        case = SIZES | dict(tp=1, dtype="float32") | way | more
        case["dp"] = size // case["tp"] // case.get("pp", 1)
        for outcomes in world(size).run(train_spoilt, case, places):
            assert outcomes == [([0.0, 0.0, 1.0, 0.0], True, 3, True)] * len(places), case


def run_spoilt(
    ranks: Ranks, level: int, on_nan: str, how: str, count: int, more: str = ""
) -> Result:
    fault = fault_during(BACKWARD, "backward", count - 1, how)
    flags = f"{FLAGS} --bf16 --zero-stage {level} --on-nan {on_nan}{more}"
    return ranks.run(count, 1, fault, flags=flags)


@pytest.mark.parametrize(
    "level, count, how",
    [pytest.param(z, 2, how, marks=LATER) for z in range(4) for how in ("nan", "inf")]
    + [pytest.param(z, 4, "inf", marks=LATER) for z in range(4)],
)
def test_a_nan_stops_the_run_one_step_later(ranks: Ranks, level: int, count: int, how: str) -> None:
    result = run_spoilt(ranks, level, "stop", how, count, " --save-interval 2")
    assert result.codes == [1] * count
    message = (
        "the gradient norm was not finite at iteration 3: that update was skipped on every rank"
    )
    for rank in range(count):
        (line,) = result.said(rank).splitlines()
        assert line.startswith(f"pretrain_llama.py: {message}; in a rerun all values were")
    steps = [row["iteration"] for row in result.rows() if "loss" in row]
    assert steps == [1, 2, 3, 4] and result.saved() == ["step_00000002"]


@pytest.mark.prove
def test_a_nan_in_a_step_that_is_to_be_saved_is_told_and_not_saved(ranks: Ranks) -> None:
    result = run_spoilt(ranks, 3, "stop", "nan", 2, " --exit-interval 3")
    assert result.codes == [1, 1]
    for rank in range(2):
        assert "not finite at iteration 3" in result.said(rank)
    assert result.saved() == []


@pytest.mark.prove
@pytest.mark.parametrize("count, levels", [(2, [0, 3]), (4, range(4))])
def test_a_run_that_skips_a_nan_is_the_same_at_every_level(
    ranks: Ranks, count: int, levels: Any
) -> None:
    runs = [run_spoilt(ranks, level, "skip", "nan", count) for level in levels]
    for run in runs:
        assert run.codes == [0] * count, run.said(0)
        norms = [row["grad_norm"] for row in run.rows() if "loss" in row]
        assert [norm is None for norm in norms] == [step == 3 for step in range(1, STEPS + 1)]
        assert run.losses() == runs[0].losses()
        both = [tensors(each.folder / "saved", STEPS) for each in (run, runs[0])]
        check_equal(*both)
