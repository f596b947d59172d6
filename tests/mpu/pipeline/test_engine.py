# SPDX-License-Identifier: Apache-2.0
"""The engine in real runs: what it keeps, frees and reports, and where it needs no autograd."""

import functools
import time
import weakref

import pytest
import torch

import pretrain_llama
from mpu.gradients import WeightGradientQueue, run_deferred
from mpu.pipeline.engine import Engine
from mpu.pipeline.schedules import CHUNKS, build, forward_only
from mpu.pipeline.simulate import Costs, peak_activations, simulate
from tests.model.twin import config_of, micro_batches
from tests.sampling import sampled
from training.faults.monitor import FailureMonitor
from training.settings.pipeline_schedule import schedule_of


class LiveStorages:
    """Counts the storages that autograd saves, by a finaliser on each; those of before are not."""

    def __init__(self, run, batches):
        known = [*run.model.parameters(), *run.model.rope(None, 12)]
        known += [batch.labels for batch in batches]  # the loss keeps them as they are
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.sets: dict[object, int] = {}  # stage and micro-batch: storages alive
        self.bytes = self.most_bytes = self.most_sets = 0
        self.seen: dict[int, object] = {}
        self.now: object = None

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if at not in self.known and at not in self.seen and storage.nbytes():
            self.seen[at] = self.now
            self.sets[self.now] = self.sets.get(self.now, 0) + 1
            self.bytes += storage.nbytes()
            self.most_bytes = max(self.most_bytes, self.bytes)
            self.most_sets = max(self.most_sets, len(self.sets))
            weakref.finalize(storage, self.gone, at, storage.nbytes())
        return tensor.detach()

    def gone(self, at: int, nbytes: int) -> None:
        key = self.seen.pop(at)
        self.bytes -= nbytes
        self.sets[key] -= 1
        if not self.sets[key]:
            del self.sets[key]

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)


def one_alone(run, batch, chunk: int) -> tuple[int, int]:
    """Return the bytes that one micro-batch keeps on a stage for B, and after B for W."""
    run.sink.begin_step()
    live, stage = LiveStorages(run, [batch]), run.model.stages[chunk]
    hidden = None
    if not stage.embedding:
        hidden = torch.randn(run.model.hidden_shape(*batch.tokens.shape), dtype=torch.float64)
        hidden.requires_grad_()
    with live.hooks():
        out = run.model(batch.tokens, batch.labels, hidden=hidden, chunk=chunk)
    edge, shape = torch.autograd.graph.get_gradient_edge(out), out.shape
    del out
    for_b = live.bytes
    run.engine.queue.defer()
    torch.autograd.backward((edge,), (torch.randn(shape, dtype=torch.float64),))
    del edge, hidden
    kept = run.engine.queue.take()
    for_w = live.bytes
    run_deferred(kept)
    assert live.bytes == 0 < for_w < for_b
    return for_b, for_w


def measured(comm, name: str, pp: int, m: int) -> dict:
    """Train one step; return what was alive at most, and what one micro-batch keeps a stage."""
    case = dict(schedule=name, pp=pp, v=CHUNKS[name], m=m, tp=1, dp=1, sp=False, tied=False,
                recompute=None, layers=8, rows=m, lr=1e-3)  # fmt: skip
    config = config_of(case)
    grid = comm.grid(pp=pp)
    run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
    batches = micro_batches(case, 0)
    stages = [schedule_of(config, m).stage(grid.pp.rank, c) for c in range(CHUNKS[name])]
    alone = {s: one_alone(run, batches[0], c) for c, s in enumerate(stages)}
    live, forward = LiveStorages(run, batches), run.model.forward

    def noted(tokens, *args, **more):
        live.now = (more["chunk"], tokens.data_ptr())
        return forward(tokens, *args, **more)

    run.model.forward = noted
    with live.hooks():
        pretrain_llama.train_step(run, batches, 1e-3)
    assert live.bytes == 0 and not live.sets, "something is held after the step"
    return {"sets": live.most_sets, "bytes": live.most_bytes, "alone": alone}


@pytest.mark.parametrize("pp, m", sampled([(4, 8), (2, 6)], 2))
def test_live_activations_are_those_of_the_simulation(world, pp, m):
    for name, chunks in CHUNKS.items():
        results = world(pp).run(measured, name, pp, m)
        alone = functools.reduce(dict.__or__, (r["alone"] for r in results))
        schedule = build(name, pp, m, chunks)
        even = [1.0] * schedule.stages
        costs = Costs(even, even, even)
        counts = simulate(schedule, costs)
        sizes = [[alone[s][kind] for s in range(schedule.stages)] for kind in (0, 1)]
        held = peak_activations(schedule, *sizes)
        assert [r["sets"] for r in results] == list(counts.peak), name
        assert [r["bytes"] for r in results] == [most for *_, most in held], name


ALIVE = 6  # outputs of a rank: the one just made, those on their way, what a chunk was handed


def forward_alone(comm, name: str, m: int) -> dict:
    """Run a schedule's F's on stages that add 1; return what the last one made.

    A rank may be ahead of the one that receives from it. Each F waits until its rank has no more
    than ALIVE outputs, or for long enough that nothing more can leave.
    """
    pp, v = comm.size, CHUNKS[name]
    schedule = forward_only(build(name, pp, m, v))
    grid, seen, alive, most = comm.grid(pp=pp), [], [], 0
    queue, device = WeightGradientQueue(), torch.device("cpu")
    engine = Engine(grid, queue, FailureMonitor(), torch.float64, device)

    def forward(chunk, i, hidden):
        nonlocal most
        assert not torch.is_grad_enabled()
        out = torch.full((3, 2), float(i), dtype=torch.float64) if hidden is None else hidden + 1
        alive.append(weakref.ref(out.untyped_storage()))
        patience = time.monotonic() + (30 if most <= ALIVE else 0)
        while (now := sum(ref() is not None for ref in alive)) > ALIVE:
            if time.monotonic() > patience:
                break
            time.sleep(0.001)
        most = max(most, now)
        if schedule.stage(grid.pp.rank, chunk) == schedule.stages - 1:
            seen.append(out.tolist())
        return out

    engine.run(schedule, forward, (3, 2))
    assert not any(ref() is not None for ref in alive), "an output outlived the run"
    return {"seen": seen, "most": most}


@pytest.mark.parametrize("name", CHUNKS)
def test_forward_alone_passes_every_micro_batch_through_every_stage(world, name):
    results = world(2).run(forward_alone, name, 12)
    # a rank makes 12 or 24
    assert all(r["most"] <= ALIVE for r in results), [r["most"] for r in results]
    (seen,) = [r["seen"] for r in results if r["seen"]]
    stages = 2 * CHUNKS[name]
    assert seen == [[[float(i + stages - 1)] * 2] * 3 for i in range(12)]
