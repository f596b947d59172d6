# SPDX-License-Identifier: Apache-2.0
"""Call, at a run's start, one of each kind of kernel that the run will use, and say what fails.

Libraries look at a GPU, at their own versions and at a compiler when they are first called: in the
middle of the first step, on every rank, with a traceback. So each rank makes small calls before it
meets the others, with the run's dtypes, head size, vocabulary and recipe on a few tokens, through
the layers' own code. A failure is one sentence: torch's or Triton's own, and what avoids it.

It takes about a second, and tens of MB. It does not cover: collectives (each group makes its
first one when ranks connect), kernels that are chosen by a large shape, a fork's own operations,
CUDA graphs, the overlap kernels, host memory that is page-locked.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mpu.context import LayerContext
from mpu.gradients import GradientSink
from mpu.grid import Grid
from mpu.kernels import available
from mpu.launch import Launch
from mpu.layers.attention.backends import Work, card_of
from mpu.layers.attention.core import CoreAttention
from mpu.layers.attention.kv_exchange import ContextExchange, Ring
from mpu.layers.attention.shards import batch_shards
from mpu.layers.context_attention import core_attention_of
from mpu.layers.cross_entropy import vocab_parallel_cross_entropy
from mpu.layers.fused import ResidualRMSNorm, swiglu
from mpu.layers.linear import Recipe
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.layers.rope import rope_frequencies, rope_table
from mpu.optim.interface import Parts
from training.config import Config, UsageError
from training.float8_layers import recipe_of
from training.layer_options import context_of, main_grads_dtype
from training.update_rules import optimizer_groups

TOKENS = 256  # of a call: more than a block of any kernel, and a multiple of float8's
WITHOUT = "without Triton, torch's slower operations are used: pip uninstall triton"


def agreed(device: torch.device) -> dict[str, str]:
    """Return what must be the same on all ranks, by its name in messages: whether Triton runs."""
    return {"what keeps Triton from running": available.why_not()} if device.type == "cuda" else {}


class Trial(NamedTuple):
    """A call. what: its kind. avoid: what to do where it fails."""

    what: str
    avoid: str
    call: Callable[[], object]


def try_calls(config: Config, device: torch.device, note: Callable[[str], None]) -> None:
    """Make the calls of a run on this rank's device; note how many, and how long they took.

    Raises UsageError for the first that fails.
    """
    begin, count = time.perf_counter(), 0
    for trial in trials(config, device):
        try:
            trial.call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # an error comes with the wait
        except Exception as error:  # libraries raise anything
            why = available.message_of(error)
            raise UsageError(f"{trial.what} fails on {device}: {why}; {trial.avoid}") from error
        count += 1
    note(f"trial calls: {count} on {device}, in {time.perf_counter() - begin:.1f} s")


def trials(config: Config, device: torch.device) -> Iterator[Trial]:
    """Yield the calls of a run, in the order of a step. Nothing is allocated before a call."""
    p, name = config.parallel, str(config.run.dtype).removeprefix("torch.")
    sums = main_grads_dtype(config)
    ctx = context_of(config, Grid(launch=Launch()), device, GradientSink(sums))
    kernels = device.type == "cuda" and not available.why_not()
    own = WITHOUT if kernels else "no flag avoids it"
    avoid = own if p.norm_backend == "weft" else "use --norm-backend weft"
    yield Trial(f"the norm of --norm-backend {p.norm_backend}", avoid, lambda: _norm(config, ctx))
    yield from _matmuls(f"in {name}", Recipe(), ctx, sums)
    if config.float8.fp8_format is not None:
        what = f"of --fp8-recipe {config.float8.fp8_recipe}"
        yield from _matmuls(what, recipe_of(config, ctx), ctx, sums)
    other = "auto" if p.attention_backend != "auto" else "unfused"
    for work in _works(config):
        yield Trial(
            f"attention of {work} by --attention-backend {p.attention_backend}, heads of "
            f"{config.model.kv_channels} in {name}",
            f"try --attention-backend {other}",
            partial(_attention, config, ctx, work),
        )
    yield Trial("SwiGLU", own, lambda: _backward(swiglu, _numbers(ctx, TOKENS, 1, 2 * TOKENS)))
    yield Trial("the cross entropy", own, lambda: _loss(config, ctx))
    if not p.optimizer_cpu_offload:
        avoid = "use --optimizer-backend torch" if p.optimizer_backend != "torch" else own
        what = f"the update of --optimizer-backend {p.optimizer_backend}"
        yield Trial(what, avoid, lambda: _update(config, ctx))


def _numbers(ctx: LayerContext, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=ctx.dtype, device=ctx.device).requires_grad_()


def _backward(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    y = function(x)
    y.backward(torch.ones_like(y))


def _norm(config: Config, ctx: LayerContext) -> None:
    """Forward and backward of a norm, with the add before it; the weight's gradient twice."""
    norm = ResidualRMSNorm(config.model.hidden_size, ctx=ctx, eps=config.model.norm_epsilon)
    with torch.no_grad():
        norm.weight.fill_(1.0)
    for _ in range(2):
        x = _numbers(ctx, 4, 1, config.model.hidden_size)
        _backward(lambda x: norm(x, torch.ones_like(x))[0], x)


