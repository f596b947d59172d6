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
from training import estimate, pipeline
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


def build(config, device, pp_rank=0):
    p = config.parallel
    t, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    first = pp_rank * t * p.data_parallel_size  # of this pipeline rank
    grid = Grid(p.world_size, t, pp_size=pp, launch=Launch(first, p.world_size))
    ctx = LayerContext(grid, p.sequence_parallel, config.run.dtype, device=torch.device(device))
    recompute = Recompute(p.recompute_granularity, p.recompute_method, p.recompute_num_layers or 1)
    return Llama(llama_config(config), ctx, recompute, pipeline.rank_stages(config, pp_rank))


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shapes_are_the_models_own(tp, tie):
    config = read(f"--tensor-model-parallel-size {tp} {tie}", tp)
    model = build(config, "meta")
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert estimate.shapes(config) == own
    assert report(config, model) == report(config)


CUTS = (
    "",
    "--num-virtual-stages-per-pipeline-rank 3 --num-layers 7",
    "--pipeline-schedule zb-v --num-layers 2",
)


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("cut", CUTS, ids=["plain", "virtual", "V"])
def test_shapes_of_each_pipeline_rank_are_the_models_own(cut, tie):
    line = f"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 {tie} {cut}"
    config = read(f"{line} --global-batch-size 12", 12)
    for rank in range(3):
        own = build(config, "meta", rank).named_parameters()
        stages = pipeline.rank_stages(config, rank)
        assert estimate.shapes(config, stages=stages) == {n: tuple(p.shape) for n, p in own}


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
        for tensor in (c.cell_contents for c in work.__closure__):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                storage = tensor.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
    kept = sum(size for at, size in kept.items() if at not in weights)
    logits = tokens.numel() * m.padded_vocab_size(1) * config.run.dtype.itemsize
    assert estimate.kept_for_w(config, *estimate.whole(config)) + logits == pytest.approx(
        kept, rel=0.05
    )


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


PIPELINE = "--pipeline-model-parallel-size 4 --num-layers 8 --vocab-size 16 --global-batch-size"


