#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a Llama with tensor, sequence, pipeline and data parallelism and ZeRO 1: all in this file.

    python examples/one_file.py                                       one process
    torchrun --nproc-per-node 8 examples/one_file.py --tp 2 --pp 2    2 x 2 x 2 ranks

It imports torch and nothing else, and reads the bytes of a text file (this one, unless --text names
another). Weft does the same in many files, faster and with more choices; a test trains both for 50
steps on the same batches and compares losses, norms and weights bit for bit
(tests/model/test_one_file.py). Each part says where Weft has it.

    1  ranks          which processes form the tensor-, data- and pipeline-parallel groups
    2  collectives    the only code of the file that communicates
    3  layers         column- and row-parallel matmuls, embedding, norm, RoPE, attention, loss
    4  model          the stage of a Llama that a pipeline rank holds
    5  ZeRO 1         flat weights and gradients; each data-parallel rank updates a share of them
    6  schedule       1F1B: which micro-batch goes forward and which goes backward next
    7  training       data, learning rate, train_step, the loop

    s sequence   b micro-batch   h hidden   a query heads   g key/value heads   d head size
    f ffn hidden   V vocabulary   t tensor-parallel ranks

Communication of one rank in one step:

    where                          verb                 over   shape
    column-parallel forward        all-gather           tp     [s/t, b, h] -> [s, b, h]
    column-parallel backward       all-gather,          tp     the same input once more,
                                   reduce-scatter              [s, b, h] -> [s/t, b, h]
    row-parallel forward           reduce-scatter       tp     [s, b, h] -> [s/t, b, h]
    row-parallel backward          all-gather           tp     [s/t, b, h] -> [s, b, h]
    loss                           all-gather           tp     3 numbers per token
    between stages                 send, receive        pp     [s/t, b, h]
    norm weights' gradients        all-reduce           tp     once a step
    all gradients                  reduce-scatter       dp     once a step
    all weights                    all-gather           dp     once a step
"""

import argparse
import math
import os
import time
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# ---------------------------------------------------------------------------------------------
# 1. Ranks (Weft: mpu/grid.py)
# ---------------------------------------------------------------------------------------------


class Axis:
    """The ranks of this rank's group in one kind of parallelism, in order."""

    def __init__(self, ranks: list[int], rank: int, group: dist.ProcessGroup | None) -> None:
        self.ranks, self.rank, self.size, self.group = ranks, ranks.index(rank), len(ranks), group


class Grid:
    """world = pp x dp x tp ranks; tp varies fastest, as tensor parallelism communicates most.

        rank = (pp rank x dp + dp rank) x tp + tp rank

    Every rank creates every group, in the same order: dist.new_group is a collective.
    """

    def __init__(self, tp: int = 1, pp: int = 1) -> None:
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        if self.world % (tp * pp):
            raise ValueError(f"--tp {tp} x --pp {pp} does not divide {self.world} ranks")
        every = torch.arange(self.world).view(pp, -1, tp)  # [pp, dp, tp]
        self.tp = self._axis(every.reshape(-1, tp))
        self.dp = self._axis(every.transpose(1, 2).reshape(-1, every.shape[1]))
        stages = every.permute(1, 2, 0).reshape(-1, pp)
        self.pp = self._axis(stages)  # for activations
        self.pp_back = self._axis(stages)  # for gradients: NCCL orders the messages of a group

    def _axis(self, rows: Tensor) -> Axis:
        found = None
        for ranks in rows.tolist():
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            if self.rank in ranks:
                found = Axis(ranks, self.rank, group)
        assert found is not None
        return found


# ---------------------------------------------------------------------------------------------
# 2. Collectives (Weft: mpu/comm/collectives.py, and mpu/comm/p2p.py)
# ---------------------------------------------------------------------------------------------

