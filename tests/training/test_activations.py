# SPDX-License-Identifier: Apache-2.0
"""What a rank keeps for backward: the formulas against what the model itself keeps."""

import pytest
import torch

from tests.dry import PIPELINE, build, read
from training import activations, estimate


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


@pytest.mark.parametrize("more", ["", "--bf16", "--recompute-activations"])
def test_activations_are_what_the_model_keeps(more):
    config = read(more + " --num-layers 8 --seq-length 128")
    assert activations.activations(config) == pytest.approx(saved_bytes(config), rel=0.1)


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
    p = config.parallel
    again = p.recompute_num_layers if p.recompute_method == "uniform" else 1
    kept = activations.activations(config) - again * activations.layer_activations(config)
    assert kept == pytest.approx(saved_bytes(config), rel=0.1)


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
    assert activations.kept_for_w(config, *estimate.whole(config)) + logits == pytest.approx(
        kept, rel=0.05
    )


def test_sequence_parallelism_cuts_what_tensor_parallelism_leaves_whole():
    plain = read("--tensor-model-parallel-size 4", 4)
    cut = read("--tensor-model-parallel-size 4 --sequence-parallel", 4)
    whole = read("", 1)
    # All of a layer is cut by 4; alone, tensor parallelism leaves norms and residuals whole.
    assert activations.layer_activations(cut) * 4 == activations.layer_activations(whole)
    assert activations.layer_activations(cut) < activations.layer_activations(plain)


def test_what_a_pipeline_rank_holds_follows_the_schedule():
    """1F1B: rank r has p - r micro-batches in flight; the head's logits only one."""
    config = read(f"{PIPELINE} 16", 4)
    two_layers = 2 * activations.layer_activations(config)
    held = activations.held(config)
    last_norm = 2 * 32 * 2 * 64 * 4
    assert [h.for_b for h in held] == [n * two_layers for n in (4, 3, 2)] + [two_layers + last_norm]
    assert [h.activations for h in held] == [h.for_b for h in held]
    assert [h.for_w for h in held] == [0] * 4
    assert [h.logits for h in held] == [0, 0, 0, 32 * 2 * 16 * 4]

    few = activations.held(read(f"{PIPELINE} 4", 4))  # 2 micro-batches
    assert [h.for_b // two_layers for h in few] == [2, 2, 2, 1]
    flood = activations.held(read(f"{PIPELINE} 16 --pipeline-schedule gpipe", 4))
    assert [h.for_b // two_layers for h in flood] == [8, 8, 8, 8]
    assert flood[3].logits == 8 * held[3].logits


def test_zero_bubble_keeps_weights_inputs_too():
    h1 = activations.held(read(f"{PIPELINE} 16 --pipeline-schedule zb-h1", 4))
    plain = activations.held(read(f"{PIPELINE} 16", 4))
    assert [h.for_b for h in h1] == [h.for_b for h in plain]
    assert all(h.for_w > 0 for h in h1) and h1[0].activations > plain[0].activations
    v = activations.held(read(f"{PIPELINE} 16 --pipeline-schedule v-half", 4))
    assert v[0].logits and not v[3].logits  # both ends are on rank 0
    assert max(x.for_b for x in v) < max(x.for_b for x in plain)


def test_recomputed_layers_are_kept_once_while_they_run_again():
    config = read(f"{PIPELINE} 16 --recompute-granularity full --recompute-num-layers 4", 4)
    one_input = 32 * 2 * 64 * 4
    for rank, h in enumerate(activations.held(config)):
        ends = 2 * one_input if rank == 3 else 0
        assert h.for_b == (4 - rank) * one_input + ends
        assert h.activations == h.for_b + 2 * activations.layer_activations(config)
    block = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
    first = activations.held(read(f"{PIPELINE} 16 {block}", 4))[0]
    layer = activations.layer_activations(config)
    assert first.activations == 4 * (one_input + layer) + layer