def test_what_a_pipeline_rank_holds_follows_the_schedule():
    """1F1B: rank r has p - r micro-batches in flight; the head's logits only one."""
    config = read(f"{PIPELINE} 16", 4)
    two_layers = 2 * estimate.layer_activations(config)
    held = estimate.held(config)
    last_norm = 2 * 32 * 2 * 64 * 4
    assert [h.for_b for h in held] == [n * two_layers for n in (4, 3, 2)] + [two_layers + last_norm]
    assert [h.activations for h in held] == [h.for_b for h in held]
    assert [h.for_w for h in held] == [0] * 4
    assert [h.logits for h in held] == [0, 0, 0, 32 * 2 * 16 * 4]

    few = estimate.held(read(f"{PIPELINE} 4", 4))  # 2 micro-batches
    assert [h.for_b // two_layers for h in few] == [2, 2, 2, 1]
    flood = estimate.held(read(f"{PIPELINE} 16 --pipeline-schedule gpipe", 4))
    assert [h.for_b // two_layers for h in flood] == [8, 8, 8, 8]
    assert flood[3].logits == 8 * held[3].logits


def test_zero_bubble_keeps_weights_inputs_too():
    h1 = estimate.held(read(f"{PIPELINE} 16 --pipeline-schedule zb-h1", 4))
    plain = estimate.held(read(f"{PIPELINE} 16", 4))
    assert [h.for_b for h in h1] == [h.for_b for h in plain]
    assert all(h.for_w > 0 for h in h1) and h1[0].activations > plain[0].activations
    v = estimate.held(read(f"{PIPELINE} 16 --pipeline-schedule v-half", 4))
    assert v[0].logits and not v[3].logits  # both ends are on rank 0
    assert max(x.for_b for x in v) < max(x.for_b for x in plain)


def test_recomputed_layers_are_kept_once_while_they_run_again():
    config = read(f"{PIPELINE} 16 --recompute-granularity full --recompute-num-layers 4", 4)
    one_input = 32 * 2 * 64 * 4
    for rank, h in enumerate(estimate.held(config)):
        ends = 2 * one_input if rank == 3 else 0
        assert h.for_b == (4 - rank) * one_input + ends
        assert h.activations == h.for_b + 2 * estimate.layer_activations(config)
    block = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
    first = estimate.held(read(f"{PIPELINE} 16 {block}", 4))[0]
    layer = estimate.layer_activations(config)
    assert first.activations == 4 * (one_input + layer) + layer


def test_traffic_of_a_pipeline_rank():
    def rows(more, rank):
        config = read(f"{PIPELINE} 16 --tensor-model-parallel-size 2 {more}", 8)
        parameters = estimate.shapes(config, stages=pipeline.rank_stages(config, rank))
        return {(t.axis, t.verb): t for t in estimate.traffic(config, parameters, rank)}

    first, second, last = (rows("", rank) for rank in (0, 1, 3))
    assert [r["pp", "send"].times for r in (first, second, last)] == [8, 16, 8]
    assert second["pp", "send"].sent == 16 * 32 * 2 * 64 * 4
    assert [r["tp", "all-reduce"].times for r in (first, second, last)] == [72, 64, 72]
    assert ("tp", "all-gather") in last and ("tp", "all-gather") not in first  # of the loss
    assert first["pp", "all-reduce"].bytes == last["pp", "all-reduce"].bytes == 16 * 64 * 4
    assert ("pp", "all-reduce") not in second
    assert ("pp", "all-reduce") not in rows("--untie-embeddings-and-output-weights", 0)
    assert ("pp", "all-reduce") not in rows("--pipeline-schedule zb-v", 0)  # one rank has both

    sp = rows("--sequence-parallel", 1)
    assert sp["pp", "send"].bytes == 32 * 2 * 64 * 4 // 2
    assert sp["tp", "all-gather"].times == 8 * 6 * 2
    assert rows("--sequence-parallel --pipeline-schedule zb-h1", 1)["tp", "all-gather"].times == (
        8 * 8 * 2  # a W apart from its B gathers again
    )


def test_the_report_of_a_pipeline():
    config = read(f"{PIPELINE} 32 --num-virtual-stages-per-pipeline-rank 2 --bf16", 8)
    text = report(config, build(config, "meta"))
    assert text == report(config)
    for line in (
        "TP 1 x CP 1 x DP 2 x PP 4 = 8 ranks",
        "data-parallel group of rank 0: 0, 1\n",
        "pipeline group of rank 0: 0, 2, 4, 6\n",
        "pipeline interleaved: 4 ranks, 2 stages each",
        "pipeline rank 0: embedding + layer 0 | layer 4\n",
        "pipeline rank 3: layer 3 | layer 7 + head\n",
        "8 micro-batches: bubble ",
        "% were all stages equal",
        "rank  parameters ",
        "Parameters of pipeline rank 0, the fullest",
        "Memory of pipeline rank 0, the fullest",
        "all that interleaved has in flight",
        "Traffic of one step, pipeline rank 0, the fullest",
        "pp  send                 24 of  8.192 kB",
    ):
        assert line in text, line
    table = text.split("Memory of each pipeline rank\n")[1].split("\n\n")[0].splitlines()
    assert len(table) == 5 and len({len(row) for row in table}) == 1
    totals = [
        sum(estimate.state(config, estimate.shapes(config, stages=stages)).values())
        + h.activations
        + h.logits
        for h, stages in zip(
            estimate.held(config),
            (pipeline.rank_stages(config, rank) for rank in range(4)),
            strict=True,
        )
    ]
    (total,) = [line.split()[1:3] for line in text.splitlines() if line.startswith("  total ")]
    assert max(totals) == totals[0] and total == [f"{totals[0] / 1e6:.4g}", "MB"]
    assert table[1].endswith(" ".join(total))
    assert "Pipeline\n" not in report(read())


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