def _matmuls(what: str, recipe: Recipe, ctx: LayerContext, sums: torch.dtype) -> Iterator[Trial]:
    """Yield the three products of a layer, each of 256 x 256 by 256 x 256."""
    float8 = "--fp8" in what
    avoid = (
        "omit --fp8-format, or use another --fp8-recipe" if float8 else "no flag avoids it"
    )

    def operands(role: str, cut: str, weight: str, cut_of_weight: str) -> tuple[Tensor, Tensor]:
        x, w = _numbers(ctx, 2, TOKENS, TOKENS).detach()
        return recipe.operand(x, role, cut), recipe.operand(w, weight, cut_of_weight)

    def wgrad() -> None:
        x, dy = _numbers(ctx, 2, TOKENS, TOKENS).detach()
        rows = (recipe.operand(x, "x", "sp"), recipe.operand(dy, "dy", "k"))
        x, dy = recipe.for_wgrad(x, rows[0]), recipe.for_wgrad(dy, rows[1])
        main_grad = torch.zeros((TOKENS, TOKENS), dtype=sums, device=ctx.device)
        for fresh in (True, False):
            recipe.accumulate(main_grad, fresh, x, dy)

    yield Trial(f"the forward matmul {what}", avoid,
                lambda: recipe.product(*operands("x", "sp", "w", "rows")))  # fmt: skip
    yield Trial(f"the matmul {what} of the input's gradient (dgrad)", avoid,
                lambda: recipe.dgrad(*operands("dy", "k", "wt", "k")))  # fmt: skip
    narrow = str(sums).removeprefix("torch.")
    if float8:
        avoid = "use --fp8-wgrad-bf16, or omit --fp8-format"
    elif sums != ctx.dtype:
        avoid = "use --main-grads-dtype bf16"
    yield Trial(f"the matmul {what} of the weight's gradient (wgrad), added in {narrow}", avoid,
                wgrad)  # fmt: skip


def _works(config: Config) -> Iterator[Work]:
    """Yield what attends in a run."""
    documents = config.data.reset_attention_mask
    if config.parallel.context_parallel_size > 1 and config.parallel.attention_backend != "te":
        yield "blocks"
        if "a2a" not in config.parallel.cp_comm_type:
            return
    yield "documents" if documents else "rows"


def _attention(config: Config, ctx: LayerContext, work: Work) -> None:
    """RoPE and attention, forward and backward, of this rank's heads. blocks: a rank's own keys,
    as at cp 2: a triangle and a whole block, merged.
    """
    m, t = config.model, config.parallel.tensor_model_parallel_size
    heads, groups, d = m.num_attention_heads // t, max(1, m.num_query_groups // t), m.kv_channels
    if work == "blocks":
        ranges = batch_shards(2, ((2 * TOKENS,),))
        core = CoreAttention(config.parallel.attention_backend, card_of(ctx.device))
        q, k, v = (_numbers(ctx, TOKENS, 1, n, d) for n in (heads, groups, groups))
        way = Ring(ctx.grid.cp, ranges, (2 * TOKENS,), 0, core.kernel(q, "blocks"))
        y = ContextExchange.apply(q, k, v, way)
        y.backward(torch.ones_like(y))
        return
    packed = PackedSeqParams.of((TOKENS // 4, TOKENS - TOKENS // 4)).to(ctx.device)
    cos, sin = rope_table(rope_frequencies(d, m.rotary_base), TOKENS, ctx.accumulate, ctx.device)
    attend = core_attention_of(ctx)
    documents = packed if work == "documents" else None
    _backward(
        lambda qkv: attend(qkv, cos, sin, heads, groups, documents),
        _numbers(ctx, TOKENS, 1, (heads + 2 * groups) * d),
    )


def _loss(config: Config, ctx: LayerContext) -> None:
    """The loss of eight tokens, forward and backward, over this rank's part of the vocabulary."""
    vocabulary = (config.model.vocab_size or 1024) // config.parallel.tensor_model_parallel_size
    labels = torch.zeros((8, 1), dtype=torch.int64, device=ctx.device)
    _backward(
        lambda x: vocab_parallel_cross_entropy(x, labels, vocabulary, ctx),
        _numbers(ctx, 8, 1, vocabulary),
    )


def _update(config: Config, ctx: LayerContext) -> None:
    """One update of a small segment by the rule of matrices, or AdamW for one of whole matrices."""
    groups = optimizer_groups(config)
    rule = groups["matrix"].rule
    rule = groups["vector"].rule if rule.needs_full_matrices else rule
    segment = torch.ones(1024, dtype=ctx.accumulate, device=ctx.device, requires_grad=True)
    segment.grad = torch.ones_like(segment)
    narrow = torch.ones(1024, dtype=ctx.dtype, device=ctx.device)
    rounded = {} if ctx.dtype == ctx.accumulate else {segment: narrow}
    group = {"name": "matrix", "params": [segment], "weight_decay": 0.1, "decoupled": False}
    one = torch.ones((), dtype=torch.float32, device=ctx.device)
    rule.updater(Parts([group], rounded)).step(one, torch.zeros_like(one))