# torch 2.13 renames the two and warns of the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Concatenate the ranks' x along dim 0: [n, ...] -> [t n, ...]."""
    if axis.size == 1:
        return x
    out = x.new_empty((axis.size * len(x), *x.shape[1:]))
    _all_gather(out, x.contiguous(), group=axis.group)
    return out


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Sum the ranks' x and keep this rank's slice of dim 0: [t n, ...] -> [n, ...]."""
    if axis.size == 1:
        return x
    out = x.new_empty((len(x) // axis.size, *x.shape[1:]))
    _reduce_scatter(out, x.contiguous(), group=axis.group)
    return out


def all_reduce(x: Tensor, axis: Axis) -> None:
    """Sum x over the ranks, in place."""
    if axis.size > 1:
        dist.all_reduce(x, group=axis.group)


def sum_in_order(x: Tensor, axis: Axis) -> Tensor:
    """Sum a few numbers over the ranks, in rank order: the same bits on every rank."""
    every = all_gather(x[None], axis)
    total = every[0].clone()
    for part in every[1:]:
        total += part
    return total


class Messages:
    """Sends and receives between neighbouring stages. A send never blocks; `close` waits for all.

    down: send to the next stage (activations), else to the previous one (gradients).
    """

    def __init__(self, axis: Axis, down: bool) -> None:
        step = 1 if down else -1
        self.axis, self.to, self.source = axis, axis.rank + step, axis.rank - step
        self.sent: list[tuple[dist.Work, Tensor]] = []  # keeps tensors alive until they are sent

    def send(self, x: Tensor) -> None:
        """Send x to the neighbour, if there is one."""
        if 0 <= self.to < self.axis.size:
            x = x.detach().contiguous()
            work = dist.isend(x, self.axis.ranks[self.to], group=self.axis.group)
            assert work is not None
            self.sent.append((work, x))

    def receive(self, like: Tensor) -> Tensor | None:
        """Return the neighbour's tensor, shaped like `like`; None if there is no neighbour."""
        if not 0 <= self.source < self.axis.size:
            return None
        x = torch.empty_like(like)
        dist.recv(x, self.axis.ranks[self.source], group=self.axis.group)
        return x

    def close(self) -> None:
        """Wait for every send."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()


# ---------------------------------------------------------------------------------------------
# 3. Layers (Weft: mpu/layers)
# ---------------------------------------------------------------------------------------------


class Parameter(nn.Parameter):
    """A weight with its gradient buffer `main_grad`, in fp32, which `add_grad` writes.

    label: its name, the same on every rank. draw: how to draw its initial values; None: ones.
    partial: its gradient is a partial sum over tp, as for norms, which compute on a part of s.
    """

    label: str
    draw: tuple["Draw", ...] | None
    partial: bool
    main_grad: Tensor
    fresh: bool  # no gradient has been added in this step


def parameter(shape: tuple[int, ...], like: "Sizes", draw: tuple["Draw", ...] | None) -> Parameter:
    """Return a weight without values."""
    param = Parameter(torch.empty(shape, dtype=like.dtype, device=like.device))
    param.draw, param.partial, param.fresh = draw, draw is None, True
    return param


def add_grad(param: Parameter, grad: Tensor) -> None:
    """Add a gradient; the first one of a step overwrites the previous step's."""
    param.main_grad.copy_(grad) if param.fresh else param.main_grad.add_(grad)
    param.fresh = False


def add_wgrad(param: Parameter, dy: Tensor, x: Tensor) -> None:
    """Add dy^T x to the gradient [o, i]: dy [..., o], x [..., i]."""
    dy, x = dy.flatten(0, -2), x.flatten(0, -2)
    onednn = onednn_linear(x)
    if onednn is not None:  # oneDNN packs its second argument: pass the wider one there
        wide = dy.shape[1] > x.shape[1]
        add_grad(param, onednn(x.t(), dy.t()).t() if wide else onednn(dy.t(), x.t()))
    elif x.dtype != param.main_grad.dtype:
        add_grad(param, torch.mm(dy.t(), x))
    elif param.fresh:
        torch.mm(dy.t(), x, out=param.main_grad)
    else:
        param.main_grad.addmm_(dy.t(), x)
    param.fresh = False


def onednn_linear(x: Tensor):
    """Return oneDNN's function for x w^T in fp32 on a CPU, where it is fastest; else None."""
    onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if onednn is None or x.device.type != "cpu" or x.dtype != torch.float32:
        return None
    return lambda a, b: onednn(a, b, None, "none", [], "")


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x w^T: x [..., i], weight [o, i] -> [..., o]."""
    return (onednn_linear(x) or F.linear)(x, weight)


class ColumnParallel(torch.autograd.Function):
    """y = gather(x) w^T, with the rows of w sharded over tp: a rank computes its columns of y.

    Only the shard of x is saved for backward, which gathers it again (Korthikanti et al. 2022).
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Parameter, tp: Axis) -> Tensor:
        """x [s/t, b, i] -> [s, b, o/t]."""
        ctx.save_for_backward(x)
        ctx.weight, ctx.tp = weight, tp
        return product(all_gather(x, tp), weight)

    @staticmethod
    def backward(ctx, dy: Tensor):
        """dy [s, b, o/t] -> dx [s/t, b, i]: the ranks' parts of dx are summed and scattered."""
        (x,) = ctx.saved_tensors
        dx = reduce_scatter(product(dy, ctx.weight.t()), ctx.tp)
        add_wgrad(ctx.weight, dy, all_gather(x, ctx.tp))
        return dx, None, None


