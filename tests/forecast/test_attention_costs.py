# SPDX-License-Identifier: Apache-2.0
"""The formulas of memory and traffic give what the layer allocates and sends, to the byte."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pretrain_llama
from forecast.recording import ACTIVATIONS, LOGITS, WORKING, Recorder, record
from mpu.comm.meta import MetaTransport
from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.layers.attention.shards import shards
from mpu.layers.context_attention import COMM_TYPES, ContextAttention
from mpu.meta_tensors import META
from tests.forecast.attention_costs import AttentionSizes, memory, traffic
from training.flags.parse import parse

HEADS = ((8, 2), (8, 8), (32, 1))


class Sent:
    """A trace: the bytes that left."""

    def __init__(self) -> None:
        self.bytes = 0

    def issued(self, verb: str, axis: Any, tensor: Tensor, sent: int, *rest: Any) -> None:
        self.bytes += sent


def measured(
    kind: str, cp: int, rank: int, heads: tuple[int, int], dtype: torch.dtype
) -> tuple[list[int], list[int]]:
    """Return the bytes of memory (forward, kept, backward) and those sent (forward, backward)."""
    (a, g), size, b, d, sent = heads, 512, 2, 16, Sent()
    grid = Grid(cp, cp_size=cp, launch=Launch(rank, cp))
    grid = grid.carried_by(MetaTransport()).traced(sent)
    core = ContextAttention(LayerContext(grid, cp_comm_type=kind, device=META))
    live = Recorder()
    with live:
        q, k, v = (
            torch.empty(size // cp, b, n, d, dtype=dtype, device=META).requires_grad_()
            for n in (a, g, g)
        )
        dy = torch.empty_like(q)
        live.events.clear()
        y = core.exchange(q, k, v, shards(cp, (size,)), packed=None, documents=(size,), window=0)
        (forward, kept), first = most_and_last(live), sent.bytes
        torch.autograd.backward(y, dy)
        return [forward, kept, most_and_last(live)[0]], [first, sent.bytes - first]


def most_and_last(live: Recorder) -> tuple[int, int]:
    """Return the most bytes that lived above those at first, and the last; begin anew."""
    now = most = 0
    for storage, sign in live.events:
        now += sign * storage.nbytes
        most = max(most, now)
    live.events.clear()
    return most, now


CI = [("all_gather", 4), ("p2p", 4), ("a2a", 2), ("a2a", 8)]
ALL = [(kind, cp) for kind in COMM_TYPES for cp in (2, 4, 8, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind, cp",
    [each if each in CI else pytest.param(*each, marks=pytest.mark.prove) for each in ALL],
)
def test_the_formulas_are_what_the_busiest_rank_needs(kind, cp, dtype):
    for a, g in HEADS:
        if kind == "a2a" and a % cp:
            continue
        each = [measured(kind, cp, rank, (a, g), dtype) for rank in (0, cp // 2, cp - 1)]
        most = [max(rank[0][i] for rank in each) for i in range(3)]
        sizes = AttentionSizes(cp, 512 // cp, 2, a, g, 16, dtype.itemsize)
        assert list(memory(kind, sizes)) == most, (a, g)
        assert [list(traffic(kind, sizes))] * 3 == [rank[1] for rank in each], (a, g)


def test_the_buffers_are_few():
    """Of Llama 3 8B's attention at 131,072 tokens over 8 ranks, in bf16."""
    sizes = AttentionSizes(8, 131072 // 8, 1, 32, 8, 128)
    layer = 8 * sizes.kv  # K and V of all tokens
    assert layer == 2 * 131072 * 1024 * 2
    whole = AttentionSizes(1, 131072, 1, 32, 8, 128)  # one rank
    outputs = 2 * (2 * whole.q) + whole.lse  # its output, wide too, a block's
    page = (Path(__file__).parents[2] / "docs/long_context.md").read_text()
    for kind in COMM_TYPES:
        peaks, sent = memory(kind, sizes), traffic(kind, sizes)
        numbers = (*sent, peaks.forward, peaks.backward)
        assert f"| `{kind}` | " + " | ".join(f"{n / 1e6:.0f} MB" for n in numbers) + " |" in page
    gather, ring = memory("all_gather", sizes), memory("p2p", sizes)
    assert gather.forward < outputs // 8 + 2 * layer
    assert gather.kept == ring.kept == (whole.q + whole.lse) // 8
    assert ring.forward <= outputs // 8 + 3 * sizes.kv


LAYERS = 4
LLAMA = f"""
    --mock-data --num-layers {LAYERS} --hidden-size 4096 --ffn-hidden-size 14336 --vocab-size 1024
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 131072
    --micro-batch-size 1 --global-batch-size 1 --lr 1e-4 --train-iters 1 --device cpu
"""


def peak(flags: str, cp: int = 1) -> int:
    """Return the most bytes of activations that a rank of a run has at once in a step."""
    config = parse(f"{LLAMA} {flags} --context-parallel-size {cp}".split(), cp)
    found = record(config, pretrain_llama)[0].moments()
    kinds = (ACTIVATIONS, LOGITS, WORKING)
    return max(sum(moment.kinds.get(kind, 0) for kind in kinds) for moment in found)


@pytest.mark.prove
@pytest.mark.parametrize("recompute", ["", "selective", "full"])
@pytest.mark.parametrize("dtype", ["--bf16", ""])
def test_a_rank_has_its_part_of_one_ranks_activations(dtype, recompute):
    """Layers of Llama 3 8B at cp 8, 131,072 tokens: 1 / 8 of one rank's and a few keys and values.

    a2a keeps one more output a layer, and the order of the tokens.
    """
    flags = f"{dtype} --recompute-granularity {recompute}" if recompute else dtype
    one, sizes = peak(flags), AttentionSizes(8, 16384, 1, 32, 8, 128, 2 if dtype else 4)
    more = {"p2p": 3 * sizes.kv, "all_gather": 2 * 8 * sizes.kv}
    each = memory("a2a", sizes)
    kept = each.kept - memory("p2p", sizes).kept - sizes.q - sizes.kv
    more["a2a"] = LAYERS * kept + each.forward
    for kind, most in more.items():
        found = peak(f"{flags} --cp-comm-type {kind}", 8) - one / 8
        assert 0 < found <= most, f"{kind}: {found / sizes.kv:.2f} blocks of keys and values"
