# SPDX-License-Identifier: Apache-2.0
"""The dry run: its arithmetic against the model itself, known Llamas, and what it prints."""

import shlex
from dataclasses import replace

import pytest
import torch

from model.llama import SIZES, Llama, LlamaConfig, flops_per_token
from mpu.context import LayerContext
from mpu.grid import Grid, Launch
from mpu.recompute import Recompute
from training import estimate
from training.arguments import parse
from training.config import UsageError
from training.dry_run import report

SMALL = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 4 --ffn-hidden-size 96 --seq-length 32 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 10 --vocab-size 300 --make-vocab-size-divisible-by 16 --mock-data --dry-run"
)
TIES = ("", "--untie-embeddings-and-output-weights")


def read(more="", world=1, base=SMALL):
    return parse(shlex.split(base + " " + more), world)


def llama_config(config):
    m = config.model
    return LlamaConfig(
        m.vocab_size,
        m.hidden_size,
        m.ffn_hidden_size,
        m.num_layers,
        m.num_attention_heads,
        m.num_query_groups,
        m.kv_channels,
        tied=not m.untie_embeddings_and_output_weights,
        make_vocab_size_divisible_by=m.make_vocab_size_divisible_by,
    )


def build(config, device):
    p = config.parallel
    grid = Grid(p.world_size, p.tensor_model_parallel_size, launch=Launch(0, p.world_size))
    ctx = LayerContext(grid, p.sequence_parallel, config.run.dtype, device=torch.device(device))
    recompute = Recompute(p.recompute_granularity, p.recompute_method, p.recompute_num_layers or 1)
    return Llama(llama_config(config), ctx, recompute)


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shapes_are_the_models_own(tp, tie):
    config = read(f"--tensor-model-parallel-size {tp} {tie}", tp)
    model = build(config, "meta")
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert estimate.shapes(config) == own
    assert report(config, model) == report(config)


def test_flops_are_the_models_own():
    config = read()
    assert estimate.flops_per_token(config) == flops_per_token(llama_config(config), 32)


@pytest.mark.parametrize(
    "name,billions",
    [("llama2-7b", 6.738), ("llama3-8b", 8.030), ("llama3-70b", 70.554), ("llama3.1-405b", 405.85)],
)
def test_known_models_have_their_known_sizes(name, billions):
    size = SIZES[name]
    model = replace(
        read().model,
        num_layers=size.num_layers,
        hidden_size=size.hidden_size,
        ffn_hidden_size=size.ffn_hidden_size,
        num_attention_heads=size.num_attention_heads,
        num_query_groups=size.num_query_groups,
        kv_channels=size.head_size,
        vocab_size=size.vocab_size,
        untie_embeddings_and_output_weights=True,
    )
    total = estimate.total_parameters(replace(read(), model=model))
    assert total / 1e9 == pytest.approx(billions, rel=1e-4)


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
    assert estimate.activations(config) == pytest.approx(saved_bytes(config), rel=0.1)


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
    kept = estimate.activations(config) - again * estimate.layer_activations(config)
    assert kept == pytest.approx(saved_bytes(config), rel=0.1)


def test_sequence_parallelism_cuts_what_tensor_parallelism_leaves_whole():
    plain = read("--tensor-model-parallel-size 4", 4)
    cut = read("--tensor-model-parallel-size 4 --sequence-parallel", 4)
    whole = read("", 1)
    # All of a layer is cut by 4; alone, tensor parallelism leaves norms and residuals whole.
    assert estimate.layer_activations(cut) * 4 == estimate.layer_activations(whole)
    assert estimate.layer_activations(cut) < estimate.layer_activations(plain)


def test_memory_a_parameter():
    for flag, size in (("", 16), ("--bf16", 18), ("--fp64", 32)):
        config = read(flag)
        parameters = estimate.shapes(config)
        held = sum(estimate.state(config, parameters).values())
        assert held == size * estimate.count(parameters)


def test_traffic():
    config = read("--tensor-model-parallel-size 2 --global-batch-size 8", 4)
    parameters = estimate.shapes(config)
    by = {(t.axis, t.verb): t for t in estimate.traffic(config, parameters)}
    # 2 micro-batches x (4 a layer x 3 layers + embedding + output layer), each s b h in fp32
    assert by["tp", "all-reduce"].times == 2 * 14
    assert by["tp", "all-reduce"].bytes == 32 * 2 * 64 * 4
    assert by["tp", "all-reduce"].sent == 28 * 32 * 2 * 64 * 4
    assert by["dp", "all-reduce"].bytes == 4 * estimate.count(parameters)
    sp = read("--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full", 2)
    rows = [t for t in estimate.traffic(sp, parameters) if t.verb == "reduce-scatter"]
    assert [t.times for t in rows] == [6 * 3 + 2]
    assert estimate.traffic(read(), parameters) == []


def test_the_report_of_a_large_run():
    text = report(
        read(
            "--tensor-model-parallel-size 8 --sequence-parallel --bf16 --vocab-size 128256 "
            "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
            "--num-query-groups 8 --untie-embeddings-and-output-weights --global-batch-size 1024 "
            "--seq-length 8192 --micro-batch-size 1 --tp-comm-overlap",
            512,
        )
    )
    for line in (
        "TP 8 x CP 1 x DP 64 x PP 1 = 512 ranks; sequence parallelism on",
        "layers.*.attention.qkv.weight      [1280, 8192]       x 80",
        "70,553,706,496 in all",
        "global batch 1,024 = 1 a micro-batch x 16 micro-batches x 64 data-parallel ranks",
        "= 8,388,608 tokens a step",
        "10 steps, 10,240 samples",
        "does NOT fit a GPU of 80 GB",
        "Korthikanti et al. 2022",
        "--tp-comm-overlap: tensor-parallel communication is not overlapped",
        "Differs from Megatron-LM",
        "--seed: the initial weights depend on tp and pp; here they do not",
    ):
        assert line in text
    assert "does NOT fit" not in report(read())
    assert "none: one rank" in report(read())


def test_the_vocabulary_must_be_known():
    base = SMALL.replace("--vocab-size 300", "").replace("--mock-data", "")
    with pytest.raises(UsageError, match="--vocab-size is missing: --dry-run opens no tokenizer"):
        read("", 1, base)
