# SPDX-License-Identifier: Apache-2.0
"""Linear layers in float8 against an oracle in fp64, and their rows over every layout and path."""

import itertools
import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from mpu.comm.collectives import all_reduce
from mpu.context import LayerContext
from mpu.gradients import GradientSink, run_deferred
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.layers.attention.shards import shards
from mpu.layers.float8.recipe import FORMATS, Float8, format_of_dy, use_float8
from mpu.layers.float8.rows import BLOCKS, E4M3, Format, codes, decode, remade, scale_of, scales
from mpu.layers.fused import swiglu
from mpu.layers.linear import ColumnParallelLinear, Recipe, RowParallelLinear, use_overlap
from mpu.module_tracker import INPUT, OUTPUT, OUTPUT_GRAD, Event, ModuleTracker
from mpu.overlap.choices import OverlapMap
from tests.sampling import sampled

S, B, IN, SECTIONS = 32, 4, 512, (512, 1024)  # 128 tokens; local sizes of 128 at tp 4
OUT = sum(SECTIONS)
RECIPES = [*itertools.product(BLOCKS, FORMATS)]
FP64 = torch.float64


def full(name: str, *shape: int) -> Tensor:
    """Numbers of many magnitudes: rows, columns and single ones stand out."""
    g = torch.Generator().manual_seed(sum(map(ord, name)))
    x = torch.randn(shape, dtype=FP64, generator=g)
    x *= torch.randn(shape[-1], dtype=FP64, generator=g).exp()
    x *= torch.randn((*shape[:-1], 1), dtype=FP64, generator=g).exp()
    return torch.where(torch.rand(shape, generator=g) < 1e-3, 50 * x, x)


