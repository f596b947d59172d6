# SPDX-License-Identifier: Apache-2.0
"""The largest logit of each head is that of plain scores, whatever is masked, in any chunks."""

from itertools import combinations
from typing import Any

import pytest
import torch

from mpu.context import LayerContext, QKClip
from mpu.layers.attention import max_logits
from mpu.layers.attention.blocks import blocks
from mpu.layers.attention.core import CoreAttention
from mpu.layers.attention.max_logits import MaxLogits, Noted, head_maxima_of, note_maxima
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.layers.qkv import qkv_linear
from mpu.optim.optimizer import multiply_rows
from mpu.recompute import recompute

S, A, G, D = 23, 6, 3, 10


def plain(
    q: torch.Tensor, k: torch.Tensor, documents: tuple[int, ...], window: int, first: int = 0
) -> Any:
    """Return the largest logit of each head, by a mask: q [b, a, s, d], k [b, g, s, d].

    first: of the queries. What is not finite counts as infinity.
    """
    of = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
    at = torch.arange(len(of))
    back = at[:, None] - at
    looks = (back >= 0) & (of[:, None] == of) & ((back < window) if window else True)
    each = q.shape[1] // k.shape[1]
    scores = q.double() @ k.double().repeat_interleave(each, 1).mT * q.shape[3] ** -0.5
    scores = scores[:, :, first:].masked_fill(~looks[first:], -torch.inf)
    return scores.amax((0, 2, 3)).nan_to_num(torch.inf, torch.inf, -torch.inf)


@pytest.mark.parametrize("documents", [(S,), (1, 9, 13), (5, 1, 1, 16)])
@pytest.mark.parametrize("window, chunk", [(0, 1), (0, 1 << 22), (1, 500), (4, 1), (50, 1 << 22)])
def test_the_maximum_is_of_the_pairs_that_are_looked_at(
    documents: tuple[int, ...], window: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(max_logits, "CHUNK", chunk)
    q, k = torch.randn(2, A, S, D).double(), torch.randn(2, G, S, D).double()
    noted = torch.full((A,), -torch.inf, dtype=torch.float64)
    note_maxima(Noted(noted), q, k, blocks(range(S), documents, window))
    torch.testing.assert_close(noted, plain(q, k, documents, window), rtol=1e-13, atol=0)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_what_is_not_finite_is_infinite(odd: float) -> None:
    """Where a query looks at it: a masked pair does not count."""
    q, k = torch.randn(1, A, S, D), torch.randn(1, G, S, D)
    k[0, 1, 5, 0] = odd
    noted = torch.full((A,), -torch.inf)
    note_maxima(Noted(noted), q, k, blocks(range(S), (S,)))
    assert noted.isinf().tolist() == [i // (A // G) == 1 for i in range(A)]
    noted.fill_(-torch.inf)
    note_maxima(Noted(noted), q[:, :, :5], k[:, :, :5], blocks(range(5), (5,)))
    assert noted.isfinite().all()


def test_bf16_is_multiplied_in_fp32() -> None:
    q, k = torch.randn(1, A, S, D).bfloat16(), torch.randn(1, G, S, D).bfloat16()
    noted = torch.full((A,), -torch.inf)
    note_maxima(Noted(noted), q, k, blocks(range(S), (S,)))
    torch.testing.assert_close(noted.double(), plain(q, k, (S,), 0), rtol=1e-6, atol=0)


def layer(**more: Any) -> tuple[LayerContext, CoreAttention]:
    ctx = LayerContext(log_max_attention_logit=True, **more)
    return ctx, CoreAttention(maxima=head_maxima_of(ctx))


def test_a_recomputed_forward_is_noted_once_and_an_evaluation_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    note = CoreAttention.note
    monkeypatch.setattr(CoreAttention, "note", lambda *given: (calls.append(1), note(*given)))
    ctx, core = layer()
    qkv = torch.randn(S, 2, (A + 2 * G) * D, requires_grad=True)
    cos, sin = torch.ones(S, 1, 1, D // 2), torch.zeros(S, 1, 1, D // 2)
    given = (qkv, cos, sin, A, G, None)
    with torch.no_grad():
        core(*given)
    assert not calls
    recompute(core, *given).sum().backward()
    assert len(calls) == 1
    core(qkv, cos, sin, A, G, PackedSeqParams.of([S, S])).sum().backward()
    assert len(calls) == 2


def test_without_a_flag_nothing_is_noted() -> None:
    ctx = LayerContext()
    assert head_maxima_of(ctx) is None and not ctx.sink.step_states


def clipped(
    maxima: list[float], found_inf: float = 0.0, frozen: bool = False, **more: Any
) -> MaxLogits:
    """Return what notes the maxima of a layer with a bias, after a step."""
    ctx = LayerContext(qk_clip=QKClip(10.0, 0.25))
    noted = head_maxima_of(ctx)
    assert noted is not None
    qkv_linear(8, (4 * 2, 2 * 2, 2 * 2), ctx=ctx, **more).requires_grad_(not frozen)
    noted.of(len(maxima)).values.copy_(torch.tensor(maxima))
    logits = ctx.sink.state_of(MaxLogits)
    logits.end_step(torch.tensor(found_inf))
    return logits


def test_a_groups_queries_and_its_key_share_the_factor() -> None:
    logits = clipped([5.0, 20.0, 3.0, -7.0], bias=True)
    (weight, factors), (bias, same) = logits.row_factors()
    assert weight.shape[0] == bias.shape[0] == 16 and factors is same
    eta = torch.tensor(0.5)
    q, k = eta**0.25, eta**0.75
    want = torch.tensor([q] * 4 + [1.0] * 4 + [k] * 2 + [1.0] * 2 + [1.0] * 4)
    assert torch.equal(factors, want)
    assert logits.clipped == 1 and logits.largest == 20.0


@pytest.mark.parametrize("top", [torch.nan, torch.inf, -torch.inf, -1e9, 0.0, 10.0])
def test_what_is_not_above_the_threshold_is_left(top: float) -> None:
    """Also what is not finite: its step is skipped, and a factor of 0 or NaN would be final."""
    ((_, factors),) = clipped([top] * 4).row_factors()
    assert torch.equal(factors, torch.ones(16))


def test_a_skipped_step_clips_nothing() -> None:
    ((_, factors),) = clipped([20.0] * 4, found_inf=1.0).row_factors()
    assert torch.equal(factors, torch.ones(16))


def test_a_frozen_layer_is_not_clipped() -> None:
    logits = clipped([20.0] * 4, frozen=True)
    assert logits.clipped is not None and not logits.clipped.item()
    assert all(torch.equal(factors, torch.ones(16)) for _, factors in logits.row_factors())


def test_layers_that_do_not_pair_are_refused() -> None:
    ctx = LayerContext(qk_clip=QKClip())
    noted = head_maxima_of(ctx)
    assert noted is not None and ctx.sink.state_of(MaxLogits) is not None
    noted.of(4)
    with pytest.raises(ValueError, match="1 layers have attention, but 0 make queries"):
        ctx.sink.state_of(MaxLogits).end_step(torch.tensor(0.0))


def test_a_part_of_a_matrix_is_multiplied_by_its_rows() -> None:
    matrix, factors = torch.randn(5, 3), torch.randn(5)
    want = (matrix * factors[:, None]).flatten()
    for first, end in combinations(range(16), 2):
        values = matrix.flatten()[first:end].clone()
        multiply_rows(values, first, 3, factors)
        assert torch.equal(values, want[first:end]), (first, end)
