# SPDX-License-Identifier: Apache-2.0
"""What a rank keeps for backward: measured on meta tensors, by hand, and as a real run keeps it."""

import weakref

import pytest
import torch

import pretrain_llama
from estimate import activations
from estimate.rank_profile import rank_profile
from mpu.pipeline import engine
from pretrain_llama import model_provider
from tests.model.twin import config_of, micro_batches
from tests.training.small_llama import PIPELINE, build, read
from training.faults.monitor import FailureMonitor

SP = "--tensor-model-parallel-size 2 --sequence-parallel"


def saved_bytes(config):
    """Return the bytes a forward pass keeps for backward: each memory once, no weights."""
    model = build(config, "cpu").initialize(1)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    m, b = config.model, config.batch.micro_batch_size
    tokens = torch.randint(0, m.vocab_size, (b, m.seq_length))
    model.rope(None, m.seq_length)
    tables = {t.untyped_storage().data_ptr() for t in model._rope}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(tokens, tokens)
    assert loss.shape == (b, m.seq_length)
    logits = b * m.seq_length * m.padded_vocab_size(1) * config.run.dtype.itemsize
    return sum(n for at, n in kept.items() if at not in tables) - logits


def stage_of(config, rank=0):
    """Return what the only stage of a pipeline rank keeps and sends."""
    (stage,) = activations.profile(config, model_provider, rank).stages
    return stage


def layer_bytes(config):
    """Return, by hand, the bytes that one layer keeps for backward when nothing is recomputed.

        both norms' inputs and outputs     4 n h B, and 2 n inverse lengths
        q, k, v after rotation             s b (a + 2g) d B / t
        attention's output                 s b a d B / t, and s b a / t softmax sums
        gate and up, and their product     s b 3 f B / t

    (Korthikanti et al. 2022, section 4, for a Llama), n = s b tokens, under sequence parallelism
    s b / t.
    """
    m, p, size = config.model, config.parallel, config.run.dtype.itemsize
    t, tokens = p.tensor_model_parallel_size, m.seq_length * config.batch.micro_batch_size
    own = tokens // t if p.sequence_parallel else tokens
    heads = (2 * m.num_attention_heads + 2 * m.num_query_groups) * m.kv_channels
    return (
        own * (4 * m.hidden_size * size + 2 * 4)
        + tokens * (heads + 3 * m.ffn_hidden_size) // t * size
        + tokens * m.num_attention_heads // t * 4
    )


def last_norm(config):
    """Return the bytes of the last norm's input and output, with a length and a sum a token."""
    m, tokens = config.model, config.model.seq_length * config.batch.micro_batch_size
    own = tokens
    if config.parallel.sequence_parallel:
        own //= config.parallel.tensor_model_parallel_size
    return 2 * own * m.hidden_size * config.run.dtype.itemsize + 4 * own + 4 * tokens


@pytest.mark.parametrize("more", ["", "--bf16", "--recompute-activations"])
def test_activations_are_what_the_model_keeps(more):
    """The operations of a CPU keep a little more: masks and numbers of tokens."""
    config = read(more + " --num-layers 8 --seq-length 128")
    assert stage_of(config).for_b == pytest.approx(saved_bytes(config), rel=0.01)


@pytest.mark.parametrize("more", ["", "--bf16", "--seq-length 128 --micro-batch-size 1"])
@pytest.mark.parametrize("tp", ["", SP, SP.replace("--sequence-parallel", "")])
def test_activations_by_hand(more, tp):
    config = read(f"{more} {tp}", 2 if tp else 1)
    layers = 3 * layer_bytes(config)
    assert stage_of(config).for_b == layers + last_norm(config)
    m, t = config.model, config.parallel.tensor_model_parallel_size
    tokens = m.seq_length * config.batch.micro_batch_size
    logits = tokens * m.padded_vocab_size(t) // t * config.run.dtype.itemsize
    assert stage_of(config).logits == logits


@pytest.mark.parametrize(
    "more",
    [
        "--recompute-granularity full",
        "--recompute-granularity full --recompute-num-layers 4",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 5",
    ],
)
def test_full_recomputation_keeps_inputs_and_what_runs_again(more):
    config = read(more + " --num-layers 8 --seq-length 128")
    p, stage = config.parallel, stage_of(config)
    again = p.recompute_num_layers if p.recompute_method == "uniform" else 1
    assert stage.again == again * layer_bytes(config)
    assert stage.for_b == pytest.approx(saved_bytes(config), rel=0.01)


@pytest.mark.parametrize("more", ["", "--bf16", "--recompute-granularity full"])
def test_what_waits_for_w_is_what_the_queue_keeps(more):
    config = read(more + " --num-layers 8 --seq-length 128")
    model = build(config, "cpu").initialize(1)
    m, queue = config.model, model.ctx.queue
    tokens = torch.randint(0, m.vocab_size, (config.batch.micro_batch_size, m.seq_length))
    queue.defer()
    model(tokens, tokens).sum().backward()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}
    for work in queue.take():
        cells = [c.cell_contents for c in work.__closure__]
        for tensor in [t for cell in cells for t in (cell if isinstance(cell, tuple) else [cell])]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                storage = tensor.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
    kept = sum(size for at, size in kept.items() if at not in weights)
    logits = tokens.numel() * m.padded_vocab_size(1) * config.run.dtype.itemsize
    (stage,) = rank_profile(config, model_provider, model.stages, 0, split=True).stages
    assert (stage.for_w + logits, stage.logits) == (kept, logits)


