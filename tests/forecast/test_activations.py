# SPDX-License-Identifier: Apache-2.0
"""What a rank keeps for backward, as recorded: by hand, and as a real forward keeps it.

Beside what is worked out here, a recording has among its activations the tables of RoPE, whole
numbers of tokens and labels (of a single row one of both), and a few numbers.
"""

from collections import Counter

import pytest
import torch

import pretrain_llama
from forecast.recording import ACTIVATIONS, LOGITS, MESSAGES, WORKING, record
from mpu.pipeline.schedules import Action
from tests.sampling import sampled
from tests.training.small_llama import PIPELINE, build, read

UNTIED = "--untie-embeddings-and-output-weights"
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
ROPE = 32 * 8 * 4  # the small Llama's tables: rows, sines and cosines of a head, in fp32
IDS = 2 * 32 * 8  # a micro-batch's tokens, or its labels
FEW = 64


def recorded(more, world=1):
    """Return a config, and the recordings of its ranks of a pipeline in order."""
    config = read(more, world)
    found = record(config, pretrain_llama)
    return config, [found[rank] for rank in sorted(found)]


def activations(more, world=1):
    return [rank.most(ACTIVATIONS) for rank in recorded(more, world)[1]]


def is_few(size):
    """Return whether that is a few numbers."""
    return 0 <= size < FEW


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


def gradients(config, message=False):
    """Return the bytes of gradients at a layer's fullest moment in backward: of its output, unless
    that is a message's, and of gate and up.
    """
    m, tokens = config.model, config.model.seq_length * config.batch.micro_batch_size
    width = 2 * m.ffn_hidden_size + m.hidden_size * (not message)
    return tokens * width * config.run.dtype.itemsize


@pytest.mark.parametrize(
    "more",
    sampled(
        [
            "--recompute-granularity full --recompute-method block --recompute-num-layers 5",
            "--recompute-granularity full",
            "--recompute-granularity full --recompute-num-layers 4",
            "--bf16",
            "",
            "--recompute-activations",
        ],
        3,
    ),
)
def test_activations_are_what_the_model_keeps(more):
    """The operations of a CPU keep a little more: masks and numbers of tokens."""
    config, (rank,) = recorded(f"{more} --num-layers 8 --seq-length 128")
    beside = 4 * ROPE + 2 * 4 * IDS  # of 128 tokens a row in place of 32
    assert rank.most(ACTIVATIONS) - beside == pytest.approx(saved_bytes(config), rel=0.01)


