# SPDX-License-Identifier: Apache-2.0
"""Where a bucket's state is in a step, and what moves it; bits are in tests/training."""

import pytest
import torch

import pretrain_llama
from mpu.grid import Grid
from mpu.optim.state_offload import At, StateOffload
from tests.model.twin import config_of, micro_batches
from training.faults.monitor import FailureMonitor

CASE = dict(tp=1, dp=1, sp=False, recompute=None, tied=False, m=2, rows=12, lr=1e-2, bucket=500)
CASE |= dict(dtype="bfloat16", states=True)


def run_of(**more) -> pretrain_llama.LlamaRun:
    config = config_of(CASE | more)
    return pretrain_llama.build(config, Grid(), torch.device("cpu"), FailureMonitor())


def on_device(run) -> int:
    """Return the bytes of masters and state that the device holds."""
    held = run.optimizer.tensors_by_kind()
    kept = {t.untyped_storage()._cdata: t for kind in ("masters", "moments") for t in held[kind]}
    return sum(t.untyped_storage().nbytes() for t in kept.values())


@pytest.mark.parametrize("name", ["adam", "muon"])
def test_it_is_away_from_forward_to_the_end_of_the_last_backward(name, monkeypatch):
    run = run_of(optimizer=name)
    states, sink = run.optimizer.home, run.sink
    assert all(bucket.at == At.HOST for bucket in states.buckets) and on_device(run) == 0
    seen: list[tuple[str, list[At], int]] = []
    acquire, ready = type(sink).acquire, type(sink).register_grad_ready

    def noted(name, function):
        def call(self, param):
            out = function(self, param)
            seen.append((name, [bucket.at for bucket in states.buckets], on_device(run)))
            return out

        return call

    pretrain_llama.train_step(run, micro_batches(CASE, 0, 0), 1e-2)
    assert {bucket.at for bucket in states.buckets} == {At.DOWN}
    whole = on_device(run)
    assert whole == states.nbytes > 0
    monkeypatch.setattr(type(sink), "acquire", noted("use", acquire))
    monkeypatch.setattr(type(sink), "register_grad_ready", noted("ready", ready))
    pretrain_llama.train_step(run, micro_batches(CASE, 0, 1), 1e-2)
    gradients = [i for i, (what, _, _) in enumerate(seen) if what == "ready"]
    first = seen[: gradients[0]]  # the first forward
    sizes = [size for *_, size in first]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] < whole and sizes[-1] == 0
    half = seen[gradients[len(gradients) // 2 - 1]]  # the end of the first micro-batch
    assert half[2] == 0 and set(half[1]) == {At.HOST}
    last = [size for *_, size in seen[gradients[len(gradients) // 2] :]]
    assert last == sorted(last) and last[-1] == whole
    fetched = [sum(at == At.UP for at in ats) for _, ats, _ in seen]
    # with a bucket's gradients its own state and the next one's
    assert next(n for n in fetched if n) == 2


def test_state_is_read_and_written_in_host_memory():
    run = run_of(optimizer="adam")
    pretrain_llama.train_step(run, micro_batches(CASE, 0, 0), 1e-2)
    optimizer = run.optimizer
    norm = optimizer.params_norm()  # while the device still has it
    for _, kind, _, values in optimizer.named_state():
        if kind == "master":
            values.fill_(3.0)
    assert on_device(run) == 0
    assert all(bool((master == 3.0).any()) for master in optimizer.masters)
    assert optimizer.params_norm() != norm
    optimizer.weights_from_masters()
    names = {name for name, _ in run.model.named_parameters()}
    assert names and all(bool((p == 3.0).all()) for p in run.model.parameters())
    for p in run.model.parameters():
        p.data.fill_(0.5)
    optimizer.masters_from_weights()
    pretrain_llama.train_step(run, micro_batches(CASE, 0, 1), 0.0)
    optimizer.home.rest()
    assert all(bool(((m == 0.5) | (m == 0) | (m == 3.0)).all()) for m in optimizer.masters)


def test_what_shares_a_storage_moves_once_and_weights_stay():
    flat = torch.arange(12.0)
    one, two, weight = flat[:4], flat[4:], torch.ones(3)
    states = StateOffload([], [weight], torch.float32)
    states.keep([[one, two], [weight]])
    assert states.nbytes == flat.nbytes and len(states.buckets[0].flats) == 1
    assert flat.untyped_storage().nbytes() == 0 and weight.tolist() == [1.0] * 3
    assert states.at_rest(two).tolist() == list(range(4, 12)) and states.at_rest(weight) is weight
    states.at_rest(one)[0] = 9.0
    states.arrive()
    assert flat.tolist() == [9.0, *range(1, 12)]
    states.leave()
    states.buckets[0].fetch()  # before anything was freed: the device has it
    assert states.buckets[0].at == At.DEVICE and flat.tolist()[0] == 9.0
    flat[1] = 7.0
    states.rest()
    assert states.at_rest(one).tolist() == [9.0, 7.0, 2.0, 3.0]
    states.rest()