class RowParallel(torch.autograd.Function):
    """y = scatter(sum over ranks of x w^T), with the columns of w and x sharded over tp."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Parameter, tp: Axis) -> Tensor:
        """x [s, b, i/t] -> [s/t, b, o]."""
        ctx.save_for_backward(x)
        ctx.weight, ctx.tp = weight, tp
        return reduce_scatter(product(x, weight), tp)

    @staticmethod
    def backward(ctx, dy: Tensor):
        """dy [s/t, b, o] -> dx [s, b, i/t]."""
        (x,) = ctx.saved_tensors
        dy = all_gather(dy, ctx.tp)
        add_wgrad(ctx.weight, dy, x)
        return product(dy, ctx.weight.t()), None, None


class Embed(torch.autograd.Function):
    """Look tokens up in this rank's rows of the vocabulary; sum over tp, and scatter s."""

    @staticmethod
    def forward(ctx, tokens: Tensor, weight: Parameter, tp: Axis) -> Tensor:
        """tokens [s, b] -> [s/t, b, h]. Tokens in another rank's rows give zero on this rank."""
        local = tokens - tp.rank * len(weight)
        ctx.elsewhere = (local < 0) | (local >= len(weight))
        ctx.local, ctx.weight, ctx.tp = local.masked_fill(ctx.elsewhere, 0), weight, tp
        x = F.embedding(ctx.local, weight).masked_fill(ctx.elsewhere[..., None], 0)
        return reduce_scatter(x, tp)

    @staticmethod
    def backward(ctx, dx: Tensor):
        """Gather dx [s/t, b, h]; each rank adds the gradient of its own rows."""
        weight, dx = ctx.weight, all_gather(dx, ctx.tp).masked_fill(ctx.elsewhere[..., None], 0)
        if weight.fresh:
            weight.main_grad.zero_()
        rows = dx.flatten(0, 1).to(weight.main_grad.dtype)
        weight.main_grad.index_add_(0, ctx.local.flatten(), rows)
        weight.fresh = False
        return None, None, None


class RMSNorm(torch.autograd.Function):
    """y = x / sqrt(mean(x^2) + eps) * w over the last dimension, in fp32 (Zhang, Sennrich 2019)."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Parameter, eps: float) -> Tensor:
        """x [s/t, b, h] -> [s/t, b, h]."""
        up = x.to(weight.main_grad.dtype)
        length = torch.linalg.vector_norm(up, dim=-1, keepdim=True)
        r = (length.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, r)
        ctx.weight = weight
        return (up * r * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        """With p = dy * x: dw = sum_n r p;  dx = r (dy * w) - x r^3 (p . w) / h."""
        (x, r), h = ctx.saved_tensors, dy.shape[-1]
        kind, r = r.dtype, r.view(-1, 1)
        rows, grads, w = x.reshape(-1, h).to(kind), dy.reshape(-1, h).to(kind), ctx.weight.to(kind)
        p = grads * rows
        add_grad(ctx.weight, torch.mv(p.t(), r[:, 0]))
        pull = torch.mv(p, w)[:, None] * r.pow(3) / h
        dx = (grads * w * r).addcmul_(rows, pull, value=-1.0)
        return dx.view(x.shape).to(x.dtype), None, None


class Rope(torch.autograd.Function):
    """Rotate q and k by their position (Su et al. 2021): the pairs are elements i and i + d/2."""

    @staticmethod
    def forward(ctx, qkv: Tensor, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
        """qkv [s, b, n, d], of which the first `turned` heads are rotated; cos [s, 1, 1, d/2]."""
        ctx.turn = cos, sin, turned
        return rotate(qkv, cos, sin, turned)

    @staticmethod
    def backward(ctx, dy: Tensor):
        """A rotation's transpose is the rotation by the opposite angle."""
        cos, sin, turned = ctx.turn
        return rotate(dy, cos, -sin, turned), None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
    """Rotate the first `turned` heads of x [s, b, n, d], in the dtype of cos."""
    first, second = x[:, :, :turned].to(cos.dtype).chunk(2, -1)
    ahead = (first * cos).addcmul_(second, sin, value=-1.0)
    behind = (second * cos).addcmul_(first, sin, value=1.0)
    return torch.cat((torch.cat((ahead, behind), -1).to(x.dtype), x[:, :, turned:]), 2)


