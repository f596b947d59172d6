# SPDX-License-Identifier: Apache-2.0
"""The warm-up of a pipeline of experts: a step's collectives, even rows, the dry run's memory."""

import gc
import threading
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pretrain_llama
from forecast import dry_run
from forecast.recording import record
from mpu.comm.transport import Axis
from mpu.layers import dispatch
from mpu.layers.experts import Experts
from mpu.module_tracker import tensors_of
from mpu.overlap.choices import OverlapMap
from mpu.pipeline.schedules import forward_only
from tests.model.test_moe_parity import BASE
from tests.model.twin import config_of, micro_batches
from tests.sampling import sampled
from training.faults.monitor import FailureMonitor
from training.run.warm_up import run_chunks

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
    "capacity by position": dict(
        moe_expert_capacity_factor=1.25, moe_token_drop_policy="position"
    ),
    "padded": dict(
        moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True
    ),
    "all": dict(moe_router_topk=8, num_experts=8),
}  # fmt: skip
WAYS = ("alltoall", "allgather")


class Live(TorchDispatchMode):
    """Counts the bytes that live of what is made in it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tensors_of((*args, *(kwargs or {}).values()))}
        for tensor in tensors_of((out,)):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in given and key not in self.known:
                self.known[key] = weakref.ref(storage, lambda _, k=key, n=size: self.freed(k, n))
                self.now += size
                self.peak = max(self.peak, self.now)
        return out

    def freed(self, key: int, size: int) -> None:
        del self.known[key]
        self.now -= size


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


def threads_of_a_run(comm: Any, case: dict[str, Any]) -> tuple[list[dict[str, int]], set[Any]]:
    """Return how many threads run a forward and a backward of experts in a warm-up; how many others
    do in three steps and an evaluation after it, and how many threads the last step begins; and the
    threads that there are in the end.
    """
    config, seen = config_of(case), {"F": set[Any](), "B": set[Any]()}
    grid = comm.grid(case["tp"], case["cp"], case["pp"], ep=config.expert_model_parallel_size)
    run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())

    def gradient(grad: Any) -> None:
        seen["B"].add(threading.current_thread())

    def noted(module: Any, args: Any, out: Any) -> None:
        if isinstance(module, Experts):
            seen["F"].add(threading.current_thread())
            if out.requires_grad:
                out.register_hook(gradient)

    batches = micro_batches(case, grid.dp.rank)
    with torch.nn.modules.module.register_module_forward_hook(noted):
        run_chunks(run, *PROGRAM)
        warm = {kind: set(found) for kind, found in seen.items()}
        for _ in range(2):
            pretrain_llama.train_step(run, batches, 0.0)
        schedule = forward_only(run.schedule(len(batches)))
        pretrain_llama.run_schedule(run, schedule, batches, 1, "")
        before = set(threading.enumerate())
        pretrain_llama.train_step(run, batches, 0.0)
    begun = len(set(threading.enumerate()) - before)
    others = {kind: len(found - warm[kind]) for kind, found in seen.items()}
    counts = [{kind: len(found) for kind, found in warm.items()}, others | {"begun": begun}]
    return counts, set(threading.enumerate())


def threads_of(comm: Any, case: dict[str, Any]) -> list[Any]:
    """Return these numbers, and the names of the threads that come with a run and go with it."""
    before = set(threading.enumerate())
    counts, threads = threads_of_a_run(comm, case)
    gc.collect()
    for thread in threads - before:
        thread.join(20)
    return [*counts, {thread.name for thread in threads - before if not thread.is_alive()}]


@pytest.mark.prove
def test_a_warm_up_has_the_threads_of_the_steps(world: Any) -> None:
    """Where a forward overlaps a backward, on 4 ranks: ep 2 x pp 2. What is kept for each thread
    is made before the first message.
    """
    case = CASE | dict(moe=MOE, dispatch="alltoall", m=4, beside=True)
    for warm, steps, ended in world(4).run(threads_of, case):
        assert warm == {"F": 1, "B": 2} and steps == {"F": 0, "B": 0, "begun": 0}
        assert ended == {"weft-backward", "send-queue"}


def peaks(comm: Any, case: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return the peaks of a warm-up and of a step's micro-batch, the bytes of the largest weight
    and its gradient, and what the dry run states for the warm-up.
    """
    config = config_of(case)
    grid = comm.grid(case["tp"], case["cp"], case["pp"], ep=config.expert_model_parallel_size)
    run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
    with Live() as warm:
        run_chunks(run, *PROGRAM)
    batches = micro_batches(case, grid.dp.rank)
    run.sink.begin_step(1)
    with Live() as step:
        pretrain_llama.run_schedule(run, run.schedule(1), batches[:1], 1, "")
    run.sink.finish_grad_sync()
    largest = 2 * max(p.nbytes for p in run.model.parameters())
    gpu = replace(config, parallel=replace(config.parallel, device="cuda"))
    recording = record(gpu, pretrain_llama, [grid.pp.rank], member=grid.rank)[grid.pp.rank]
    stated = recording.warm_up - sum(recording.start.values())
    return warm.peak, step.peak, largest, stated


@pytest.mark.prove
def test_a_warm_up_lives_in_what_the_dry_run_states(world: Any) -> None:
    """A step's micro-batch, which chooses experts unevenly, and a weight with its gradient.

    Gloo's thread keeps what a finished exchange sent and received until Python lets it run: a
    rank may hold that much more.
    """
    moe = dict(num_experts=8, moe_router_topk=4, moe_ffn_hidden_size=128)
    case = CASE | dict(moe=moe, dispatch="alltoall", rows=8, m=2, s=64)
    case |= dict(sizes=dict(hidden_size=64, kv_channels=16, vocab_size=512))
    kept = 2 * 4 * 256 * 4 * 64  # two ways, fp32: tokens * experts a token * hidden_size
    for warm, step, largest, stated in world(4).run(peaks, case):
        assert warm < 1.15 * (step + largest) + kept
        assert 0.85 * stated < warm < 1.15 * stated + kept
    for warm, _, _, stated in world(4).run(peaks, case | dict(beside=True)):  # two overlap
        assert 0.85 * stated < warm < 1.15 * stated + kept


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
