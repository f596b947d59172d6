# SPDX-License-Identifier: Apache-2.0
"""A rank's parameters and their buckets, worked out by hand.

The small Llama (tests/training/small_llama.py) in blocks of 1,024 elements: the embedding 19, a
layer's matrices 8 + 4 + 12 + 6 = 30 and its two norms 1 each, the last norm 1, an untied head 19.
Over tp 2: the embedding 10 (its vocabulary is padded further), a layer's matrices 15, norms 1 each.
"""

from dataclasses import replace

import pytest

import pretrain_llama
from forecast.recording import record
from model.llama import SIZES
from mpu.param import placement_of
from pretrain_llama import model_provider
from tests.sampling import sampled
from tests.training.small_llama import TIES, build, read
from training.run import matrices
from training.run.model_profile import model_profile

K = 1024
UNTIED = "--untie-embeddings-and-output-weights"
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
ENDS = "--pipeline-model-parallel-size 2 --num-layers 4 --pipeline-model-parallel-layout Ett|ttL"


FLOAT8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"


@pytest.mark.parametrize(
    "more", ["", "--recompute-granularity full", FLOAT8, f"{FLOAT8} --device cpu"]
)
def test_flops_by_hand(more):
    """6 for each weight in a matmul, 6 L s a d for causal attention; 3 layers, 8 heads of 8."""
    model = model_profile(read(more), model_provider)
    layer = 64 * (64 + 2 * 32 + 64 + 3 * 96)
    assert model.flops == 6 * (3 * layer + 64 * 300) + 6 * 3 * 32 * 64
    assert model.core == (2 * 32 * 64,) * 3 and model.embedding == 0


@pytest.mark.parametrize(
    "name,billions",
    [("llama2-7b", 6.738), ("llama3.1-405b", 405.85)],
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
    total = model_profile(replace(read(), model=model), model_provider).parameters
    assert total / 1e9 == pytest.approx(billions, rel=1e-4)


def trained(config, rank=0):
    """Return the buckets of what trains on a pipeline rank."""
    return [each.layout for each in record(config, pretrain_llama, ())[rank].run.sink.buckets]


def optimizer_lines(config):
    runs = [each.run for each in record(config, pretrain_llama, ()).values()]
    optimizers = [(run.grid, run.optimizer) for run in sorted(runs, key=lambda run: run.grid.rank)]
    return matrices.lines(config, model_provider, optimizers)


def blocks(flats):
    """Return the lengths of buckets in blocks."""
    assert all(flat.length % K == 0 for flat in flats)
    return [flat.length // K for flat in flats]


@pytest.mark.parametrize("tie", sampled(TIES, 2))
@pytest.mark.parametrize(
    "line,world",
    sampled(
        [
            (f"{SP} --zero-stage 3", 4),
            ("", 2),
            ("--pipeline-schedule zb-v --pipeline-model-parallel-size 2 --num-layers 4", 4),
            (f"{SP} --pipeline-model-parallel-size 2 --zero-stage 1 --ddp-bucket-size 9000", 8),
        ],
        2,
    ),
)
def test_buckets_hold_what_the_model_says_of_its_parameters(line, world, tie):
    config = read(f"{line} {tie} --global-batch-size 16", world)
    for rank in range(config.parallel.pipeline_model_parallel_size):
        model = build(config, "meta", rank)
        flats = trained(config, rank)
        named = dict(model.named_parameters())
        found = {name: (flat, n) for flat in flats for name, _, n in flat.params}
        assert found.keys() == named.keys()
        for name, param in named.items():
            flat, n = found[name]
            axes = tuple(a.name for a in placement_of(param).reduce_axes if a.size > 1)
            assert (flat.axes, n) == (axes, param.numel())
            chunks = {model.chunk_of(other) for other, _, _ in flat.params}
            assert flat.axes or chunks == {model.chunk_of(name)}


def test_buckets_by_hand():
    layer = ["mlp.down", "mlp.gate_up", "mlp_norm", "attention.proj", "attention.qkv"]
    flats = trained(read(f"--ddp-bucket-size 30000 {UNTIED}", 4))
    names = [[name.removesuffix(".weight") for name, _, _ in flat.params] for flat in flats]
    assert names[0] == ["head", "norm", "layers.2.mlp.down", "layers.2.mlp.gate_up"]
    assert names[3] == [*(f"layers.0.{n}" for n in [*layer[2:], "attention_norm"]), "embedding"]
    assert blocks(flats) == [40, 32, 32, 36]  # 38, 32, 32, 33, rounded up to 4 ranks
    assert blocks(trained(read(UNTIED, 4))) == [136]  # 135
    assert blocks(trained(read("", 8))) == [120]  # 116
    by_block = read(f"{UNTIED} --zero-stage 3", 4)
    assert blocks(trained(by_block)) == [20, 32, 32, 32, 20]
    norms_apart = read(f"{SP} --zero-stage 3", 4)
    assert blocks(trained(norms_apart)) == [16, 16, 16, 10, 8]
    ends = read(f"{ENDS} --zero-stage 3", 4)
    first, last = (trained(ends, rank) for rank in (0, 1))
    assert blocks(first) == [32, 32, 20] and blocks(last) == [2, 32, 32, 20]
    assert [f.axes for f in last] == [(), (), (), ("embd",)]
    chunks = "--pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size 8"
    virtual = read(f"{chunks} --pipeline-model-parallel-layout Et|t|t|tL {UNTIED}", 2)
    own = trained(virtual)
    assert blocks(own) == [32, 51] and own[0].params[0][0].startswith("layers.2.")


def test_the_fullest_pipeline_rank_sets_the_automatic_size():
    line = (
        "--hidden-size 1024 --ffn-hidden-size 2048 --num-layers 16 --pipeline-model-parallel-size 2"
        f" --pipeline-model-parallel-layout Et*15|tL {UNTIED}"
    )
    config = read(line, 2)
    # by itself it would be cut in buckets of 2^21
    (small,) = trained(config, 1)
    assert small.length > 8 * 2**20
    assert len(trained(config, 0)) == 8


def test_a_stage_without_layers_has_no_matrices():
    more = "--num-layers 3 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout"
    config = read(f"--optimizer muon --bf16 {UNTIED} {more} E|tt|t|L", 4)
    assert "pipeline rank 0: Muon has 0 matrices" in optimizer_lines(config)


def test_frozen_matrices_are_not_named_among_those_to_update():
    plain, frozen = (
        optimizer_lines(read(f"--optimizer muon {UNTIED} {more}"))
        for more in ("", "--param-group layers.0.* embedding.* frozen")
    )
    assert any("embedding.weight" in line for line in plain)
    assert not any("embedding.weight" in line for line in frozen)
    assert "layers.*.mlp.down.weight x 3" in plain[0]
    assert "layers.*.mlp.down.weight x 2" in frozen[0]
    for lines, layers in ((plain, 3), (frozen, 2)):
        assert f"Muon has {layers * 7} matrices" in lines