class CrossEntropy(torch.autograd.Function):
    """Loss of logits whose vocabulary is sharded over tp: no rank holds all logits.

    loss = log(sum_v exp(l_v - m)) + m - l_target, with m the maximum. Each rank computes the
    maximum, the sum and the target's logit over its own columns; one all-gather of three numbers
    per token combines them.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, tp: Axis) -> Tensor:
        """logits [n, V/t], labels [n] -> loss [n], in fp32."""
        wide = logits.float()
        column = labels - tp.rank * logits.shape[1]
        ctx.here = (column >= 0) & (column < logits.shape[1])
        ctx.column = column.masked_fill(~ctx.here, 0)
        top = wide.amax(-1)
        chosen = wide.gather(-1, ctx.column[:, None])[:, 0].masked_fill(~ctx.here, 0.0)
        stats = torch.stack((top, (wide - top[:, None]).exp().sum(-1), chosen))
        every = all_gather(stats[None], tp)  # [t, 3, n]
        peak = every[:, 0].amax(0)
        terms = every[:, 1] * (every[:, 0] - peak).exp()
        total = terms[0].clone()
        for term in terms[1:]:
            total += term
        log_sum = total.log() + peak
        ctx.save_for_backward(logits, log_sum)
        return log_sum - every[:, 2].sum(0)

    @staticmethod
    def backward(ctx, dloss: Tensor):
        """Return dloss (softmax - [column is the target])."""
        logits, log_sum = ctx.saved_tensors
        grad = (logits.float() - log_sum[:, None]).exp() * dloss[:, None]
        grad[torch.arange(len(grad), device=grad.device), ctx.column] -= dloss * ctx.here
        return grad.to(logits.dtype), None, None


# ---------------------------------------------------------------------------------------------
# 4. Model (Weft: model/llama.py)
# ---------------------------------------------------------------------------------------------


class Sizes:
    """The sizes of a Llama, its device and its dtype."""

    def __init__(
        self, vocab: int = 256, h: int = 128, f: int = 352, layers: int = 4, a: int = 4, g: int = 2,
        rope_base: float = 10000.0, eps: float = 1e-5, std: float = 0.02, seed: int = 1234,
        dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu",
    ) -> None:  # fmt: skip
        self.vocab, self.h, self.f, self.layers, self.a, self.g = vocab, h, f, layers, a, g
        self.d, self.rope_base, self.eps, self.std, self.seed = h // a, rope_base, eps, std, seed
        if h % a or self.d % 2 or a % g:
            raise ValueError(
                f"--hidden-size {h} must be an even multiple of --num-attention-heads {a}, and the "
                f"heads a multiple of --num-query-groups {g}"
            )
        self.dtype, self.device = dtype, torch.device(device)


class Draw:
    """A tensor of a checkpoint, of which each rank holds some rows or columns.

    shape: of the whole tensor. dim: the sharded dimension. The whole tensor is drawn with a seed
    that depends on its name and then sharded, so every layout starts from the same model.
    """

    def __init__(self, name: str, shape: tuple[int, int], dim: int, std: float) -> None:
        self.name, self.shape, self.dim, self.std = name, shape, dim, std

    def part(self, seed: int, axis: Axis) -> Tensor:
        """Return this rank's part of the initial values. A million elements share a generator."""
        full = torch.empty(self.shape)
        step = max(1, (1 << 20) // self.shape[1])
        for first in range(0, len(full), step):
            generator = torch.Generator().manual_seed(hash_of(f"{seed}/{self.name}/{first}"))
            full[first : first + step].normal_(0.0, self.std, generator=generator)
        return full.chunk(axis.size, self.dim)[axis.rank]


def hash_of(text: str) -> int:
    """Return a 63-bit number that depends only on the text (FNV-1a)."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value >> 1


class Attention(nn.Module):
    """Grouped-query attention; q, k and v are one column-parallel matmul, sharded by heads."""

    def __init__(self, c: Sizes, tp: Axis, name: str) -> None:
        super().__init__()
        self.c, self.tp, self.heads, self.groups = c, tp, c.a // tp.size, c.g // tp.size
        rows = {"q": c.a * c.d, "k": c.g * c.d, "v": c.g * c.d}
        draws = tuple(Draw(f"{name}.{n}_proj.weight", (r, c.h), 0, c.std) for n, r in rows.items())
        self.qkv = parameter((sum(rows.values()) // tp.size, c.h), c, draws)
        deep = c.std / math.sqrt(2 * c.layers)  # smaller, as it adds to the residual stream
        draw = Draw(f"{name}.o_proj.weight", (c.h, c.a * c.d), 1, deep)
        self.proj = parameter((c.h, c.a * c.d // tp.size), c, (draw,))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [s/t, b, h] -> [s/t, b, h]."""
        turned = self.heads + self.groups
        qkv = ColumnParallel.apply(x, self.qkv, self.tp).unflatten(2, (-1, self.c.d))
        qkv = Rope.apply(qkv, cos, sin, turned).split((self.heads, self.groups, self.groups), 2)
        q, k, v = (each.permute(1, 2, 0, 3) for each in qkv)  # [b, n, s, d]
        grouped = self.heads != self.groups
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return RowParallel.apply(y.permute(2, 0, 1, 3).flatten(2), self.proj, self.tp)


class MLP(nn.Module):
    """down(silu(gate) * up) (Shazeer 2020); gate and up are one column-parallel matmul."""

    def __init__(self, c: Sizes, tp: Axis, name: str) -> None:
        super().__init__()
        self.tp = tp
        names = ("gate", "up")
        draws = tuple(Draw(f"{name}.{n}_proj.weight", (c.f, c.h), 0, c.std) for n in names)
        self.gate_up = parameter((2 * c.f // tp.size, c.h), c, draws)
        deep = c.std / math.sqrt(2 * c.layers)
        self.down = parameter(
            (c.h, c.f // tp.size), c, (Draw(f"{name}.down_proj.weight", (c.h, c.f), 1, deep),)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [s/t, b, h] -> [s/t, b, h]."""
        gate, up = ColumnParallel.apply(x, self.gate_up, self.tp).chunk(2, -1)
        return RowParallel.apply(F.silu(gate) * up, self.down, self.tp)


class Block(nn.Module):
    """One transformer layer, pre-norm."""

    def __init__(self, c: Sizes, tp: Axis, i: int) -> None:
        super().__init__()
        self.eps = c.eps
        self.attention_norm, self.mlp_norm = parameter((c.h,), c, None), parameter((c.h,), c, None)
        self.attention = Attention(c, tp, f"model.layers.{i}.self_attn")
        self.mlp = MLP(c, tp, f"model.layers.{i}.mlp")

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """h [s/t, b, h] -> [s/t, b, h]."""
        h = h + self.attention(RMSNorm.apply(h, self.attention_norm, self.eps), cos, sin)
        return h + self.mlp(RMSNorm.apply(h, self.mlp_norm, self.eps))


class Stage(nn.Module):
    """The part of the model on one pipeline rank: some blocks, on the first rank the embedding, on
    the last the head and the loss.
    """

    def __init__(self, c: Sizes, grid: Grid) -> None:
        super().__init__()
        tp, pp = grid.tp, grid.pp
        cut = {"--num-query-groups": c.g, "--ffn-hidden-size": c.f, "the vocabulary": c.vocab}
        for what, size in cut.items():
            if size % tp.size:
                raise ValueError(f"{what}, {size}, must be a multiple of --tp {tp.size}")
        if c.layers % pp.size:
            raise ValueError(f"--num-layers {c.layers} must be a multiple of --pp {pp.size}")
        self.c, self.tp, self.first, self.last = c, tp, pp.rank == 0, pp.rank == pp.size - 1
        if self.first:
            draw = Draw("model.embed_tokens.weight", (c.vocab, c.h), 0, c.std)
            self.embedding = parameter((c.vocab // tp.size, c.h), c, (draw,))
        each = c.layers // pp.size
        numbers = range(pp.rank * each, (pp.rank + 1) * each)
        self.layers = nn.ModuleDict({str(i): Block(c, tp, i) for i in numbers})
        if self.last:
            self.norm = parameter((c.h,), c, None)
            draw = Draw("lm_head.weight", (c.vocab, c.h), 0, c.std)
            self.head = parameter((c.vocab // tp.size, c.h), c, (draw,))
        self.rope: tuple[Tensor, Tensor] | None = None

    def weights(self) -> list[Parameter]:
        """Return the weights with their names set; those with partial gradients come last."""
        found: list[Parameter] = []
        for name, param in self.named_parameters():
            assert isinstance(param, Parameter)
            param.label = name
            found.append(param)
        return sorted(found, key=lambda p: p.partial)

    def draw(self) -> None:
        """Draw the initial weights: the same model for every layout."""
        with torch.no_grad():
            for param in self.weights():
                if param.draw is None:
                    param.fill_(1.0)
                else:
                    parts = [each.part(self.c.seed, self.tp) for each in param.draw]
                    param.copy_(torch.cat(parts))

    def forward(self, tokens: Tensor, labels: Tensor, hidden: Tensor | None) -> Tensor:
        """Return hidden states [s/t, b, h], or on the last stage the loss [b, s].

        tokens, labels: [b, s]. hidden: output of the previous stage; None on the first.
        """
        cos, sin = self.angles(tokens.shape[1])
        h = Embed.apply(tokens.t(), self.embedding, self.tp) if hidden is None else hidden
        for block in self.layers.values():
            h = block(h, cos, sin)
        if not self.last:
            return h
        h = RMSNorm.apply(h, self.norm, self.c.eps)
        logits = ColumnParallel.apply(h, self.head, self.tp)  # [s, b, V/t]
        loss = CrossEntropy.apply(logits.flatten(0, 1), labels.t().flatten(), self.tp)
        return loss.view(labels.t().shape).t()

    def angles(self, s: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [s, 1, 1, d/2] of position x frequency, rounded once, from fp64."""
        if self.rope is None or len(self.rope[0]) != s:
            c = self.c
            frequency = c.rope_base ** (-torch.arange(0, c.d, 2, dtype=torch.float64) / c.d)
            angle = torch.outer(torch.arange(s, dtype=torch.float64), frequency)[:, None, None]
            self.rope = tuple(t.to(c.device, torch.float32) for t in (angle.cos(), angle.sin()))
        return self.rope


# ---------------------------------------------------------------------------------------------
# 5. ZeRO 1 (Weft: mpu/zero and mpu/optim)
# ---------------------------------------------------------------------------------------------

BLOCK = 1024  # parameters begin at multiples of it; also the block of the global norm


class DistributedOptimizer:
    """AdamW, sharded over the data-parallel ranks (Rajbhandari et al. 2020, stage 1).

        weights   [n]       in the model's dtype; parameters are views of it; whole on every rank
        grads     [n]       fp32, this rank's sum over its micro-batches; main_grads are views of it
        masters   [n/dp]    fp32, for the share that this rank updates, as are AdamW's two moments

    step: sum gradients to their owners -> global norm, clip -> update the share -> gather weights.
    """

    def __init__(
        self, stage: Stage, grid: Grid, betas: tuple[float, float], weight_decay: float, clip: float
    ) -> None:
        self.grid, self.clip, self.params = grid, clip, stage.weights()
        blocks = [-(-p.numel() // BLOCK) for p in self.params]
        blocks[-1] += -sum(blocks) % grid.dp.size  # padding, so that the shares are equal
        n, device = sum(blocks) * BLOCK, stage.c.device
        self.weights = torch.zeros(n, dtype=stage.c.dtype, device=device)
        self.grads = torch.zeros(n, dtype=torch.float32, device=device)
        for i, p in enumerate(self.params):
            here = slice(sum(blocks[:i]) * BLOCK, sum(blocks[:i]) * BLOCK + p.numel())
            p.data = self.weights[here].view(p.shape)
            p.main_grad = self.grads[here].view(p.shape)
        stage.draw()
        # norms come last: their gradients are summed over tp too, and their weights do not decay
        norms = sum(many for p, many in zip(self.params, blocks, strict=True) if not p.partial)
        self.norm_grads = self.grads[norms * BLOCK :]
        share = n // grid.dp.size
        self.masters = self.weights[grid.dp.rank * share :][:share].float()
        self.cut = min(max(norms * BLOCK - grid.dp.rank * share, 0), share)
        self.decays = nn.Parameter(self.masters[: self.cut])
        self.others = nn.Parameter(self.masters[self.cut :])
        groups = [
            {"params": [self.decays], "weight_decay": weight_decay},
            {"params": [self.others], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, betas=betas, eps=1e-8, fused=True)
        self.global_norm = GlobalNorm(stage, grid, self.params, blocks)

    def begin_step(self) -> None:
        """Make the first gradient of each weight overwrite that of the previous step."""
        for param in self.params:
            param.fresh = True

    def step(self, lr: float) -> Tensor:
        """Sum, clip, update, gather; return the norm before clipping."""
        all_reduce(self.norm_grads, self.grid.tp)
        shard = reduce_scatter(self.grads, self.grid.dp)
        norm = self.global_norm(shard)
        if self.clip:
            factor = (self.clip / (norm + 1e-6)).clamp(max=1.0)
            shard.div_((1.0 / factor).float())  # divides, as AdamW's fused kernel does
        self.decays.grad, self.others.grad = shard[: self.cut], shard[self.cut :]
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self.weights.copy_(all_gather(self.masters.to(self.weights.dtype), self.grid.dp))
        return norm


class GlobalNorm:
    """The 2-norm of all gradients, from each rank's share: the same bits in any layout.

    Norms of blocks of fixed size are gathered. Their squares are added in a fixed order: within a
    parameter, then over tp in rank order, then over parameters by name.
    """

    def __init__(
        self, stage: Stage, grid: Grid, params: list[Parameter], blocks: list[int]
    ) -> None:
        self.grid, device = grid, stage.c.device
        block = [name for name, _ in next(iter(stage.layers.values())).named_parameters()]
        every = [f"layers.{i}.{name}" for i in range(stage.c.layers) for name in block]
        every = sorted(f"{name}.weight" for name in [*every, "embedding", "norm", "head"])
        self.count = len(every)
        self.rows = torch.tensor([every.index(f"{p.label}.weight") for p in params], device=device)
        self.blocks = torch.tensor(blocks, device=device)
        first = [grid.tp.rank == 0 or not p.partial for p in params]  # norms count once
        self.counts = torch.tensor(first, device=device).repeat_interleave(self.blocks)

    def __call__(self, shard: Tensor) -> Tensor:
        """Return the norm, in fp64; shard: this rank's share of the summed gradients."""
        norms = torch.linalg.vector_norm(shard.view(-1, BLOCK), dim=1).double()
        squares = all_gather(norms, self.grid.dp).square() * self.counts
        own = torch.segment_reduce(squares, "sum", lengths=self.blocks, unsafe=True)
        every = own.new_zeros(self.count)
        every[self.rows] = sum_in_order(own, self.grid.tp)
        return sum_in_order(every, self.grid.pp).sum().sqrt()


# ---------------------------------------------------------------------------------------------
# 6. Schedule (Weft: mpu/pipeline/schedules.py and engine.py)
# ---------------------------------------------------------------------------------------------


def run_1f1b(stage: Stage, grid: Grid, batches: list[tuple[Tensor, Tensor]], tokens: int) -> Tensor:
    """Run forward and backward of every micro-batch; return the sum of the losses, in fp64.

    A rank first runs as many forwards as there are stages after it, then alternates forwards and
    backwards, so that it holds at most pp - rank micro-batches (Narayanan et al. 2021):

        0  F0 F1 F2 F3 .  .  .  .  .  .  B0 .  B1 .  B2 .  B3
        1  .  F0 F1 F2 .  .  .  .  B0 F3 B1 .  B2 .  B3
        2  .  .  F0 F1 .  .  B0 F2 B1 F3 B2 .  B3
        3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3
    """
    m, warm_up = len(batches), min(len(batches), grid.pp.size - grid.pp.rank - 1)
    down, up = Messages(grid.pp, down=True), Messages(grid.pp_back, down=False)
    (b, s), c = batches[0][0].shape, stage.c
    like = torch.empty((s // grid.tp.size, b, c.h), dtype=c.dtype, device=c.device)
    total = torch.zeros((), dtype=torch.float64, device=c.device)
    held: deque[tuple[Tensor | None, Tensor]] = deque()  # inputs and outputs until their backward

    def forward(i: int) -> None:
        hidden = down.receive(like)
        if hidden is not None:
            hidden.requires_grad_()
        out = stage(*batches[i], hidden)
        if stage.last:
            total.add_(out.detach().sum(dtype=torch.float64))
            out = out.sum() / tokens
        down.send(out)
        held.append((hidden, out))

    def backward() -> None:
        hidden, out = held.popleft()
        out.backward(up.receive(like))  # the last stage receives nothing: it starts from its loss
        if hidden is not None:
            assert hidden.grad is not None
            up.send(hidden.grad)

    for i in range(warm_up):
        forward(i)
    for i in range(warm_up, m):
        forward(i)
        backward()
    for _ in range(warm_up):
        backward()
    down.close()
    up.close()
    return total


# ---------------------------------------------------------------------------------------------
# 7. Training (Weft: pretrain_llama.py)
# ---------------------------------------------------------------------------------------------


def train_step(
    stage: Stage, optimizer: DistributedOptimizer, grid: Grid,
    batches: list[tuple[Tensor, Tensor]], lr: float,
) -> tuple[float, float]:  # fmt: skip
    """Train on this rank's micro-batches of one global batch; return loss and gradient norm."""
    tokens = len(batches) * batches[0][0].numel() * grid.dp.size
    optimizer.begin_step()
    total = run_1f1b(stage, grid, batches, tokens)
    norm = optimizer.step(lr)
    loss = sum_in_order(sum_in_order(total, grid.dp), grid.pp) / tokens
    return loss.item(), norm.item()


def micro_batches(
    text: Tensor, step: int, grid: Grid, batch: int, micro: int, s: int, seed: int, device: object
) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's (tokens, labels), each [micro, s], of the global batch of one step.

    Every rank draws the same places in the text. Micro-batch k of rank r of D begins at row
    (k D + r) micro, so every layout trains on the same global batches.
    """
    generator = torch.Generator().manual_seed(hash_of(f"{seed}/batch/{step}"))
    starts = torch.randint(len(text) - s, (batch,), generator=generator)
    rows = torch.stack([text[i : i + s + 1] for i in starts.tolist()]).long().to(device)
    first = range(grid.dp.rank * micro, batch, grid.dp.size * micro)
    return [(rows[i : i + micro, :-1], rows[i : i + micro, 1:]) for i in first]


def learning_rate(step: int, steps: int, peak: float, warm_up: int) -> float:
    """Return the rate of a step: a linear warm-up, then a cosine to a tenth of the peak."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * done)))


def arguments() -> argparse.Namespace:
    """Parse the flags."""
    p = argparse.ArgumentParser(description="Train a Llama on the bytes of a text.")
    p.add_argument("--tp", type=int, default=1, help="tensor- and sequence-parallel ranks")
    p.add_argument("--pp", type=int, default=1, help="pipeline stages; the other ranks are dp")
    p.add_argument("--text", default=__file__, help="the file whose bytes are the tokens")
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--global-batch-size", type=int, default=16, help="rows of tokens a step")
    p.add_argument("--micro-batch-size", type=int, default=2, help="rows in one forward")
    p.add_argument("--seq-length", type=int, default=128, help="tokens in a row")
    p.add_argument("--hidden-size", type=int, default=128)
    p.add_argument("--ffn-hidden-size", type=int, default=352)
    p.add_argument("--num-layers", type=int, default=4)
    p.add_argument("--num-attention-heads", type=int, default=4)
    p.add_argument("--num-query-groups", type=int, default=2, help="key/value heads")
    p.add_argument("--weight-decay", type=float, default=0.1)
    p.add_argument("--clip-grad", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=1234)
    p.add_argument("--bf16", action="store_true", help="weights in bf16, masters in fp32")
    return p.parse_args()


def check(args: argparse.Namespace, grid: Grid, text: Tensor) -> None:
    """Raise ValueError if rows or tokens do not divide over the ranks, or the text is too short."""
    rows, s = args.micro_batch_size * grid.dp.size, args.seq_length
    if args.global_batch_size % rows:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} must be a multiple of "
            f"--micro-batch-size x data-parallel ranks = {rows}"
        )
    if s % args.tp:
        raise ValueError(f"--seq-length {s} must be a multiple of --tp {args.tp}")
    if len(text) <= s:
        raise ValueError(
            f"--text {args.text} has {len(text)} bytes, and --seq-length {s} needs more"
        )


def main() -> None:
    """Train, and print the first step and every tenth one."""
    args, device = arguments(), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:  # torchrun started this
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        grid = Grid(args.tp, args.pp)
        text = torch.frombuffer(bytearray(Path(args.text).read_bytes()), dtype=torch.uint8)
        check(args, grid, text)
        sizes = Sizes(
            h=args.hidden_size, f=args.ffn_hidden_size, layers=args.num_layers,
            a=args.num_attention_heads, g=args.num_query_groups, seed=args.seed,
            dtype=torch.bfloat16 if args.bf16 else torch.float32, device=device,
        )  # fmt: skip
        stage = Stage(sizes, grid)
    except (ValueError, OSError) as error:
        raise SystemExit(f"one_file.py: {error}") from None
    optimizer = DistributedOptimizer(stage, grid, (0.9, 0.95), args.weight_decay, args.clip_grad)
    began, batch = time.perf_counter(), args.global_batch_size
    for step in range(args.steps):
        batches = micro_batches(
            text, step, grid, batch, args.micro_batch_size, args.seq_length, args.seed, device
        )
        lr = learning_rate(step, args.steps, args.lr, warm_up=10)
        loss, norm = train_step(stage, optimizer, grid, batches, lr)
        if grid.rank == 0 and (step % 10 == 9 or step == 0):
            speed = (step + 1) * batch * args.seq_length / (time.perf_counter() - began)
            print(
                f"step {step + 1:5d}  loss {loss:.4f}  norm {norm:.3f}  lr {lr:.2e}  "
                f"{speed:,.0f} tokens/s",
                flush=True,
            )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