@pytest.mark.parametrize(
    "more", sampled(["--seq-length 128 --micro-batch-size 1", "--bf16", ""], 3)
)
@pytest.mark.parametrize("tp", sampled([SP, "", SP.replace("--sequence-parallel", "")], 2))
def test_activations_by_hand(more, tp):
    config, (rank,) = recorded(f"{more} {tp}", 2 if tp else 1)
    m, t, b = config.model, config.parallel.tensor_model_parallel_size, config.batch
    tokens = m.seq_length * b.micro_batch_size
    layers = 3 * layer_bytes(config) + last_norm(config)
    ids = 8 * min(b.micro_batch_size, 2) + (t > 1)  # and whether a token's label is this rank's
    assert is_few(rank.most(ACTIVATIONS) - layers - ROPE // 32 * m.seq_length - ids * tokens)
    logits = tokens * m.padded_vocab_size(t) // t * config.run.dtype.itemsize
    assert rank.most(LOGITS) == logits


@pytest.mark.parametrize("more", sampled(["--recompute-num-layers 4", ""], 2))
def test_what_runs_again_is_there_with_its_gradients(more):
    full = f"--recompute-granularity full {more} --num-layers 8 --seq-length 128"
    config, (rank,) = recorded(full)
    again = config.parallel.recompute_num_layers or 1
    worked = again * layer_bytes(config) + gradients(config)
    assert is_few(rank.most(WORKING) - worked)


@pytest.mark.prove
@pytest.mark.parametrize("more", ["--bf16", ""])
def test_what_waits_for_w_by_hand(more):
    """Inputs and gradients of a layer's four matrices; at the ends also those of the embedding, its
    tokens with them, and of the head.
    """
    config, ranks = recorded(f"{PIPELINE} 16 --pipeline-schedule zb-h1 {more}", 4)
    m, size = config.model, config.run.dtype.itemsize
    h, f, heads = m.hidden_size, m.ffn_hidden_size, m.num_attention_heads * m.kv_channels
    qkv = heads + 2 * m.num_query_groups * m.kv_channels
    matrices = [(h, qkv), (heads, h), (h, 2 * f), (f, h)]
    two_layers = 2 * 64 * size * sum(rows + columns for rows, columns in matrices)
    ends = [64 * size * h + IDS, 0, 0, 64 * size * (h + 16)]
    for rank, end in zip(ranks, ends, strict=True):
        freed, action = Counter(), None
        for event in rank.recorder.events:
            if isinstance(event, tuple) and not isinstance(event, Action):
                storage, sign = event
                if storage.kind in (ACTIVATIONS, LOGITS, MESSAGES):
                    freed[action] -= sign * storage.nbytes
            else:
                action = event
        assert rank.few == 8
        # the last one of all frees a message more
        assert {freed[Action("W", 0, i)] for i in range(7)} == {two_layers + end}


@pytest.mark.prove  # in short in test_step_memory.py
def test_what_a_pipeline_rank_holds_follows_the_schedule():
    """1F1B: rank r has p - r micro-batches in flight; the head's logits only one. But on the first
    rank the input of two layers is a message.
    """
    config, _ = recorded(f"{PIPELINE} 16", 4)
    two_layers, message = 2 * layer_bytes(config), 32 * 2 * 64 * 4

    def of(counts):
        """Return the activations of so many micro-batches on each rank."""
        more = [IDS, -message, -message, last_norm(config) - message + IDS]
        return [n * (two_layers + each) + ROPE for n, each in zip(counts, more, strict=True)]

    for flags, counts in (
        ("16", (4, 3, 2, 1)),
        ("4", (2, 2, 2, 1)),  # 2 micro-batches
        ("16 --pipeline-schedule gpipe", (8, 8, 8, 8)),
        ("64 --pipeline-schedule gpipe", (32, 32, 32, 32)),
    ):
        ranks = recorded(f"{PIPELINE} {flags}", 4)[1]
        found = [rank.most(ACTIVATIONS) for rank in ranks]
        assert all(map(is_few, map(int.__sub__, found, of(counts)))), flags
        of_head = counts[3] * 32 * 2 * 16 * 4
        assert [rank.most(LOGITS) for rank in ranks] == [0, 0, 0, of_head]


@pytest.mark.prove
def test_recomputed_layers_are_kept_once_while_they_run_again():
    full = f"{PIPELINE} 16 --recompute-granularity full"
    config, ranks = recorded(f"{full} --recompute-num-layers 4", 4)
    one_input, layer = 32 * 2 * 64 * 4, layer_bytes(config)
    # inputs are messages, but on the first rank
    kept = [4 * (one_input + IDS), 0, 0, last_norm(config) + IDS]
    for number, (rank, held) in enumerate(zip(ranks, kept, strict=True)):
        assert is_few(rank.most(ACTIVATIONS) - held - ROPE)
        assert is_few(rank.most(WORKING) - 2 * layer - gradients(config, number < 3))
    first = recorded(f"{full} --recompute-method block --recompute-num-layers 1", 4)[1][0]
    assert is_few(first.most(ACTIVATIONS) - 4 * (one_input + layer + IDS) - ROPE)
    # the layer that is kept is gone when the other one, whose input it had, runs again
    (fullest,) = {max(m.kinds.get(WORKING, 0) for m in first.moments())}
    assert layer < fullest < layer + 3 * gradients(config)


@pytest.mark.prove
@pytest.mark.parametrize("v", [1, 2])
def test_what_the_output_layer_defers(v):
    """The gradient of its logits and its input, of each micro-batch: all of them wait."""
    more = f"--num-virtual-stages-per-pipeline-rank {v} " * (v > 1) + UNTIED
    config, ranks = recorded(f"{PIPELINE} 16 {more} --defer-embedding-wgrad-compute", 4)
    logits, one_input, waiting = 32 * 2 * 16 * 4, 32 * 2 * 64 * 4, 8
    assert [rank.most(LOGITS) // logits for rank in ranks] == [0, 0, 0, waiting]
    late = [m for m in ranks[3].moments() if str(m.action).startswith("the output layer's")]
    assert len(late) == waiting
    for n, (_, kinds, _) in enumerate(late):
        assert kinds[LOGITS] == (waiting - n) * logits
        assert is_few(kinds[ACTIVATIONS] - (waiting - n) * one_input - ROPE)
