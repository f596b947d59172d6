# SPDX-License-Identifier: Apache-2.0
"""The warm-up of a pipeline of experts: a step's collectives, even rows, the dry run's memory."""

import gc
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import pretrain_llama
from forecast import dry_run
from forecast.recording import record
from mpu.comm.transport import Axis
from mpu.layers import dispatch
from mpu.overlap.choices import OverlapMap
from tests.model.test_moe_parity import BASE
from tests.model.twin import config_of, micro_batches
from tests.sampling import sampled
from training.faults.monitor import FailureMonitor
from training.run.warm_up import Scratch, run_chunks

PROGRAM = (pretrain_llama.model_provider, pretrain_llama.run_schedule, OverlapMap("none"))
CASE = BASE | dict(pp=2, dp=2, ep=2, schedule="1f1b", m=2, sp=False)
MOE = dict(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=12)
SIGMOID = dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
ROUTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pre-softmax, one": dict(moe_router_topk=1, moe_router_pre_softmax=True),
    "sigmoid, bias, shared": SIGMOID | dict(moe_shared_expert_intermediate_size=10),
    "groups": SIGMOID | dict(moe_router_num_groups=4, moe_router_group_topk=1),
    "losses": dict(
        moe_router_load_balancing_type=("seq_aux_loss", "lagged_global_aux_loss"),
        moe_aux_loss_coeff=(0.3, 0.5), moe_z_loss_coeff=1e-3,
    ),
    "capacity": dict(moe_expert_capacity_factor=1.0),
    "padded": dict(
        moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True
    ),
    "all": dict(moe_router_topk=8, num_experts=8),
}  # fmt: skip
WAYS = ("alltoall", "allgather")


def watched(patch: pytest.MonkeyPatch) -> tuple[Counter, list[tuple[int, ...]]]:
    """Return what is counted from here on: collectives of layers, and the rows of each plan."""
    heard: Counter = Counter()
    rows: list[tuple[int, ...]] = []
    start = Axis.start

    def noted(axis: Axis, verb: str, *given: Any, **more: Any) -> Any:
        label = more["label"]
        if not axis.name.startswith("pp") and label.phase != "grad sum":
            who = label.who if isinstance(label.who, str) else type(label.who).__name__
            heard[axis.name, verb, who, label.phase] += 1
        return start(axis, verb, *given, **more)

    patch.setattr(Axis, "start", noted)
    for kind in (dispatch.AllGather, dispatch.AllToAll):

        def plan(self: Any, *given: Any, made: Any = kind.plan) -> Any:
            found = made(self, *given)
            rows.append(found.counts.each)
            return found

        patch.setattr(kind, "plan", plan)
    return heard, rows


def looked_at(comm: Any, cases: list[dict[str, Any]]) -> list[Any]:
    """Return of each case the collectives of warm-up and step, and the warm-up's rows."""
    found = []
    for case in cases:
        config = config_of(case)
        grid = comm.grid(case["tp"], case["cp"], case["pp"], ep=config.expert_model_parallel_size)
        run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
        batches = micro_batches(case, grid.dp.rank)
        with pytest.MonkeyPatch.context() as patch:
            warm, rows = watched(patch)
            run_chunks(run, *PROGRAM)
        assert not [one for one in gc.get_objects() if isinstance(one, Scratch)], "its memory stays"
        with pytest.MonkeyPatch.context() as patch:
            step, _ = watched(patch)
            run.sink.begin_step(len(batches))
            pretrain_llama.run_schedule(run, run.schedule(len(batches)), batches, 1, "")
            run.sink.finish_grad_sync()
        found.append((dict(warm), dict(step), rows))
    return found


@pytest.mark.parametrize("router", sampled(list(ROUTERS), 4))
def test_a_warm_up_is_as_a_step(world: Any, router: str) -> None:
    """Its collectives are those of a step's forward and backward, and all experts have as many
    rows: 4 ranks, ep 2 x pp 2.
    """
    cases = [CASE | dict(moe=MOE | ROUTERS[router], dispatch=way) for way in WAYS]
    results = world(4).run(looked_at, cases)
    for number, case in enumerate(cases):
        exchange = ("ep", "all_to_all") if case["dispatch"] == "alltoall" else ("ep", "all_gather")
        for rank in results:
            warm, step, rows = rank[number]
            assert warm == step and any(key[:2] == exchange for key in warm), case
            assert len(rows) == 2 * 2 and len({*sum(rows, ())}) == 1 and sum(rows[0]), (case, rows)


@pytest.mark.prove
def test_the_dry_run_states_what_a_start_needs() -> None:
    """On GPUs the last rank of a pipeline holds one micro-batch in a step, and in the warm-up that,
    with weights and gradients as large as the head's.
    """
    case = BASE | dict(pp=2, schedule="1f1b", m=2, sp=False, layers=2, zero=0, moe=MOE)
    case |= dict(sizes=dict(vocab_size=60_000))
    config = config_of(case)
    config = replace(config, batch=replace(config.batch, train_iters=4))
    for device, stated in (("cuda", True), ("cpu", False)):
        run = replace(config, parallel=replace(config.parallel, device=device))
        lines = dry_run.report(run, pretrain_llama).splitlines()
        assert any("at the start" in line for line in lines) == stated
    gpu = replace(config, parallel=replace(config.parallel, device="cuda"))
    recording = record(gpu, pretrain_llama, [1])[1]
    kinds = dry_run.memory(gpu, recording)
    head = 60_000 * config.model.hidden_size * (8 + 8)
    over = dry_run.at_start(gpu, recording) - sum(kinds.values())
    assert over == pytest.approx(head, rel=0.01)
