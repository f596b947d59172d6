# SPDX-License-Identifier: Apache-2.0
"""`CoreAttention.attend`: values of their own head size, a scale, attention sinks.

The twin is a softmax in fp64 that is written out, with a dense mask. A world of 4 runs cases drawn
over cp 1, 2 and 4, --cp-comm-type, documents, windows, sizes, sinks and recomputation: the output
and every gradient, the sinks' too.
"""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mpu import torch_private
from mpu.comm.collectives import all_reduce
from mpu.context import LayerContext
from mpu.layers.attention import block_attention
from mpu.layers.attention.backends import Card
from mpu.layers.attention.core import CoreAttention, core_attention
from mpu.layers.attention.shards import shards
from mpu.layers.context_attention import COMM_TYPES, core_attention_of
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.meta_tensors import META, MetaOperations
from mpu.recompute import Recompute
from tests.mpu.layers.attention.test_block_attention import flash_stand_in
from training.run.model_profile import _Flops

SEED = 11
HEADS = ((4, 4), (4, 2), (8, 2), (4, 1))  # query heads, groups
SIZES = ((6, 4), (12, 8), (4, 7), (8, 8), (3, 5))  # of q and k, of v
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 6e-2}


@dataclass(frozen=True)
class Case:
    """One attention, forward and backward; the numbers hang on `seed`."""

    cp: int
    kind: str
    rows: tuple[tuple[int, ...], ...]  # lengths of the documents of each row
    heads: tuple[int, int]
    sizes: tuple[int, int]
    window: int = 0
    scale: float | None = None
    sinks: bool = False
    recompute: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = 0
    chunk: int = 0  # tokens of a document that attend to each other only; 0: all

    @classmethod
    def drawn(cls, draw: random.Random, seed: int) -> "Case":
        cp, b = draw.choice([1, 2, 4, 4]), draw.choice([1, 2])
        size = cp * draw.choice([1, 3, 8, 13])
        rows = [(size,)] * b
        if draw.random() < 0.5:
            cuts = [sorted(draw.sample(range(1, size), min(2, size - 1))) for _ in range(b)]
            ends = [(0, *c, size) for c in cuts]
            rows = [tuple(y - x for x, y in zip(e, e[1:], strict=False)) for e in ends]
        return cls(
            cp, draw.choice(COMM_TYPES), tuple(rows), draw.choice(HEADS), draw.choice(SIZES),
            window=draw.choice([0, 0, 1, 4]), scale=draw.choice([None, 0.2, 1.5]),
            sinks=draw.random() < 0.5, recompute=draw.random() < 0.3,
            dtype=draw.choice([torch.float64] * 4 + [*DTYPES]), seed=seed,
            chunk=draw.choice([0, 0, 0, 1, 5]),
        )  # fmt: skip

    def fits(self) -> bool:
        """Return whether heads divide over the ranks of an all-to-all."""
        ranks = self.cp if self.kind == "a2a" else 1
        a, g = self.heads
        return a % ranks == 0 and (g % ranks == 0 or ranks % g == 0)