def nearest(x: Tensor, form: Format) -> Tensor:
    """The code nearest to each number in fp64, of two as near the even one."""
    every = torch.arange(128, dtype=torch.uint8).view(form.dtype).double()
    every = every[every.isfinite()]  # code n has the n-th number
    above = torch.searchsorted(every, x.abs().contiguous()).clamp(max=len(every) - 1)
    below = (above - 1).clamp(min=0)
    up, down = every[above] - x.abs(), x.abs() - every[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return every[code].copysign(x)


def rounded(x: Tensor, form: Format, block: int, whole: bool, square: bool = False) -> Tensor:
    """The oracle: x [n, k] as float8 holds it, scaled block by block along k, in fp64."""
    out, n, k = torch.empty_like(x, dtype=FP64), *x.shape
    step = (n if whole else block if square else 1), block or k
    for i, j in itertools.product(range(0, n, step[0]), range(0, k, step[1])):
        part = x[i : i + step[0], j : j + step[1]].double()
        top = part.abs().max().item()
        scale = 2.0 ** math.ceil(math.log2(top / form.top)) if top else 1.0
        out[i : i + step[0], j : j + step[1]] = nearest(part / scale, form)
        out[i : i + step[0], j : j + step[1]] *= scale
    return out


def oracle(x, w, dy, scaling: str, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx, dw of x [n, i], w [o, i], dy [n, o] from rounded numbers, multiplied in fp64."""
    block, form = BLOCKS[scaling], format_of_dy(scaling, name)
    ways = dict(block=block, whole=scaling == "tensorwise")
    square = scaling == "blockwise"
    x8, dy8 = rounded(x, E4M3, **ways), rounded(dy, form, **ways)
    w8 = rounded(w, E4M3, **ways, square=square)
    wt8 = rounded(w8.t(), E4M3, **ways, square=square)
    xt8, dyt8 = rounded(x8.t(), E4M3, **ways), rounded(dy8.t(), form, **ways)
    return x8 @ w8.t(), dy8 @ wt8.t(), dyt8 @ xt8.t()


DTYPES = (torch.bfloat16, torch.float32, FP64)


@pytest.mark.parametrize(
    "scaling, name, dtype",
    sampled([(*recipe, DTYPES[i % 3]) for i, recipe in enumerate(RECIPES)], 4),
)
def test_forward_dgrad_and_wgrad_are_those_of_the_oracle(scaling, name, dtype):
    accumulate = FP64 if dtype == FP64 else torch.float32
    ctx = LayerContext(dtype=dtype, accumulate=accumulate, sink=GradientSink(accumulate))
    layer = ColumnParallelLinear(256, 384, ctx=ctx, recipe=Float8(scaling, name, ctx))
    w, x, dy = full("w", 384, 256), full("x", S, B, 256), full("dy", S, B, 384)
    w, x, dy = (t.to(dtype) for t in (w, x, dy))
    with torch.no_grad():
        layer.weight.copy_(w)
    x.requires_grad_()
    for _ in range(2):  # the second gradient is added to the first
        y = layer(x)
        x.grad = None
        y.backward(dy)
    dw = ctx.sink.main[layer.weight] / 2
    want = oracle(x.detach().flatten(0, 1), w, dy.flatten(0, 1), scaling, name)
    bits = {torch.float32: 22, torch.bfloat16: 8, FP64: 50}[dtype]
    assert y.dtype == x.grad.dtype == dtype
    for got, wanted, exact in zip((y, x.grad, dw), want, (False, False, True), strict=True):
        got = got.double().reshape(wanted.shape)
        tolerance = 2.0 ** -(22 if exact and bits < 22 else bits)
        assert (got - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("scaling, name", sampled(RECIPES, 3))
def test_rows_are_the_oracles_numbers(scaling, name):
    ctx = LayerContext(dtype=FP64, accumulate=FP64)
    recipe, form = Float8(scaling, name, ctx), format_of_dy(scaling, name)
    ways = dict(block=BLOCKS[scaling], whole=scaling == "tensorwise")
    for role, x in (
        ("x", full("x", 128, 256)),
        ("dy", full("dy", 128, 384)),
        ("w", full("w", 256, 128)),
        ("wt", full("w", 256, 128)),
    ):
        kind = form if role == "dy" else E4M3
        square = scaling == "blockwise" and role in ("w", "wt")
        given = rounded(x, kind, **ways, square=square).t() if role == "wt" else x
        wanted = rounded(given, kind, **ways, square=square)
        rows = recipe.operand(x, role, "rows")
        assert torch.equal(decode(rows, recipe.block, kind, FP64), wanted), role


@pytest.mark.parametrize("scaling, name", RECIPES)
def test_rows_made_again_change_only_what_underflows(scaling, name):
    recipe, form = Float8(scaling, name, LayerContext()), format_of_dy(scaling, name)
    rows = recipe.operand(full("dy", 128, 256), "dy", "rows")
    numbers = decode(rows, recipe.block, form, FP64).t()
    again = remade(rows, recipe.block, form, scaling == "tensorwise")
    found = decode(again, recipe.block, form, FP64)
    scale = scale_of(scales(again, recipe.block))
    least = scale.repeat_interleave(128 // scale.shape[1], 1) * torch.finfo(form.dtype).tiny
    changed = found != numbers
    assert (numbers[changed].abs() < least[changed]).all()
    assert changed.any() == (scaling != "tensorwise" and form is E4M3)
    if scaling == "tensorwise":
        assert torch.equal(
            codes(again, 0, form).view(torch.uint8), codes(rows, 0, form).view(torch.uint8).t()
        )


BETWEEN = [*zip(BLOCKS, itertools.cycle(((1, 1), (0, 1), (1, 0))), strict=False)]


@pytest.mark.parametrize("scaling, trains", sampled(BETWEEN, len(BETWEEN)))
def test_swiglu_between_two_linears_has_the_bits_of_all_three(scaling, trains):
    def run(between: bool) -> list[Tensor]:
        ctx = LayerContext(dtype=torch.bfloat16, accumulate=torch.float32)
        recipe, results = Float8(scaling, "hybrid", ctx), list[Tensor]()
        gate_up = ColumnParallelLinear(256, (384, 384), ctx=ctx, recipe=recipe)
        down = RowParallelLinear(384, 256, ctx=ctx, recipe=recipe)
        for i, layer in enumerate((gate_up, down)):
            layer.weight.data.copy_(full(f"w{i}", *layer.weight.shape) / 16)
            layer.weight.requires_grad_(bool(trains[i]))
        for deferred in (False, True):
            x = full("x", S, B, 256).bfloat16().requires_grad_()
            y = swiglu(x, gate_up, down) if between else down(swiglu(gate_up(x)))
            ctx.queue.defer() if deferred else None
            y.backward(full("dy", S, B, 256).bfloat16())
            run_deferred(ctx.queue.take()) if deferred else None
            results += [y.detach(), x.grad]
        with torch.no_grad():
            some = x[:3]
            results += [swiglu(some, gate_up, down) if between else down(swiglu(gate_up(some)))]
        return [*results, *ctx.sink.main.values()]

    found, want = run(True), run(False)
    assert len(found) == len(want) == 5 + sum(trains)
    for got, wanted in zip(found, want, strict=True):
        assert wanted.isfinite().all() and torch.equal(got, wanted)


def test_swiglus_result_is_made_where_it_is_read():
    ctx, made = LayerContext(dtype=torch.bfloat16), list[str]()
    recipe = Float8("blockwise", "e4m3", ctx)
    model = nn.ModuleDict({
        "gate_up": ColumnParallelLinear(128, (128, 128), ctx=ctx, recipe=recipe),
        "down": RowParallelLinear(128, 128, ctx=ctx, recipe=recipe),
    })  # fmt: skip
    for layer in model.values():
        layer.weight.data.normal_()
    x = torch.randn(128, 1, 128).bfloat16().requires_grad_()

    def read(event: Event) -> None:
        made.extend(event.name for each in event.tensors if each.isfinite().all())

    y = swiglu(x, *model.values())
    model.down.register_forward_pre_hook(lambda _, given: made.append(str(given[0].stride())))
    swiglu(x, *model.values())
    assert made == ["(0, 0, 0)"]  # one number in memory
    made.clear()
    readers = dict.fromkeys((INPUT, OUTPUT, OUTPUT_GRAD), read)
    tracker = ModuleTracker(model, ctx.queue, ctx.sink, readers)
    again = swiglu(x, *model.values())
    again.sum().backward()
    tracker.close()
    assert torch.equal(again, y) and Counter(made) == {"gate_up": 3, "down": 3, "(128, 128, 1)": 1}


class Seen(Float8):
    """Notes the rows that it makes, and what wgrad takes of x and dy."""

    def operand(self, x: Tensor, role: str, cut: str) -> Tensor:
        rows = super().operand(x, role, cut)
        self.seen[role] = rows.flatten(0, -2)
        return rows

    def accumulate(self, main_grad, fresh, x, dy, turned="") -> None:
        self.seen["wgrad x"], self.seen["wgrad dy"] = x.clone(), dy.clone()
        super().accumulate(main_grad, fresh, x, dy, turned)

    def of_each_number(self, role: str) -> Tensor:
        """Code and scale of each number of the rows: uint8 [n, k, 2]."""
        form = self.dy if "dy" in role else E4M3
        code = codes(self.seen[role], self.block, form).view(torch.uint8)
        byte = scales(self.seen[role], self.block)
        return torch.stack([code, byte.repeat_interleave(code.shape[1] // byte.shape[1], 1)], 2)


def pass_through(
    grid, sp, path, scaling, name, kind, deferred=False, wgrad=True, tokens=None, length=S
) -> dict[str, Tensor]:
    """Run one layer forward and backward on a rank's parts of the same full tensors.

    tokens: the numbers of those that the rank has of a sequence of `length`; None: all.
    """
    ctx = LayerContext(grid, sp, FP64, FP64, sink=GradientSink(FP64))
    recipe, t, rank = Seen(scaling, name, ctx, wgrad), grid.tp.size, grid.tp.rank
    object.__setattr__(recipe, "seen", {})
    x, dy = full("x", length, B, IN), full("dy", length, B, OUT)
    if tokens is not None:
        x, dy = x[tokens], dy[tokens]
    own = torch.cat([part.chunk(t)[rank] for part in torch.arange(OUT).split(SECTIONS)])
    shard = slice(rank * S // t, (rank + 1) * S // t) if sp and t > 1 else slice(None)
    if kind == "column":
        layer = ColumnParallelLinear(IN, SECTIONS, ctx=ctx, recipe=recipe)
        w, x, dy = full("w", OUT, IN)[own], x[shard], dy[..., own]
    else:  # the same tensors, transposed: in features of OUT
        layer = RowParallelLinear(OUT, IN, ctx=ctx, recipe=recipe)
        w, x, dy = full("w", OUT, IN).t()[:, own], dy[..., own], x[shard]
    use_overlap(layer, OverlapMap(path))
    with torch.no_grad():
        layer.weight.copy_(w)
    x = x.clone().requires_grad_()
    y = layer(x)
    if deferred:
        ctx.queue.defer()
    y.backward(dy)
    if deferred:
        run_deferred(ctx.queue.take())
    rows = [role for role in recipe.seen if wgrad or "wgrad" not in role]
    found = {role: recipe.of_each_number(role) for role in rows}
    return found | {"own": own, "shard": torch.arange(S)[shard],
                    "y": y.detach(), "dx": x.grad, "dw": ctx.sink.main[layer.weight]}  # fmt: skip


def slices(whole: dict[str, Tensor], part: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """What of one rank's tensors a rank of a layout must hold."""
    own, shard = part["own"], part["shard"]
    tokens = torch.arange(S * B).view(S, B)[shard].flatten()
    sent, kept = ("x", "dy") if kind == "column" else ("dy", "x")
    w, wt = ("w", "wt") if kind == "column" else ("wt", "w")
    return {
        sent: whole[sent][tokens], kept: whole[kept][:, own],
        w: whole[w][own], wt: whole[wt][:, own],
        f"wgrad {sent}": whole[f"wgrad {sent}"], f"wgrad {kept}": whole[f"wgrad {kept}"][:, own],
        "y": whole["y"][..., own] if kind == "column" else whole["y"][shard],
        "dx": whole["dx"][shard] if kind == "column" else whole["dx"][..., own],
        "dw": whole["dw"][own] if kind == "column" else whole["dw"][:, own],
    }  # fmt: skip


def over_tokens(comm, recipes: list) -> None:
    """Ranks of cp divide the tokens, each with the chunks that attention gives it."""
    grid, length = comm.grid(1, comm.size), 2 * S * comm.size  # 128 tokens a chunk
    own = shards(comm.size, (length,))[comm.rank]
    tokens = torch.cat([torch.arange(r.start, r.stop) for r in own])
    rows = torch.arange(length * B).view(length, B)[tokens].flatten()
    for (scaling, name), kind in itertools.product(recipes, ("column", "row")):
        args = (False, "none", scaling, name, kind)
        whole = pass_through(Grid(), *args, length=length)
        part = pass_through(grid, *args, tokens=tokens, length=length)
        for role in ("x", "w", "dy", "wt", "wgrad x", "wgrad dy"):
            wanted = whole[role] if role in ("w", "wt") else whole[role][rows]
            assert torch.equal(part[role], wanted), f"{scaling} {name} {kind}: {role}"
        summed, _ = all_reduce(part["dw"].clone(), grid.cp)
        error = (summed - whole["dw"]).norm() / whole["dw"].norm()
        assert error < 1e-14, f"{scaling} {name} {kind}: dw {error:.1e}"


@pytest.mark.prove
@pytest.mark.parametrize("size", [2, 4])
def test_rows_are_the_same_bytes_under_context_parallelism(world, size):
    world(size).run(over_tokens, [(s, "hybrid") for s in BLOCKS])


def every_layout(comm, t: int, recipes: list, every: int = 1) -> None:
    """every: of the ways to run a layer, the share that is played, others for each recipe."""
    ways = [(False, "none"), (True, "none"), (True, "ring"), (True, "symmetric")]
    alone, number = Grid(), 0
    for (scaling, name), kind in itertools.product(recipes, ("column", "row")):
        whole = pass_through(alone, False, "none", scaling, name, kind)
        for (sp, path), deferred in itertools.product(ways, (False, True)):
            number += 1
            if number % every:
                continue
            case = f"{scaling} {name} {kind} sp {sp} {path} deferred {deferred}"
            grid = comm.grid(t, memory=path == "symmetric")
            part = pass_through(grid, sp, path, scaling, name, kind, deferred)
            for what, wanted in slices(whole, part, kind).items():
                if wanted.dtype == torch.uint8:
                    assert torch.equal(part[what], wanted), f"{case}: {what}"
                else:
                    error = (part[what] - wanted).norm() / wanted.norm()
                    assert error < 1e-14, f"{case}: {what} {error:.1e}"


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.prove)])
def test_rows_are_the_same_bytes_in_every_layout(world, size):
    world(size).run(every_layout, size, [(s, "hybrid") for s in BLOCKS], 3 if size == 4 else 11)


