# SPDX-License-Identifier: Apache-2.0
"""Vocabulary-parallel cross entropy: no rank ever holds full-vocabulary logits.

loss = log(sum_v exp(l_v - m)) + m - l_target, with m the maximum. Each rank computes, over its own
columns, the maximum, the sum of exp(l - maximum), and the target's logit; after ONE all-gather of
these three numbers per token every rank combines them, in rank order. Padded columns (beyond
vocab_size) are masked: they enter neither the softmax nor its gradient, so the loss does not depend
on the tensor-parallel size. mpu/layers/softmax_rows.py computes what csrc/fused.cpp cannot.

--output-z-loss-coeff c adds c S^2 to each token's loss, S = log(sum_v exp(l_v)), which draws S to 0
(Chowdhery et al. 2022, section 5). It is an auxiliary loss: backward records its value, and an
evaluation has none. With p the softmax, and 1 at the target,

    dl = dloss ((1 + 2 c S) p - 1) = dloss (exp(l - S') - 1),    S' = S - log(1 + 2 c S)

so only one number per token changes. If S <= -1/(2 c), far from 0, exp(l - S') is taken as 0.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mpu.comm.collectives import all_gather
from mpu.comm.transport import Label
from mpu.context import LayerContext
from mpu.layers import softmax_rows
from mpu.layers.fused import call, fits
from mpu.layers.linear import AllGatherMatmul
from mpu.torch_private import is_result_of

LABEL = Label("cross_entropy", "forward")
Columns = tuple[int, int]  # index of the first column; size of the vocabulary without padding


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, vocab_size: int, ctx: LayerContext
) -> Tensor:
    """Return each token's loss [s, b], in ctx.accumulate: logits [s, b, V/t], labels [s, b].

    If the logits are the result of a ColumnParallelLinear, backward overwrites them with their
    gradient: do not read them after it. Autograd raises if it had saved them. Other logits are
    copied. Raises ValueError if labels are not int64, one per token.
    """
    check_labels(labels, tuple(logits.shape[:2]))
    own = is_result_of(logits, AllGatherMatmul) and logits.is_contiguous()
    return _CrossEntropy.apply(logits, labels, vocab_size, ctx, own)


def check_labels(labels: Tensor, tokens: tuple[int, ...]) -> None:
    """Raise ValueError if labels are not int64, one per token: kernels read them by address."""
    if labels.dtype != torch.int64 or labels.shape != tokens:
        raise ValueError(
            f"labels are {tuple(labels.shape)} of {labels.dtype}: they must be {tokens} of int64, "
            "one for each token"
        )


def output_loss(
    head: nn.Module,
    x: Tensor,
    labels: Tensor,
    vocab_size: int,
    ctx: LayerContext,
    logits: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return each token's loss [s, b] for the output layer's logits, head(x). If ctx.loss_in_chunks
    is set, the logits are computed some columns at a time and never exist as a whole.

    logits: a function to call instead of the head; if it does more than the head,
    forecast/obeyed_flags.py rejects the loss in chunks.
    """
    if ctx.loss_in_chunks is not None:
        return ctx.loss_in_chunks(head, x, labels, vocab_size)
    return vocab_parallel_cross_entropy((logits or head)(x), labels, vocab_size, ctx)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        saved_ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        ctx: LayerContext,
        own: bool,
    ) -> Tensor:
        rows, targets, saved_ctx.own = logits.flatten(0, 1), labels.reshape(-1), own
        saved_ctx.ctx = ctx
        saved_ctx.columns = columns = (ctx.tp.rank * rows.shape[1], vocab_size)
        stats = torch.empty((3, len(rows)), dtype=ctx.accumulate, device=rows.device)
        softmax_stats(rows, targets, columns, stats)
        loss, log_sum = loss_of(stats, ctx)
        saved_ctx.save_for_backward(logits, targets, log_sum)
        return loss.view(labels.shape)

    @staticmethod
    def backward(saved_ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, log_sum = saved_ctx.saved_tensors
        log_sum = with_z_loss(log_sum, dloss, saved_ctx.ctx)
        if not saved_ctx.own:  # the operation that computed them may have saved them
            logits = logits.clone(memory_format=torch.contiguous_format)
        softmax_gradient(logits.flatten(0, 1), targets, saved_ctx.columns, log_sum, dloss)
        increment_version(logits)
        return logits.detach(), None, None, None, None  # as a gradient it must not keep the graph


def softmax_stats(rows: Tensor, targets: Tensor, columns: Columns, out: Tensor) -> None:
    """Write each row's maximum, sum of exp(l - maximum) and target's logit to out [3, n].

    rows: logits [n, width]. The target's logit is 0 if the target [n] is not in these columns.
    """
    if fits(rows, accumulate=out.dtype):
        call("softmax_stats", rows.dtype, rows, targets, out, *rows.shape, *columns)
    else:
        softmax_rows.stats(rows, targets, *columns, out)


def softmax_gradient(
    rows: Tensor, targets: Tensor, columns: Columns, log_sum: Tensor, dloss: Tensor
) -> None:
    """Overwrite logits with dloss (exp(l - log_sum) - [column is the target]), padding with 0."""
    dloss = dloss.reshape(-1).to(log_sum.dtype).contiguous()
    if fits(rows, accumulate=log_sum.dtype):
        given = (rows, targets, log_sum, dloss)
        call("softmax_gradient", rows.dtype, *given, *rows.shape, *columns)
    else:
        softmax_rows.gradient(rows, targets, *columns, log_sum, dloss)


def with_z_loss(log_sum: Tensor, dloss: Tensor, ctx: LayerContext) -> Tensor:
    """Return S' of each token, given S [n] and the gradient of the loss; record the z-loss.

    Call it once per backward.
    """
    c = ctx.output_z_loss
    if not c:
        return log_sum
    losses = ctx.auxiliary_losses
    of_token = dloss.reshape(-1).to(log_sum.dtype) * losses.tokens  # 1, or 0 where it is masked
    losses.add((c * log_sum.square() * of_token).sum(), ())
    return log_sum - torch.log((1 + 2 * c * log_sum).clamp(min=0))


def loss_of(stats: Tensor, ctx: LayerContext) -> tuple[Tensor, Tensor]:
    """Return (loss, log of the sum of exp) of each token, from the stats of this rank's columns."""
    every = all_gather(stats[None], ctx.tp, label=LABEL)[0]  # [t, 3, n]
    peak = every[:, 0].amax(0)
    terms = every[:, 1] * (every[:, 0] - peak).exp()
    total = terms[0]
    for term in terms[1:]:
        total += term
    log_sum = total.log() + peak
    return log_sum - every[:, 2].sum(0), log_sum
