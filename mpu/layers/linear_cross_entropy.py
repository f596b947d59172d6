# SPDX-License-Identifier: Apache-2.0
"""The output layer fused with the loss, in chunks of the vocabulary: the full logits never exist.

A chunk has as many of the weight's rows W_c as give logits of CHUNK_BYTES for all tokens, so the
memory in use does not grow with the vocabulary. x is the input of the output layer, S the log of
the sum of exp over the vocabulary.

    forward   for each c:  logits = x W_c^T -> each token's maximum, sum and target's logit; free
              combine the chunks, then the ranks -> loss and S, one number per token
    backward  for each c:  logits = x W_c^T again -> their gradient G over them
                           dx += G W_c in fp32;  dW_c += G^T x
              dx is summed over the ranks

Backward recomputes the logits, so there are four products instead of three: the gradient of the
loss, which masks and scales each token, is only known then, and a dW computed before would have to
be kept per token. The chunks are of the vocabulary rather than of tokens, since then each row of
the weight and of its gradient, the largest tensors here, is read and written once per pass; only
the sums dx, which are small, are with every chunk.

A deferred weight gradient (WeightGradientQueue) keeps the shard of x, S and the loss's gradient,
gathers x again and recomputes the logits once more: five products. x is gathered and dx scattered
in one piece each, without an overlap method.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mpu.comm.collectives import all_gather, all_reduce, reduce_scatter
from mpu.comm.transport import Label
from mpu.layers.cross_entropy import (
    Columns,
    check_labels,
    loss_of,
    softmax_gradient,
    softmax_stats,
    with_z_loss,
)
from mpu.layers.linear import ColumnParallelLinear, Recipe

CHUNK_BYTES = 1 << 28  # size of a chunk's logits
ALIGNED = 128  # rows of a chunk are a multiple of this
# methods that a call of ColumnParallelLinear runs and the loss in chunks does not
USED = ("__call__", "forward", "operand", "operand_of_weight", "end_use", "wgrad")


def linear_cross_entropy(
    head: ColumnParallelLinear, x: Tensor, labels: Tensor, vocab_size: int
) -> Tensor:
    """Return each token's loss [s, b], in the accumulation dtype, equal to that of head(x).

    x: [s/t, b, h] under SP, else [s, b, h]; labels [s, b]. Raises ValueError if the output layer
    computes anything but x W^T (it has its own forward or hooks), which would be skipped, or has
    its own recipe: only plain tensors are multiplied in chunks.
    """
    if own := _own(head):
        raise ValueError(
            f"--fused-linear-cross-entropy: {own}, but the loss in chunks multiplies by the weight "
            "only: omit the flag"
        )
    if type(head.recipe) is not Recipe:
        raise ValueError(
            "--fused-linear-cross-entropy: the output layer's recipe is "
            f"{type(head.recipe).__name__}, but the loss in chunks supports only Recipe: omit the "
            "flag"
        )
    return _LinearCrossEntropy.apply(x, head.weight, labels, head, vocab_size)


def _own(head: nn.Module) -> str:
    """Describe the part of an output layer that the loss in chunks would skip; "": none."""
    kind = type(head).__name__
    if not isinstance(head, ColumnParallelLinear):
        return f"the output layer is a {kind}, which has a matmul of its own"
    for name in USED:
        if getattr(type(head), name) is not getattr(ColumnParallelLinear, name):
            return f"{kind} has a {name} of its own"
        if name in vars(head):
            return f"the output layer has a {name} of its own"
    if head.bias is not None:
        return "the output layer has a bias"
    hooks = (name for name in vars(head) if name.endswith("hooks") and "state_dict" not in name)
    return "the output layer has hooks" if any(getattr(head, name) for name in hooks) else ""


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        saved_ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        labels: Tensor,
        head: ColumnParallelLinear,
        vocab_size: int,
    ) -> Tensor:
        rows, targets = _gather(x, head, head.on_forward), labels.reshape(-1)
        total_length = len(x) * (head.ctx.tp.size if head.ctx.sp else 1)
        check_labels(labels, (total_length, *x.shape[1:-1]))
        full_weight = head.ctx.sink.acquire(head.weight)
        chunks = _chunks(rows, full_weight, head, vocab_size)
        kind = head.ctx.accumulate
        stats = torch.empty((len(chunks), 3, len(rows)), dtype=kind, device=rows.device)
        for (some, columns), part in zip(chunks, stats, strict=True):
            logits = head.recipe.product(rows, full_weight[some])
            softmax_stats(logits, targets, columns, part)
            del logits  # before the next ones are made
        head.end_use()
        peak = stats[:, 0].amax(0)
        total = ((stats[:, 0] - peak).exp() * stats[:, 1]).sum(0)
        own = torch.cat((peak, total, stats[:, 2].sum(0))).view(3, -1)
        loss, log_sum = loss_of(own, head.ctx)
        saved_ctx.save_for_backward(x, targets, log_sum)
        saved_ctx.head, saved_ctx.vocab_size = head, vocab_size
        return loss.view(labels.shape)

    @staticmethod
    def backward(saved_ctx: Any, dloss: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        head: ColumnParallelLinear = saved_ctx.head
        ctx, size = head.ctx, saved_ctx.vocab_size
        x, targets, log_sum = saved_ctx.saved_tensors
        saved = x, targets, with_z_loss(log_sum, dloss, ctx)
        dloss = dloss.reshape(-1).to(ctx.accumulate).contiguous()
        needs_dx, trains = saved_ctx.needs_input_grad[:2]
        deferred = ctx.queue.defers(head.output_layer)
        dx = None
        if needs_dx or not deferred:
            rows = _gather(saved[0], head, head.on_backward)
            dx = rows.new_empty(rows.shape, dtype=ctx.accumulate) if needs_dx else None
            wgrad_now = trains and not deferred
            _add_gradients(head, rows, saved[1:], dloss, size, dx, wgrad=wgrad_now)
        if deferred and trains:
            # detached, as x itself would keep the graph alive
            saved = saved[0].detach(), saved[1].detach(), saved[2].detach()

            def wgrad() -> None:
                again = _gather(saved[0], head, head.on_wgrad)
                _add_gradients(head, again, saved[1:], dloss, size, None, wgrad=True)

            ctx.queue.put(wgrad, (*saved, dloss), head.output_layer)
        if dx is None:
            return None, None, None, None, None
        dx = dx.to(x.dtype).view(-1, *saved[0].shape[1:])
        collective = reduce_scatter if ctx.sp else all_reduce
        return collective(dx, ctx.tp, label=head.on_backward)[0], None, None, None, None


def _add_gradients(
    head: ColumnParallelLinear,
    rows: Tensor,
    saved: tuple[Tensor, Tensor],
    dloss: Tensor,
    vocab_size: int,
    dx: Tensor | None,
    wgrad: bool,
) -> None:
    """Write the gradient of rows [n, h] to dx; add the weight's to its main gradient if `wgrad`.

    saved: targets and log of the sum of exp.
    """
    targets, log_sum = saved
    recipe, sink, weight = head.recipe, head.ctx.sink, head.ctx.sink.acquire(head.weight)
    main_grad, fresh = sink.grad_slot(head.weight) if wgrad else (None, False)
    for some, columns in _chunks(rows, weight, head, vocab_size):
        logits = recipe.product(rows, weight[some])
        softmax_gradient(logits, targets, columns, log_sum, dloss)
        if dx is not None:
            recipe.accumulate(dx, not some.start, weight[some], logits.t())
        if main_grad is not None:
            recipe.accumulate(main_grad[some], fresh, rows, logits)
        del logits
    head.end_use()
    if wgrad:
        sink.register_grad_ready(head.weight)


def _gather(x: Tensor, head: ColumnParallelLinear, label: Label) -> Tensor:
    """Return the inputs of all tokens, [n, h]."""
    gathered = all_gather(x, head.ctx.tp, label=label)[0] if head.ctx.sp else x
    return gathered.flatten(0, -2)


def _chunks(
    rows: Tensor, weight: Tensor, head: ColumnParallelLinear, vocab_size: int
) -> list[tuple[slice, Columns]]:
    """Return the weight's rows of each chunk, and the columns of the vocabulary that they are."""
    width, first = len(weight), head.ctx.tp.rank * len(weight)
    step = max(CHUNK_BYTES // (len(rows) * rows.element_size()) // ALIGNED, 1) * ALIGNED
    starts = range(0, width, step)
    return [(slice(at, min(at + step, width)), (first + at, vocab_size)) for at in starts]