def numbers(case: Case) -> list[Tensor]:
    """Return q, k, v, dy of whole rows, and the sinks, in the case's dtype."""
    generator = torch.Generator().manual_seed(case.seed)
    s, b, (a, g), (d, e) = sum(case.rows[0]), len(case.rows), case.heads, case.sizes
    shapes = (s, b, a, d), (s, b, g, d), (s, b, g, e), (s, b, a * e), (a,)
    drawn = [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
    return [x.to(case.dtype) for x in drawn]


def hidden(rows: tuple[tuple[int, ...], ...], window: int, chunk: int = 0) -> Tensor:
    """Return which keys a query does not look at: [b, s, s]."""
    if chunk:
        rows = tuple(
            tuple(min(chunk, n - i) for n in row for i in range(0, n, chunk)) for row in rows
        )
    at = torch.arange(sum(rows[0]))
    back = at[:, None] - at
    out = (back < 0) | ((back >= window) if window else False)
    of = [torch.arange(len(r)).repeat_interleave(torch.tensor(r)) for r in rows]
    return torch.stack([out | (x[:, None] != x) for x in of])


def dense(case: Case, q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """Return softmax(scale q k^T) v by matrices, of fp64 numbers."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scale = q.shape[3] ** -0.5 if case.scale is None else case.scale
    logits = torch.einsum("ibnd,jbnd->bnij", q, k) * scale
    logits = logits.masked_fill(hidden(case.rows, case.window, case.chunk)[:, None], -torch.inf)
    if case.sinks:
        column = sink.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], 3)
    weights = logits.softmax(-1)[..., : len(k)]
    return torch.einsum("bnij,jbnd->ibnd", weights, v).flatten(2)


def run(attend: Any, leaves: list[Tensor], dy: Tensor) -> list[Tensor]:
    """Return y and the gradients of q, k, v and the sinks."""
    leaves = [x.clone().requires_grad_() for x in leaves]
    y = attend(*leaves)
    y.backward(dy)
    return [y.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def errors(comm: Any, cases: list[Case]) -> list[Any]:
    """Return of each case, or the text of its refusal, this rank's largest difference from the twin
    over the twin's largest value.
    """
    found: list[Any] = []
    for case in cases:
        grid = comm.grid(cp=case.cp)
        core = core_attention_of(LayerContext(grid, cp_comm_type=case.kind))
        attend = Recompute("selective" if case.recompute else None).selective(core.attend)
        q, k, v, dy, sink = numbers(case)
        rows = [shards(case.cp, row)[grid.cp.rank] for row in case.rows]
        places = [torch.cat([torch.arange(r.start, r.stop) for r in row]) for row in rows]
        at = torch.stack(places, 1)  # [s / cp, b]
        packed = PackedSeqParams.of([n for row in case.rows for n in row])
        packed = packed.chunked(case.chunk) if case.chunk else packed

        def part(x: Tensor, at: Tensor = at) -> Tensor:
            more = x.dim() - 2
            index = at.view(*at.shape, *[1] * more).expand(-1, -1, *x.shape[2:])
            return x.gather(0, index)

        def ours(*xs: Tensor, case: Case = case, attend: Any = attend, packed: Any = packed) -> Any:
            options = {"scale": case.scale, "sink": xs[3] if case.sinks else None}
            alone = case.cp == 1 and not case.chunk and all(len(row) == 1 for row in case.rows)
            return attend(*xs[:3], None if alone else packed, None, case.window, **options)

        try:
            got = run(ours, [*map(part, (q, k, v)), sink], part(dy))
        except ValueError as error:
            found.append(str(error))
            continue
        wide = [x.double() for x in (q, k, v, sink)]
        want = run(lambda *xs, case=case: dense(case, *xs), wide, dy.double())
        for number in range(4):
            want[number] = part(want[number])
        # each rank has the part of a sink's gradient that comes from its own queries and heads
        got[4] = all_reduce(got[4].double(), grid.cp)[0]
        pairs = zip(got, want, strict=True)
        found.append([float((a - b).abs().max() / b.abs().max().clamp(min=0.5)) for a, b in pairs])
    return found


def drawn(count: int) -> list[Case]:
    draw = random.Random(SEED)
    return [Case.drawn(draw, seed) for seed in range(count)]


@pytest.mark.parametrize("count", [32, pytest.param(160, marks=pytest.mark.prove)])
def test_attend_is_a_softmax_that_is_written_out(world, count):
    cases = drawn(count)
    for first in range(0, count, 16):
        part = cases[first : first + 16]
        for case, *each in zip(part, *world(4).run(errors, part), strict=True):
            for error in each:
                if not case.fits():
                    assert "a multiple or a divisor of it" in error, (case, error)
                else:
                    assert max(error) < DTYPES[case.dtype], (case, each)


@pytest.mark.parametrize(
    "sizes, sinks, window",
    [((6, 4), False, 3), ((6, 4), True, 0), ((4, 7), False, 0), ((4, 7), True, 3)],
)
def test_tokens_that_come_later_see_what_a_cache_has(sizes, sinks, window):
    case = Case(1, "p2p", ((9,), (9,)), (4, 2), sizes, window, 0.7, sinks)
    q, k, v, _, sink = numbers(case)
    want, cache = dense(case, q, k, v, sink), list[Tensor]()
    with torch.no_grad():
        parts = [
            core_attention.attend(
                q[a:b], k[a:b], v[a:b], None, cache, window, scale=0.7, sink=sink if sinks else None
            )
            for a, b in ((0, 4), (4, 5), (5, 9))
        ]
    assert (torch.cat(parts) - want).abs().max() < 1e-12 * want.abs().max()
    assert [x.shape[-1] for x in cache] == list(sizes)


MISTAKES: dict[str, tuple[Any, str]] = {
    "three dimensions": (lambda q, k, v: (q[0], k, v), r"must be \[s, b, heads, size\], not"),
    "keys of another size": (lambda q, k, v: (q, k[..., :3], v), "q and k the same head size"),
    "other tokens": (lambda q, k, v: (q, k, v[1:]), "must have the same tokens"),
    "other heads": (lambda q, k, v: (q, k, v[:, :, :1]), "k and v the same heads"),
    "groups": (lambda q, k, v: (q[:, :, :3], k, v), "3 query heads must be a multiple of 2"),
}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "half a window": (dict(window=2.5), "window is 2.5: it must be a whole number"),
    "a window that is true": (dict(window=True), "window is True"),
    "a window below 0": (dict(window=-1), "window is -1"),
    "no scale": (dict(scale=0.0), "scale is 0.0: it must be a finite number above 0"),
    "an endless scale": (dict(scale=float("inf")), "scale is inf"),
    "a sink of all ranks": (dict(sink=torch.zeros(8)), r"sink is \[8\]: .* rank's 4 query heads"),
}


@pytest.mark.parametrize("name", [*MISTAKES, *OPTIONS])
def test_what_cannot_be_is_one_sentence(name):
    given = numbers(Case(1, "p2p", ((5,),), (4, 2), (6, 4)))[:3]
    options: dict[str, Any] = {}
    if name in MISTAKES:
        change, message = MISTAKES[name]
        given = change(*given)
    else:
        options, message = OPTIONS[name]
    with pytest.raises(ValueError, match=f"^attend: .*{message}"):
        core_attention.attend(*given, **options)


def test_a_plan_counts_the_sizes_there_are_and_keeps_no_zeros():
    """FLOPs of causal attention are a s^2 (d + e), and v and out are kept in their own size."""
    s, a, d, e = 8, 4, 6, 4
    q, k, v = (torch.empty(s, 1, a, n, device=META, requires_grad=True) for n in (d, d, e))
    flops = _Flops()
    with torch.no_grad(), flops:
        core_attention.attend(q, k, v)
    assert flops.take()[0] == a * s * s * (d + e)
    kept: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with hooks, MetaOperations():
        y = core_attention.attend(q, k, v)
    assert y.shape == (s, 1, a * e)
    assert sorted(x.numel() for x in kept) == sorted(s * a * n for n in (d, d, e, e, 1))


class Operators:
    """torch.ops.aten with CUDA's operators of attention replaced by products; sizes: heads seen."""

    def __init__(self) -> None:
        self.sizes: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.aten, name)

    def _flash_attention_forward(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        self.sizes.append(("lengths", q.shape[-1], v.shape[-1]))
        return flash_stand_in(q, k, v, **given)

    def _scaled_dot_product_flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool
    ) -> tuple[Tensor, ...]:
        self.sizes.append(("flash", q.shape[-1], v.shape[-1]))
        return block_attention.products_forward(q, k, v, is_causal)

    def _scaled_dot_product_cudnn_attention(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, **given: Any
    ) -> tuple[Tensor, ...]:
        self.sizes.append(("cudnn", q.shape[-1], v.shape[-1]))
        out, lse = block_attention.products_forward(q, k, v, is_causal)
        return out, lse[..., None]


@pytest.mark.parametrize(
    "asked, sizes, documents, sinks",
    [
        ("auto", (24, 16), False, True), ("auto", (16, 24), True, False),
        ("flash", (16, 24), False, False), ("flash", (24, 16), True, True),
        ("fused", (24, 16), False, False), ("fused", (16, 24), True, True),
        ("unfused", (16, 24), False, True),
    ],
)  # fmt: skip
def test_kernels_of_one_head_size_are_given_one(monkeypatch, asked, sizes, documents, sinks):
    """On a GPU: flash and cuDNN see equal sizes, and what comes back has the size of v."""
    found = Operators()
    monkeypatch.setattr(torch_private, "aten", found)
    rows = ((5, 7),) if documents else ((12,),)
    case = Case(1, "p2p", rows, (4, 2), sizes, sinks=sinks, dtype=torch.bfloat16)
    q, k, v, _, sink = numbers(case)
    packed = PackedSeqParams.of(rows[0]) if documents else None
    attend = CoreAttention(asked, Card("cuda", 9, 0, 92300)).attend
    if asked == "fused" and documents:
        with pytest.raises(ValueError, match="^--attention-backend fused: "):
            attend(q, k, v, packed, sink=sink if sinks else None)
        return
    y = attend(q, k, v, packed, sink=sink if sinks else None)
    want = dense(case, *(x.double() for x in (q, k, v, sink)))
    assert (y.double() - want).norm() < 1e-2 * want.norm()
    kernel = {"auto": "flash" if documents else "cudnn", "fused": "cudnn", "flash": "flash"}
    names = {"lengths", "flash"} if kernel.get(asked) == "flash" else {kernel.get(asked)}
    assert all(n in names and d == e == 24 for n, d, e in found.sizes)
    assert bool(found.sizes) == (asked != "unfused")