def test_what_a_pipeline_rank_holds_follows_the_schedule():
    """1F1B: rank r has p - r micro-batches in flight; the head's logits only one."""
    config = read(f"{PIPELINE} 16", 4)
    two_layers = 2 * layer_bytes(config)
    held = activations.peaks(config, model_provider)
    last = two_layers + last_norm(config)
    assert [h.for_b for h in held] == [n * two_layers for n in (4, 3, 2)] + [last]
    assert [h.activations for h in held] == [h.for_b for h in held]
    assert [h.for_w for h in held] == [0] * 4
    assert [h.logits for h in held] == [0, 0, 0, 32 * 2 * 16 * 4]

    few = activations.peaks(read(f"{PIPELINE} 4", 4), model_provider)  # 2 micro-batches
    assert [h.for_b // two_layers for h in few] == [2, 2, 2, 1]
    flood = activations.peaks(read(f"{PIPELINE} 16 --pipeline-schedule gpipe", 4), model_provider)
    assert [h.for_b // two_layers for h in flood] == [8, 8, 8, 8]
    assert flood[3].logits == 8 * held[3].logits
    flood = activations.peaks(read(f"{PIPELINE} 64 --pipeline-schedule gpipe", 4), model_provider)
    assert [h.for_b for h in flood] == [32 * two_layers] * 3 + [32 * last]


def test_zero_bubble_keeps_weights_inputs_too():
    h1 = activations.peaks(read(f"{PIPELINE} 16 --pipeline-schedule zb-h1", 4), model_provider)
    plain = activations.peaks(read(f"{PIPELINE} 16", 4), model_provider)
    assert [h.for_b for h in h1] == [h.for_b for h in plain]
    assert all(h.for_w > 0 for h in h1) and h1[-1].activations > plain[-1].activations
    v = activations.peaks(read(f"{PIPELINE} 16 --pipeline-schedule v-half", 4), model_provider)
    assert v[0].logits and not v[3].logits  # both ends are on rank 0
    assert max(x.for_b for x in v) < max(x.for_b for x in plain)


def test_recomputed_layers_are_kept_once_while_they_run_again():
    config = read(f"{PIPELINE} 16 --recompute-granularity full --recompute-num-layers 4", 4)
    one_input = 32 * 2 * 64 * 4
    for rank, h in enumerate(activations.peaks(config, model_provider)):
        ends = last_norm(config) if rank == 3 else 0
        assert h.for_b == (4 - rank) * one_input + ends
        assert h.activations == h.for_b + 2 * layer_bytes(config)
    block = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
    first = activations.peaks(read(f"{PIPELINE} 16 {block}", 4), model_provider)[0]
    layer = layer_bytes(config)
    # the layer that is kept is gone when the other one, whose input it had, runs again
    assert first.for_b == 4 * (one_input + layer)
    assert first.for_b < first.activations < first.for_b + layer


def deferred_bytes(comm, case: dict) -> tuple[int, int]:
    """Train one step; return what the output layer's deferred gradients keep, run and dry run."""
    config, grid = config_of(case), comm.grid(case["tp"], pp=2)
    run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
    put, run_deferred, refs, alive = run.engine.queue.put, engine.run_deferred, [], [0]

    def noted(work, kept=(), output_layer=False):
        if output_layer:
            refs.extend(map(weakref.ref, kept))
        put(work, kept, output_layer)

    def counted(works):
        tensors = [tensor for ref in refs if (tensor := ref()) is not None]
        alive.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))
        del tensors
        run_deferred(works)

    run.engine.queue.put, engine.run_deferred = noted, counted
    try:
        pretrain_llama.train_step(run, micro_batches(case, 0), 1e-3)
    finally:
        engine.run_deferred = run_deferred
    assert not any(ref() is not None for ref in refs), "something is held after the step"
    held = activations.peaks(config, model_provider)[grid.pp.rank]
    logits = activations.profile(config, model_provider, grid.pp.rank).stages[-1].logits
    in_flight = 0 < case["limit"] < case["m"]  # the logits of a micro-batch that does not wait
    return max(alive), held.for_w + held.logits - logits * in_flight


@pytest.mark.parametrize("limit", [0, 2])
@pytest.mark.parametrize("v", [1, 2])
def test_what_the_output_layer_defers_is_what_a_run_keeps(world, v, limit):
    case = dict(pp=2, v=v, m=4, tp=2, dp=1, sp=True, tied=False, recompute=None, layers=8, rows=8,
                dtype="float32", defer=True, limit=limit)  # fmt: skip
    for rank, (kept, said) in enumerate(world(4).run(deferred_bytes, case)):
        assert kept == said and (kept > 0) == (rank >= 2)
