# SPDX-License-Identifier: Apache-2.0
"""Attention over context-parallel ranks is that of one rank: the output and every gradient.

A world of 4 runs all cases: cp 2 twice (in its two data-parallel halves) and cp 4. A case draws
documents, heads, a window and what carries the tensors; the twin is `core_attention` over whole
rows with the same numbers.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.layers.attention.core import core_attention
from mpu.layers.attention.shards import shards
from mpu.layers.context_attention import COMM_TYPES, core_attention_of
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.layers.rope import rope_frequencies, rope_table
from mpu.recompute import Recompute

SEED = 5
HEADS = ((4, 4), (4, 2), (4, 1), (8, 4), (8, 2))  # query heads, groups
DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """One attention, forward and backward; the numbers hang on `seed`."""

    cp: int
    kind: str
    rows: tuple[tuple[int, ...], ...]
    heads: int
    groups: int
    window: int = 0
    carrier: str = "gloo"  # or "memory"
    recompute: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = SEED

    @classmethod
    def drawn(cls, draw: random.Random, seed: int) -> "Case":
        cp, kind = draw.choice([2, 4, 4]), draw.choice(COMM_TYPES)
        size = cp * draw.choice([1, 3, 8, 13])
        row = draw.choice(["causal", "causal", "odd", "one token", "spanning", "rows differ"])
        rows: tuple[tuple[int, ...], ...] = ((size,),) * draw.choice([1, 2])
        if row == "one token":
            rows = ((1, size - 1), (size - 1, 1))
        elif row == "spanning":
            rows = ((1, size - 2, 1),)
        elif row in ("odd", "rows differ"):
            cuts = [sorted(draw.sample(range(1, size), min(3, size - 1))) for _ in range(2)]
            rows = tuple(
                tuple(b - a for a, b in zip([0, *c], [*c, size], strict=True)) for c in cuts
            )
            rows = rows if row == "rows differ" else rows[:1] * 2
        rows = rows if min(min(r) for r in rows) > 0 else ((size,),)
        return cls(
            cp, kind, rows, *draw.choice(HEADS), draw.choice([0, 0, 1, 4, 9]),
            carrier=draw.choice(["gloo", "memory"]),
            recompute=draw.random() < 0.3, dtype=draw.choice([torch.float64] * 4 + [*DTYPES]),
            seed=seed,
        )  # fmt: skip


def drawn(count: int) -> list[Case]:
    draw = random.Random(SEED)
    return [Case.drawn(draw, seed) for seed in range(count)]


def numbers(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return qkv, dy, cos and sin of whole rows."""
    generator, d = torch.Generator().manual_seed(case.seed), 8
    s, b = sum(case.rows[0]), len(case.rows)
    shapes = (s, b, (case.heads + 2 * case.groups) * d), (s, b, case.heads * d)
    qkv, dy = (torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes)
    kind = torch.float64 if case.dtype == torch.float64 else torch.float32
    cos, sin = rope_table(rope_frequencies(d, 10000.0, 0.0, 0), s, kind, torch.device("cpu"))
    return qkv.to(case.dtype), dy.to(case.dtype), cos, sin


def run(core: Any, case: Case, qkv: Tensor, dy: Tensor, *turn: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of qkv."""
    packed = PackedSeqParams.of([n for row in case.rows for n in row])
    core = Recompute("selective" if case.recompute else None).selective(core)
    qkv = qkv.clone().requires_grad_()
    y = core(qkv * 1, *turn, case.heads, case.groups, packed, window=case.window)
    y.backward(dy)
    assert qkv.grad is not None
    return y.detach(), qkv.grad


def grid_of(comm: Any, case: Case) -> Grid:
    return comm.grid(cp=case.cp, memory=case.carrier == "memory")


def errors(comm: Any, cases: list[Case]) -> list[Any]:
    """Return of each case, or the text of its refusal, this rank's largest difference from the twin
    over the twin's largest value: of the output, and of the gradient.
    """
    found: list[Any] = []
    for case in cases:
        grid = grid_of(comm, case)
        ctx = LayerContext(grid, cp_comm_type=case.kind)
        qkv, dy, cos, sin = numbers(case)
        rows = [shards(case.cp, row)[grid.cp.rank] for row in case.rows]
        places = [torch.cat([torch.arange(r.start, r.stop) for r in row]) for row in rows]
        at = torch.stack(places, 1)  # [s / cp, b]

        def part(x: Tensor, at: Tensor = at) -> Tensor:
            return x.gather(0, at[..., None].expand(-1, -1, x.shape[2]))

        turn = cos[at, 0], sin[at, 0]
        try:
            got = run(core_attention_of(ctx), case, part(qkv), part(dy), *turn)
        except ValueError as error:
            found.append(str(error))
            continue
        wide = torch.promote_types(case.dtype, torch.float32)
        twin = replace(case, recompute=False)
        want = run(core_attention, twin, qkv.to(wide), dy.to(wide), cos, sin)
        pairs = zip(got, want, strict=True)
        found.append([float((a - part(b)).abs().max() / b.abs().max()) for a, b in pairs])
    return found


def fits(case: Case) -> bool:
    ranks = case.cp if case.kind == "a2a" else 1
    return case.heads % ranks == 0 and (case.groups % ranks == 0 or ranks % case.groups == 0)


@pytest.mark.parametrize("count", [24, pytest.param(600, marks=pytest.mark.prove)])
def test_the_output_and_every_gradient_are_those_of_one_rank(world, count):
    cases = drawn(count)
    for part in (cases[i : i + 12] for i in range(0, count, 12)):
        for case, *each in zip(part, *world(4).run(errors, part), strict=True):
            for error in each:
                if not fits(case):
                    assert "must divide by it" in error, (case, error)
                else:
                    assert max(error) < DTYPES[case.dtype], (case, each)
