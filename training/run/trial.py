# SPDX-License-Identifier: Apache-2.0
"""Call, at a run's start, one of each kind of kernel that the run will use, and report failures.

Libraries check the GPU, their versions and the compiler at their first call, and would fail in the
middle of the first step, on every rank, with a traceback. So each rank makes small calls before it
meets the others, with the run's dtypes, head size, vocabulary and recipe on a few tokens, through
the layers' own code. A failure is one sentence: torch's or Triton's message, and how to avoid it.

It takes about a second, and tens of MB. It does not cover: collectives (each group makes its
first one when ranks connect), kernels that are chosen only for large shapes, a fork's own
operations, the overlap kernels, page-locked host memory.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from mpu.layers.attention.blocks import blocks
from mpu.layers.attention.core import CoreAttention
from mpu.layers.attention.kv_exchange import ContextExchange, Ring
from mpu.layers.attention.max_logits import head_maxima_of, max_logits_of, note_maxima, note_rows
from mpu.layers.attention.shards import batch_shards
from mpu.layers.context_attention import core_attention_of
from mpu.layers.cross_entropy import vocab_parallel_cross_entropy
from mpu.layers.dispatch import Capacity, count_of, dispatcher_of
from mpu.layers.experts import Counts, Experts, RouterLinear
from mpu.layers.fused import ResidualRMSNorm, swiglu
from mpu.layers.linear import ColumnParallelLinear, Recipe, RowParallelLinear
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.layers.qkv import qkv_linear
from mpu.layers.rope import rope_frequencies, rope_table
from mpu.optim.interface import Parts
from mpu.optim.muon import Muon
from mpu.optim.newton_schulz import orthogonalise
from mpu.optim.optimizer import multiply_rows
from training.flags.compute_rules import attention_works, exchanges_blocks
from training.settings.config import Config, UsageError
from training.settings.float8_layers import recipe_of
from training.settings.layer_options import context_of, main_grads_dtype
from training.settings.update_rules import optimizer_groups

TOKENS = 256  # of a call: more than a block of any kernel, and a multiple of float8's
WITHOUT = "pip uninstall triton makes the run use torch's slower operations"


def agreed(device: torch.device) -> dict[str, str]:
    """Return {name in messages: value} that all ranks must share: why Triton cannot run, if so."""
    return {"Triton's error": available.why_not()} if device.type == "cuda" else {}


class Trial(NamedTuple):
    """A trial call. what: its kind. avoid: what to do if it fails."""

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
                torch.cuda.synchronize(device)  # raises errors of kernels
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
    yield from _matmuls(f"in {name}", Recipe(ctx.on_gpu), ctx, sums)
    if config.float8.fp8_format is not None:
        what = f"of --fp8-recipe {config.float8.fp8_recipe}"
        yield from _matmuls(what, recipe_of(config, ctx), ctx, sums)
    other = "auto" if p.attention_backend != "auto" else "unfused"
    apart = replace(ctx, log_max_attention_logit=False, qk_clip=None)  # which are tried below
    for work in attention_works(config):
        yield Trial(
            f"attention of {work} by --attention-backend {p.attention_backend}, heads of "
            f"{config.model.kv_channels} in {name}",
            f"try --attention-backend {other}",
            partial(_attention, config, apart, work),
        )
    if ctx.log_max_attention_logit or ctx.qk_clip is not None:
        flag = "--log-max-attention-logit" if ctx.qk_clip is None else "--qk-clip"
        avoid = f"omit {flag}" + f"; {WITHOUT}" * kernels
        what = f"the largest attention logit of {flag}, heads of {config.model.kv_channels} in "
        yield Trial(what + name, avoid, lambda: _maxima(config, ctx))
    yield Trial("SwiGLU", own, lambda: _backward(swiglu, _numbers(ctx, TOKENS, 1, 2 * TOKENS)))
    if config.float8.fp8_format is not None and config.float8.fp8_recipe != "delayed":
        recipe = recipe_of(config, ctx)
        if recipe.follows_swiglu:
            what = f"SwiGLU between matmuls of --fp8-recipe {config.float8.fp8_recipe}"
            yield Trial(what, own, lambda: _between(ctx, recipe))
    if config.moe.experts:
        yield from _mixture(config, ctx)
    yield Trial("the cross entropy", own, lambda: _loss(config, ctx))
    if ctx.loss_in_chunks is not None:
        avoid = "omit --fused-linear-cross-entropy"
        yield Trial("the loss of --fused-linear-cross-entropy", avoid, lambda: _loss_in_chunks(ctx))
    if not p.optimizer_cpu_offload:
        avoid = "use --optimizer-backend torch" if p.optimizer_backend != "torch" else own
        what = f"the update of --optimizer-backend {p.optimizer_backend}"
        yield Trial(what, avoid, lambda: _update(config, ctx))
    rule = optimizer_groups(config)["matrix"].rule
    if isinstance(rule, Muon):
        wire = str(rule.wire(ctx.accumulate)).removeprefix("torch.")
        avoid = "use --optimizer adam"
        what = f"the Newton-Schulz iterations of --optimizer muon in {wire}"
        yield Trial(what, avoid, partial(_newton_schulz, rule, ctx))


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
    avoid = "omit --fp8-format, or use another --fp8-recipe" if float8 else "no flag avoids it"

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


def _between(ctx: LayerContext, recipe: Recipe) -> None:
    """SwiGLU that produces the operands of the next layer, and in backward of the previous one."""
    gate_up = ColumnParallelLinear(TOKENS, (TOKENS, TOKENS), ctx=ctx, recipe=recipe)
    down = RowParallelLinear(TOKENS, TOKENS, ctx=ctx, recipe=recipe)
    for layer in (gate_up, down):
        layer.weight.detach().fill_(1 / TOKENS)
    _backward(lambda x: swiglu(x, gate_up, down), _numbers(ctx, TOKENS, 1, TOKENS))


def _attention(config: Config, ctx: LayerContext, work: Work) -> None:
    """RoPE and attention, forward and backward, of this rank's heads; where cp exchanges blocks,
    attention to a rank's own keys as at cp 2: a triangle and a whole block, merged.
    """
    m, t = config.model, config.parallel.tensor_model_parallel_size
    heads, groups, d = m.num_attention_heads // t, max(1, m.num_query_groups // t), m.kv_channels
    if exchanges_blocks(config):
        ranges = batch_shards(2, ((2 * TOKENS,),))
        core = CoreAttention(config.parallel.attention_backend, card_of(ctx.device))
        q, k, v = (_numbers(ctx, TOKENS, 1, n, d) for n in (heads, groups, groups))
        way = Ring(ctx.grid.cp, ranges, (2 * TOKENS,), 0, core.kernel(q, v, work))
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


def _maxima(config: Config, ctx: LayerContext) -> None:
    """The largest logits of this rank's heads in a row, in documents, and in blocks of a row; then
    the rows that QK-clip multiplies.
    """
    m, t = config.model, config.parallel.tensor_model_parallel_size
    heads, groups, d = m.num_attention_heads // t, max(1, m.num_query_groups // t), m.kv_channels
    qkv = _numbers(ctx, TOKENS, 1, heads + 2 * groups, d).detach()
    q, k, _ = (x.permute(1, 2, 0, 3) for x in qkv.split([heads, groups, groups], 2))
    every, maxima = max_logits_of(ctx), head_maxima_of(ctx)
    assert every is not None and maxima is not None
    noted = maxima.of(heads)
    packed = PackedSeqParams.of((TOKENS // 4, TOKENS - TOKENS // 4)).to(ctx.device)
    for documents in (None, packed):
        note_rows(noted, q, k, documents, 0)
    half = TOKENS // 2
    note_maxima(noted, q[:, :, half:], k, blocks(range(half, TOKENS), (TOKENS,)), half)
    if ctx.qk_clip is not None:
        qkv_linear(TOKENS, (heads * d, groups * d, groups * d), ctx=ctx)
        every.end_step(torch.zeros((), device=ctx.device))
        for param, factors in every.row_factors():
            multiply_rows(param.detach().view(-1), 0, TOKENS, factors)


def _mixture(config: Config, ctx: LayerContext) -> Iterator[Trial]:
    """Yield the calls of a mixture of experts, with small hidden sizes that are divisible by the
    same powers of two as the run's.
    """
    m, p, options = config.moe, config.parallel, ctx.experts
    e, k = m.experts, m.moe_router_topk
    h = _small(config.model.hidden_size)
    f = _small(m.moe_ffn_hidden_size or config.model.ffn_hidden_size)
    kind = dispatcher_of(options, k, p.expert_model_parallel_size)

    def scores_of(x: Tensor, router: RouterLinear) -> Tensor:
        logits = router(x)
        return logits.sigmoid() if m.moe_router_score_function == "sigmoid" else logits.softmax(1)

    def route() -> None:
        router = RouterLinear(h, e, ctx=ctx)
        router.weight.detach().fill_(1 / h)
        scores = scores_of(_numbers(ctx, TOKENS, h), router)
        choice = torch.sort(scores.detach(), dim=1, descending=True, stable=True).indices[:, :k]
        scores.gather(1, choice).sum().backward()

    def dispatch() -> None:
        """The last expert gets no rows, unless each token must choose it."""
        first = torch.arange(TOKENS, device=ctx.device)[:, None]
        choice = (first + torch.arange(k, device=ctx.device)) % max(k, e - 1)
        load, capacity = count_of(choice, e), None
        weights = torch.ones(choice.shape, dtype=ctx.accumulate, device=ctx.device)
        if options.capacity_factor is not None:
            padded = options.pad_to_capacity
            capacity = Capacity.of(choice, load, options.capacity_factor, weights, padded)
        x, d = _numbers(ctx, TOKENS, h), kind(e, ctx.grid.ep, "trial", ctx.interleaver)
        plan = d.plan(choice, load, capacity)
        y = d.combine(d.finish(d.start(x, plan), plan), weights.requires_grad_(), plan)
        y.backward(torch.ones_like(y))

    def multiply() -> None:
        """Run twice, as the second gradient is added to the first; one expert has no rows."""
        rows = (5, 0, TOKENS, 3)[: e // p.expert_model_parallel_size]
        counts = Counts.of(rows, torch.tensor(rows, device=ctx.device))
        experts = Experts(len(rows), h, f, ctx=ctx)
        for linear in (experts.gate_up, experts.down):
            linear.weight.detach().fill_(1 / h)
        for _ in range(2):
            _backward(lambda x: experts(x, counts), _numbers(ctx, sum(rows), h))

    narrow, sums = (str(x).removeprefix("torch.") for x in (ctx.dtype, ctx.accumulate))
    score = f"--moe-router-score-function {m.moe_router_score_function}"
    yield Trial(f"the router of {score}, in {sums}", "no flag avoids it", route)
    several = p.expert_model_parallel_size > 1
    avoid = "use another --moe-token-dispatcher-type" if several else "no flag avoids it"
    what = f"the dispatch and combine ({kind.__name__}) of --moe-router-topk {k}"
    yield Trial(what, avoid, dispatch)
    what = f"the grouped matmul of experts, [n, {h}] x [{h}, {f}] in {narrow}"
    avoid = "no flag avoids it"
    if ctx.dtype == torch.bfloat16:
        avoid = "without --bf16 each expert has its own matmul"
        if h % 8 or f % 8:
            avoid += "; --hidden-size and --moe-ffn-hidden-size in multiples of 8 may avoid it"
    yield Trial(what, avoid, multiply)


def _small(size: int) -> int:
    """Return a size below 512 with the same remainder modulo 256."""
    return size if size < 512 else 256 + size % 256


def _loss_in_chunks(ctx: LayerContext) -> None:
    """The output layer and the loss of eight tokens, forward and backward, in one chunk."""
    assert ctx.loss_in_chunks is not None
    labels = torch.zeros((8, 1), dtype=torch.int64, device=ctx.device)
    head = ColumnParallelLinear(TOKENS, (TOKENS,), ctx=ctx)
    head.weight.detach().fill_(1 / TOKENS)
    loss = ctx.loss_in_chunks
    _backward(lambda x: loss(head, x, labels, TOKENS), _numbers(ctx, 8, 1, TOKENS))


def _newton_schulz(rule: Muon, ctx: LayerContext) -> None:
    """The iterations of a small matrix."""
    matrix = torch.ones((TOKENS, 2 * TOKENS), dtype=rule.wire(ctx.accumulate), device=ctx.device)
    orthogonalise(matrix, rule.coefficients)


def _loss(config: Config, ctx: LayerContext) -> None:
    """The loss of eight tokens, forward and backward, over this rank's part of the vocabulary."""
    vocabulary = (config.model.vocab_size or 1024) // config.parallel.tensor_model_parallel_size
    labels = torch.zeros((8, 1), dtype=torch.int64, device=ctx.device)
    _backward(
        lambda x: vocab_parallel_cross_entropy(x, labels, vocabulary, ctx),
        _numbers(ctx, 8, 1, vocabulary),
    )


def _update(config: Config, ctx: LayerContext) -> None:
    """One update of a small segment by the matrices' rule, or by AdamW if that needs whole ones."""
    groups = optimizer_groups(config)
    rule = groups["matrix"].rule
    rule = groups["vector"].rule if rule.needs_full_matrices else rule
    segment = torch.ones(1024, dtype=ctx.accumulate, device=ctx.device, requires_grad=True)
    segment.grad = torch.ones_like(segment)
    group = {"name": "matrix", "params": [segment], "weight_decay": 0.1, "decoupled": False}
    one = torch.ones((), dtype=torch.float32, device=ctx.device)
    rule.updater(Parts([group])).step(one, torch.zeros_like(one))
