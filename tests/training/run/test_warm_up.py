# SPDX-License-Identifier: Apache-2.0
"""Chunks that run before a pipeline's first message change nothing that the run holds."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import pretrain_llama
from mpu.overlap.choices import OverlapMap
from mpu.pipeline.schedules import CHUNKS
from tests.model.twin import config_of, gathered, micro_batches
from training.faults.monitor import FailureMonitor
from training.run import warm_up as warm_up_module
from training.run.warm_up import Scratch, run_chunks, warm_up

PROGRAM = (pretrain_llama.model_provider, pretrain_llama.run_schedule, OverlapMap("none"))


def send_nothing(*about, **more):
    raise AssertionError("a message between stages")


def bits(run):
    """Return copies of all that the run's weights, sums and moments are made of."""
    found = []
    for bucket in run.sink.buckets:
        for held in vars(bucket).values():
            if isinstance(held, torch.Tensor):
                found.append(held.clone())
    state = [t for t in run.optimizer.__dict__.values() if isinstance(t, torch.Tensor)]
    return [
        *found,
        *(t.clone() for t in state),
        *(p.detach().clone() for p in run.model.parameters()),
    ]


def equal(a, b):
    return len(a) == len(b) and all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True)
    )


def step(comm, case, warm):
    """Train two steps, after a warm-up or not; return losses, norms and weights."""
    config, grid = config_of(case), comm.grid(case["tp"], pp=2)
    run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
    if warm:
        before, seed, modules = bits(run), torch.get_rng_state(), list(run.model.modules())
        with pytest.MonkeyPatch.context() as patch:
            for name in ("isend", "irecv", "send", "recv"):
                patch.setattr(dist, name, send_nothing)
            run_chunks(run, *PROGRAM)
        assert equal(before, bits(run)) and list(run.model.modules()) == modules
        assert torch.equal(seed, torch.get_rng_state())
        assert all(param.grad is None for param in run.model.parameters())
    found = []
    for number in range(2):
        loss, norm, _ = pretrain_llama.train_step(
            run, micro_batches(case, grid.dp.rank, number), 1e-2
        )
        found += [loss, norm]
    run.sink.wait_for_weights()
    return [*found, *gathered(run.sink.buckets, "param_shard").values()]


def same(comm, cases):
    return [equal(step(comm, case, True), step(comm, case, False)) for case in cases]


def case_of(name, tp, zero, **more):
    case = dict(schedule=name, pp=2, v=CHUNKS[name], m=4, tp=tp, dp=2 // tp, sp=tp > 1, tied=True,
                recompute=None, layers=4, rows=8, lr=1e-2, zero=zero, masks=True)  # fmt: skip
    return case | more


@pytest.mark.prove
def test_a_step_after_it_has_the_same_bits(world):
    cases = [case_of("1f1b", 1, zero) for zero in (0, 1, 2, 3)]
    cases += [case_of("zb-v", 2, 0), case_of("interleaved", 2, 0, recompute="full")]
    cases += [case_of("v-half", 1, 2, each=True), case_of("1f1b", 1, 3, gather=True, tied=False)]
    for rank in world(4).run(same, cases):
        assert rank == [True] * len(cases)


def collectives(comm, name):
    """Return which collectives a warm-up makes, by axis."""
    case, heard = case_of(name, 2, 0), []
    run = pretrain_llama.build(
        config_of(case), comm.grid(2, pp=2), torch.device("cpu"), FailureMonitor()
    )
    with pytest.MonkeyPatch.context() as patch:
        from mpu.comm.transport import Axis

        start = Axis.start

        def noted(axis, verb, *about, **more):
            heard.append((axis.name, verb))
            return start(axis, verb, *about, **more)

        patch.setattr(Axis, "start", noted)
        run_chunks(run, *PROGRAM)
    return heard


def test_only_tensor_parallel_collectives_run_in_one_order(world):
    heard = world(4).run(collectives, "interleaved")
    assert {axis for rank in heard for axis, _ in rank} == {"tp"}
    assert heard[0] == heard[1] and heard[2] == heard[3] and len(heard[0]) > 10


def test_all_weights_share_the_memory_of_the_largest():
    sink, device = Scratch(torch.float32), torch.device("cpu")
    small, large = (sink.empty(shape, torch.bfloat16, device) for shape in ((2, 3), (5, 7)))
    again = torch.nn.Parameter(sink.empty((4, 2), torch.bfloat16, device))
    assert not small.any() and not large.any() and again.data_ptr() == large.data_ptr()
    slot, fresh = sink.grad_slot(again)
    assert fresh and slot.dtype == torch.float32 and slot.shape == (4, 2)
    assert not sink.grad_slot(again)[1]


@pytest.mark.parametrize("kind, pp, needed", [("cuda", 2, 1), ("cuda", 1, 0), ("cpu", 2, 0)])
def test_it_runs_where_a_message_could_meet_a_kernel_that_never_ran(monkeypatch, kind, pp, needed):
    said, ran = [], []
    monkeypatch.setattr(warm_up_module, "run_chunks", lambda *about: ran.append(about))
    monkeypatch.setattr(torch.cuda, "synchronize", ran.append)
    grid = SimpleNamespace(pp=SimpleNamespace(size=pp))
    run = SimpleNamespace(device=torch.device(kind), grid=grid, monitor=SimpleNamespace())
    warm_up(run, *PROGRAM, said.append)
    assert len(said) == needed and len(ran) == needed
