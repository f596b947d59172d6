# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of logits whose vocabulary is cut: no rank ever holds full-vocabulary logits.

loss = log(sum_v exp(l_v - m)) + m - l_target, with m the maximum. Each rank computes, over its own
columns, the maximum, the sum of exp(l - maximum), and the target's logit; ONE all-gather of these
three numbers a token lets every rank combine them, in rank order. Padded columns (beyond
vocab_size) are masked: they enter neither the softmax nor its gradient, so the loss does not depend
on the tensor-parallel size.
"""

from typing import Any

import torch
from torch import Tensor

from mpu.comm.collectives import all_gather
from mpu.comm.transport import Label
from mpu.context import LayerContext
from mpu.layers.fused import call, fits

LABEL = Label("cross_entropy", "forward")
ROWS = 64  # tokens a chunk: a chunk of logits stays in the cache through every pass over it


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, vocab_size: int, ctx: LayerContext
) -> Tensor:
    """Return each token's loss [s, b], in ctx.accumulate: logits [s, b, V/t], labels [s, b].

    Backward writes the gradient into the memory of `logits`: do not read them after it.
    """
    return _CrossEntropy.apply(logits, labels, vocab_size, ctx)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        saved_ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, ctx: LayerContext
    ) -> Tensor:
        tp, width = ctx.tp, logits.shape[-1]
        first = tp.rank * width
        real = min(max(vocab_size - first, 0), width)  # this rank's columns that are not padding
        rows, target = logits.view(-1, width), labels.reshape(-1) - first
        mine = (target >= 0) & (target < real)
        target = target.masked_fill(~mine, 0)

        stats = torch.empty((3, len(rows)), dtype=ctx.accumulate, device=logits.device)
        top, total, chosen = stats
        fused = fits(logits, accumulate=ctx.accumulate)
        saved_ctx.fused = fused
        if real and fused:
            call("softmax_stats", rows.dtype, rows, top, total, len(rows), width, real)
        elif real:
            for i in range(0, len(rows), ROWS):
                chunk = rows[i : i + ROWS, :real].to(ctx.accumulate)
                top[i : i + ROWS] = chunk.amax(-1)
                chunk = (chunk - top[i : i + ROWS, None]).exp_()
                total[i : i + ROWS] = chunk.sum(-1)
        if real:
            chosen.copy_(rows.gather(-1, target[:, None])[:, 0]).masked_fill_(~mine, 0.0)
        else:
            top.fill_(-torch.inf)
            stats[1:].zero_()

        every = all_gather(stats[None], tp, label=LABEL)[0]  # [t, 3, tokens]
        peak = every[:, 0].amax(0)
        sums = torch.zeros_like(peak)
        for part in every:
            sums += part[1] * (part[0] - peak).exp()
        log_sum = sums.log() + peak
        loss = log_sum - every[:, 2].sum(0)

        saved_ctx.save_for_backward(logits, log_sum, target, mine)
        saved_ctx.real = real
        return loss.view(labels.shape)

    @staticmethod
    def backward(saved_ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None, None]:
        # dlogits = (softmax - onehot(target)) * dloss
        logits, log_sum, target, mine = saved_ctx.saved_tensors
        rows, weight = logits.view(-1, logits.shape[-1]), dloss.reshape(-1)
        if saved_ctx.fused:
            places, scale = target.masked_fill(~mine, -1), weight.to(log_sum.dtype).contiguous()
            sizes = (len(rows), rows.shape[1], saved_ctx.real)
            call("softmax_gradient", rows.dtype, rows, log_sum, scale, places, *sizes)
            return logits, None, None, None
        at = torch.arange(len(rows), device=rows.device)
        for i in range(0, len(rows), ROWS):
            some = slice(i, i + ROWS)
            chunk = rows[some, : saved_ctx.real].to(
                log_sum.dtype
            )  # a view of the logits where dtypes agree
            chunk.sub_(log_sum[some, None]).exp_().mul_(weight[some, None])
            if saved_ctx.real:
                chunk[at[: len(chunk)], target[some]] -= weight[some] * mine[some]
            if chunk.dtype != rows.dtype:
                rows[some, : saved_ctx.real] = chunk
        rows[:, saved_ctx.real :] = 0
        return logits, None, None, None