def test_wgrad_of_what_is_not_in_float8():
    """Then x and dy are kept as they are, and the weight gradient is that of another layer."""
    ctx = LayerContext(dtype=FP64, accumulate=FP64, sink=GradientSink(FP64))
    recipe = Float8("rowwise", "hybrid", ctx, wgrad=False)
    layer = ColumnParallelLinear(64, 32, ctx=ctx, recipe=recipe)
    w, x, dy = full("w", 32, 64), full("x", 16, 1, 64), full("dy", 16, 1, 32)
    with torch.no_grad():
        layer.weight.copy_(w)
    x.requires_grad_()
    y = layer(x)
    assert [saved.dtype for saved in y.grad_fn.saved_tensors] == [FP64]
    y.backward(dy)
    dx = oracle(x.detach().flatten(0, 1), w, dy.flatten(0, 1), "rowwise", "hybrid")[1]
    torch.testing.assert_close(ctx.sink.main[layer.weight], dy[:, 0].t() @ x[:, 0].detach())
    torch.testing.assert_close(x.grad[:, 0], dx)


class Model(nn.Module):
    """Two numbered blocks and a head, as any fork may name them."""

    def __init__(self, ctx: LayerContext, width: int = 128) -> None:
        super().__init__()
        own = Recipe()
        own.mine = True
        self.tower = nn.ModuleDict(
            {
                str(i): nn.ModuleDict(
                    {
                        "up": ColumnParallelLinear(128, (width, 128), ctx=ctx),
                        "down": RowParallelLinear(256, 128, ctx=ctx),
                        "special": ColumnParallelLinear(30, 30, ctx=ctx, recipe=_Own()),
                    }
                )
                for i in (3, 12)
            }
        )
        self.head = ColumnParallelLinear(128, 100, ctx=ctx)


class _Own(Recipe):
    """A recipe that a model chose itself."""


def test_blocks_take_the_recipe_and_the_rest_does_not():
    model = Model(ctx := LayerContext())
    use_float8(model, recipe := Float8("mxfp8", "e4m3", ctx), in_bf16={12})
    taken = [n for n, m in model.named_modules() if getattr(m, "recipe", None) is recipe]
    assert taken == ["tower.3.up", "tower.3.down"]


@pytest.mark.parametrize(
    "scaling, t, width, said",
    [
        ("blockwise", 2, 128, "tower.3.up has 64 features on a rank at --tensor-model-parallel"),
        ("blockwise", 1, 192, "which is not a multiple of 128: a block would lie across ranks"),
        ("mxfp8", 8, 128, "tower.3.up has 16 features on a rank"),
        ("rowwise", 1, 24, "which is not a multiple of 16: rows are not aligned"),
    ],
)
def test_blocks_that_would_lie_across_ranks_are_refused(scaling, t, width, said):
    ctx = LayerContext(Grid(t, t, launch=Launch(0, t)))
    model = (
        Model(ctx, width)
        if t == 1
        else nn.ModuleDict(
            {
                "tower": nn.ModuleDict(
                    {"3": nn.ModuleDict({"up": ColumnParallelLinear(128, (128,), ctx=ctx)})}
                )
            }
        )
    )
    with pytest.raises(ValueError, match=said):
        use_float8(model, Float8(scaling, "hybrid", ctx))
