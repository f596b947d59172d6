# SPDX-License-Identifier: Apache-2.0
"""Train with a planted difference: a program for one side of tools/bisect_runs.py.

    python tests/tools/bisect/plant.py --plant '{"what": "flip weight", "step": 3, ...}' FLAGS

Every function of PLANTS makes one kind of difference. "step": the iteration at which it happens;
left out, at every one. "rank": on which rank alone. "once": a file; the difference is made only
where the file is not there yet, as a fault of hardware is.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import pretrain_llama  # noqa: E402

Plant = dict[str, Any]
PLANTS: dict[str, Callable[..., None]] = {}


def plants(what: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def note(make: Callable[..., None]) -> Callable[..., None]:
        PLANTS[what] = make
        return make

    return note


def due(plant: Plant, run: Any) -> bool:
    """Return whether the difference is to be made in the step that comes."""
    if plant.get("step") not in (None, run.iteration + 1):
        return False
    if plant.get("rank") not in (None, run.grid.rank):
        return False
    if once := plant.get("once"):
        if Path(once).exists():
            return False
        Path(once).touch()
    return True


def around_step(plant: Plant, change: Callable[..., Any]) -> None:
    """Wrap train_step: `change` yields (run, batches, lr, decoupled_lr), and may undo it after."""
    take = pretrain_llama.train_step

    def train_step(run: Any, batches: Any, lr: float, decoupled_lr: float | None = None) -> Any:
        if not due(plant, run):
            return take(run, batches, lr, decoupled_lr)
        with contextmanager(change)(plant, run, batches, lr) as (batches, lr):
            return take(run, batches, lr, decoupled_lr)

    pretrain_llama.train_step = train_step


def stepped(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def note(change: Callable[..., Any]) -> Callable[..., Any]:
        PLANTS[what] = lambda plant: around_step(plant, change)
        return change

    return note


def part_of(run: Any, name: str, flats: Callable[[Any, int], Tensor]) -> Tensor | None:
    """Return what this rank owns of a parameter in flat tensors, one for each bucket."""
    for i, bucket in enumerate(run.sink.buckets):
        for found, low, high, _ in bucket.owned():
            if found == name:
                return flats(bucket, i)[low - bucket.low : high - bucket.low]
    return None


def flip(x: Tensor | None, element: int, bit: int) -> None:
    if x is not None:
        width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        x.detach().view(width)[element] ^= 1 << bit


@stepped("flip weight")
def flip_weight(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    kinds = (lambda b, i: b.param_shard, lambda b, i: run.optimizer.masters[i])
    held = [part_of(run, plant["name"], flats) for flats in kinds]
    for x in {x.data_ptr(): x for x in held if x is not None}.values():
        flip(x, plant["element"], plant["bit"])
    run.sink.gather_weights()
    yield batches, lr


@stepped("flip moment")
def flip_moment(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    for name, kind, _, values in run.optimizer.named_state():
        if (name, kind) == (plant["name"], plant["kind"]):
            flip(values, plant["element"], plant["bit"])
    yield batches, lr


@stepped("change gradient")
def change_gradient(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """After the sums: flip a bit, scale, or round."""
    finish = run.sink.finish_grad_sync

    def finish_grad_sync() -> None:
        finish()
        x = part_of(run, plant["name"], lambda b, i: b.grad_shard)
        if "bit" in plant:
            flip(x, plant["element"], plant["bit"])
        elif x is not None:
            x.copy_(x * plant["factor"] if "factor" in plant else x.bfloat16())

    run.sink.finish_grad_sync = finish_grad_sync
    yield batches, lr
    del run.sink.finish_grad_sync


@stepped("token")
def token(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Flip a bit of one token of the global batch."""
    for i, batch in enumerate(batches):
        row = run.consumed + plant["row"] - batch.first_sample
        if 0 <= row < len(batch.tokens):
            tokens = batch.tokens.clone()
            tokens[row, plant["position"]] ^= 1 << plant["bit"]
            batches[i] = replace(batch, tokens=tokens)
    yield batches, lr


@stepped("labels")
def labels(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Shift the labels of one row by one token."""
    for i, batch in enumerate(batches):
        row = run.consumed + plant["row"] - batch.first_sample
        if 0 <= row < len(batch.tokens):
            moved = batch.labels.clone()
            moved[row] = moved[row].roll(1)
            batches[i] = replace(batch, labels=moved)
    yield batches, lr


@plants("data")
def data(plant: Plant) -> None:
    """Give other samples: {sample: the sample that is given for it}."""
    from training.data import loader

    make, other = loader.Loader._make, {int(k): v for k, v in plant["samples"].items()}

    def _make(self: Any, start: int) -> Any:
        if not hasattr(self.dataset, "swapped"):
            sample = self.dataset.sample
            self.dataset.sample = lambda i: sample(other.get(i, i))
            self.dataset.swapped = True
        return make(self, start)

    loader.Loader._make = _make  # type: ignore[method-assign]


@stepped("learning rate")
def learning_rate(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    yield batches, lr * plant["factor"]


@stepped("positions")
def positions(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Count the positions of the second half of one row from 0 again, as of another document."""
    for i, batch in enumerate(batches):
        row = run.consumed + plant["row"] - batch.first_sample
        if 0 <= row < len(batch.tokens):
            length = batch.tokens.shape[1]
            ids = torch.arange(length).repeat(len(batch.tokens), 1)
            ids[row, length // 2 :] -= length // 2
            batches[i] = replace(batch, position_ids=ids)
    yield batches, lr


@stepped("exchanged moments")
def exchanged_moments(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Let two weights of one shape have each other's moments."""
    kinds = ((name, kind, values) for name, kind, _, values in run.optimizer.named_state())
    one, two = (values for name, kind, values in kinds if kind == plant["kind"]
                and name in plant["names"])  # fmt: skip
    was = one.clone()
    one.copy_(two)
    two.copy_(was)
    yield batches, lr


@stepped("lost update")
def lost_update(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Undo the update of one weight."""
    update = run.optimizer.step
    kinds = (lambda b, i: b.param_shard, lambda b, i: run.optimizer.masters[i])

    def step(*given: Any) -> Any:
        held = [part_of(run, plant["name"], flats) for flats in kinds]
        before = [None if x is None else x.detach().clone() for x in held]
        done = update(*given)
        for x, was in zip(held, before, strict=True):
            if x is not None:
                x.detach().copy_(was)
        return done

    run.optimizer.step = step
    yield batches, lr
    del run.optimizer.step


@stepped("decay")
def decay(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    groups = [g for some in run.optimizer.updaters for u in some for g in u.groups]
    before = [g["weight_decay"] for g in groups]
    for group in groups:
        group["weight_decay"] *= plant["factor"]
    yield batches, lr
    for group, value in zip(groups, before, strict=True):
        group["weight_decay"] = value


@stepped("module")
def module(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Change what a module gives in forward: one that this rank does not have is left alone."""
    found: dict[str, nn.Module] = dict(run.module.named_modules())
    if plant["name"] not in found:
        yield batches, lr
        return
    module, how, kind = found[plant["name"]], plant["how"], Tensor
    calls: list[int] = []
    forward, random = module.forward, torch.Generator().manual_seed(plant.get("seed", 1))

    def changed(x: Tensor) -> Tensor:
        if how == "scale":
            return x * plant["factor"]
        if how == "round":
            return x + (x.detach().bfloat16().to(x.dtype) - x.detach())
        if how == "dropout":
            kept = torch.rand(x.shape, generator=random) >= plant["p"]
            return x * kept / (1 - plant["p"])
        if how == "shift":
            return torch.cat([x[:1], x[:-1]])
        if how == "noise":
            return x + plant["factor"] * torch.randn(x.shape, generator=random, dtype=x.dtype)
        if how == "roll":
            return x.roll(1, -1)
        if how == "clamp":
            return x.clamp(-plant["factor"], plant["factor"])
        if how == "not a number":
            mark = torch.zeros_like(x)
            mark[(1, 0, 5)[: x.dim()]] = torch.nan
            return x + mark
        if how == "first backward":
            calls.append(1)
            if len(calls) == 1:
                x.register_hook(torch.zeros_like)
            return x
        if how == "detach":
            return x.detach()
        if how == "backward":
            x.register_hook(lambda dy: dy * plant["factor"])
            return x
        raise ValueError(how)

    def other(*args: Any, **more: Any) -> Any:
        out = forward(*args, **more)
        if how == "no residual":
            return out - args[0]
        return changed(out) if isinstance(out, kind) else (changed(out[0]), *out[1:])

    module.forward = other  # type: ignore[method-assign]
    yield batches, lr
    del module.forward


@stepped("attribute")
def attribute(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Let a module have another number: a norm's epsilon, a scale, a table's factor."""
    found = dict(run.module.named_modules()).get(plant["name"])
    if found is None:
        yield batches, lr
        return
    was = getattr(found, plant["field"])
    setattr(found, plant["field"], plant["value"])
    yield batches, lr
    setattr(found, plant["field"], was)


@stepped("rotation")
def rotation(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Rotate by angles of another base, in the attention of one layer."""
    name = f"layers.{plant['layer']}.attention"
    found = dict(run.module.named_modules()).get(name)
    if found is None:
        yield batches, lr
        return
    forward = found.forward

    def other(x: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Tensor:
        angle = torch.atan2(sin, cos) * plant["factor"]
        return forward(x, angle.cos().to(cos), angle.sin().to(sin), *rest, **more)

    found.forward = other  # type: ignore[method-assign]
    yield batches, lr
    del found.forward


@stepped("mask")
def mask(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Ignore the loss of the first tokens of one row."""
    for i, batch in enumerate(batches):
        row = run.consumed + plant["row"] - batch.first_sample
        if 0 <= row < len(batch.tokens):
            kept = torch.ones(batch.tokens.shape)
            kept[row, : plant["tokens"]] = 0
            batches[i] = replace(batch, loss_mask=kept)
    yield batches, lr


@stepped("fewer micro-batches")
def fewer(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Leave the last micro-batch of each rank out."""
    yield batches[:-1], lr


@stepped("gradient scale")
def gradient_scale(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Divide by a wrong count: every summed gradient has another factor."""
    finish = run.sink.finish_grad_sync

    def finish_grad_sync() -> None:
        finish()
        for bucket in run.sink.buckets:
            bucket.grad_shard.mul_(plant["factor"])

    run.sink.finish_grad_sync = finish_grad_sync
    yield batches, lr
    del run.sink.finish_grad_sync


@plants("lost state")
def lost_state(plant: Plant) -> None:
    """Lose a kind of the optimizer's state, or its count of steps, at the start."""
    begin = pretrain_llama.Saver.begin

    def changed(self: Any) -> Any:
        found = begin(self)
        for _, kind, _, values in self.saved.optimizer.named_state():
            if kind == plant.get("kind"):
                values.zero_()
        for updater in (u for some in self.saved.optimizer.updaters for u in some):
            if "count" in plant:
                updater.set_steps(updater.steps + plant["count"])
        return found

    pretrain_llama.Saver.begin = changed  # type: ignore[method-assign]


@stepped("stale weight")
def stale_weight(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Let one rank's whole weight miss the update of a bucket's gather."""
    yield batches, lr
    run.sink.wait_for_weights()
    for name, param in run.module.named_parameters():
        if name == plant["name"]:
            param.data.mul_(plant["factor"])


@stepped("gathered weight")
def gathered_weight(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Round what a rank gathers of a bucket at ZeRO stage 3, and not what its owner has."""
    acquire, params = run.sink.acquire, dict(run.module.named_parameters())

    def rounded(param: Any) -> Tensor:
        weight = acquire(param)
        return weight.detach().bfloat16().to(weight.dtype) if param is known else weight

    known = params.get(plant["name"])
    run.sink.acquire = rounded
    yield batches, lr
    del run.sink.acquire


@stepped("ring")
def ring(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Round the keys and values that go round the ring of context ranks."""
    from mpu.layers.attention import kv_exchange as rings

    pass_on = rings.Ring._pass_on

    def rounded(self: Any, x: Tensor, label: Any) -> Any:
        forward = label is rings.FORWARD
        return pass_on(self, x.bfloat16().to(x.dtype) if forward else x, label)

    rings.Ring._pass_on = rounded  # type: ignore[method-assign]
    yield batches, lr
    rings.Ring._pass_on = pass_on  # type: ignore[method-assign]


@stepped("experts")
def experts(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Change what a mixture of experts decides or weighs, in one layer."""
    found: Any = dict(run.module.named_modules()).get(plant["name"])
    if found is None:
        yield batches, lr
        return
    weights, choose = found.weights, found.choose
    if plant["how"] == "weights":
        found.weights = lambda *given: weights(*given) * plant["factor"]
    else:  # the next expert instead of the second best
        found.choose = lambda scores: torch.cat(
            [(c := choose(scores))[:, :1], (c[:, :1] + 1) % scores.shape[1]], 1
        )
    yield batches, lr
    del found.__dict__["weights" if plant["how"] == "weights" else "choose"]


@stepped("order")
def order(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Multiply in two halves of k and add them: the same product, in another order."""
    found = dict(run.module.named_modules()).get(plant["name"])
    if found is None:
        yield batches, lr
        return
    recipe = found.recipe
    before = recipe.product

    def product(x: Tensor, weight: Tensor) -> Tensor:
        k = x.shape[-1] // 2
        return before(x[..., k:].contiguous(), weight[:, k:].contiguous()) + before(
            x[..., :k].contiguous(), weight[:, :k].contiguous()
        )

    recipe.product = product
    yield batches, lr
    del recipe.product


@stepped("collective")
def collective(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Leave a sum of activations over an axis out, or make it twice, at its n-th call."""
    axis = getattr(run.grid, plant["axis"])
    carrier, verb = axis.transport, plant["verb"]
    before, calls = getattr(carrier, verb), [0]

    def other(x: Tensor, axis: Any, *rest: Any) -> Any:
        calls[0] += 1
        if calls[0] != plant["call"]:
            return before(x, axis, *rest)
        if plant["how"] == "twice":
            return before(2 * x, axis, *rest)
        mine = x.clone()
        out, handle = before(x, axis, *rest)
        handle.wait()
        if verb == "reduce_scatter":
            n = len(mine) // axis.size
            mine = mine[axis.rank * n : (axis.rank + 1) * n]
        out.copy_(mine)
        return out, handle

    setattr(carrier, verb, other)
    yield batches, lr
    delattr(carrier, verb)


@stepped("gradient sum")
def gradient_sum(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Of the bucket of a parameter: add gradients over one axis alone, or not at all, or twice."""
    from mpu.comm.collectives import all_reduce

    held = [b for b in run.sink.buckets if plant["name"] in {n for n, _, _ in b.params}]
    for bucket in held:
        start, wait, own = bucket.start_grad_sync, bucket.wait, {}

        def start_grad_sync(bucket: Any = bucket, start: Any = start, own: Any = own) -> None:
            grad = bucket.grad.clone()
            if plant["how"] == "twice":
                bucket.grad *= 2
            start()  # it waits for an earlier sum first
            own["grad"] = grad

        def waited(bucket: Any = bucket, wait: Any = wait, own: Any = own) -> None:
            wait()
            if "grad" in own and plant["how"] != "twice":
                grad = own.pop("grad")
                for axis in plant["axes"]:
                    all_reduce(grad, getattr(run.grid, axis))
                bucket.grad_shard.copy_(grad[bucket.low : bucket.high])

        bucket.start_grad_sync, bucket.wait = start_grad_sync, waited
    yield batches, lr
    for bucket in held:
        del bucket.start_grad_sync, bucket.wait


@plants("loaded")
def loaded(plant: Plant) -> None:
    """Change one tensor after the run's start was drawn or loaded."""
    begin = pretrain_llama.Saver.begin

    def changed(self: Any) -> Any:
        found = begin(self)
        for i, bucket in enumerate(self.saved.optimizer.sink.buckets):
            for name, low, high, _ in bucket.owned():
                part = slice(low - bucket.low, high - bucket.low)
                if name == plant["name"]:
                    flats = (bucket.param_shard, self.saved.optimizer.masters[i])
                    for flat in {t.data_ptr(): t for t in flats}.values():
                        x = flat.detach()[part]
                        x.copy_(how(plant, x))
        self.saved.optimizer.sink.gather_weights()
        return found

    pretrain_llama.Saver.begin = changed  # type: ignore[method-assign]


def how(plant: Plant, x: Tensor) -> Tensor:
    if plant["how"] == "round":
        return x.bfloat16().to(x.dtype)
    if plant["how"] == "transpose":
        return x.view(plant["rows"], -1).t().flatten()
    if plant["how"] == "zero":
        return torch.zeros_like(x)
    if plant["how"] == "draw":
        random = torch.Generator().manual_seed(9)
        return x.std() * torch.randn(x.shape, generator=random, dtype=x.dtype)
    return x * plant["factor"]


@plants("stage")
def stage(plant: Plant) -> None:
    """Let a stage leave its last block out, or run it twice."""
    from model import llama

    build = llama.Llama.__init__

    def init(self: Any, *args: Any, **more: Any) -> None:
        build(self, *args, **more)
        for blocks in self.blocks:
            for block in list(blocks):
                if plant["layer"] in self.layers and block is self.layers[plant["layer"]]:
                    at = blocks.index(block)
                    if plant["how"] == "left out":
                        del blocks[at]
                    else:
                        blocks[at], blocks[at - 1] = blocks[at - 1], blocks[at]

    llama.Llama.__init__ = init  # type: ignore[method-assign]


@stepped("message")
def message(plant: Plant, run: Any, batches: Any, lr: float) -> Iterator[Any]:
    """Round what a pipeline stage sends forward."""
    from mpu.pipeline import engine

    send = engine.send

    def rounded(x: Tensor, axis: Any, *rest: Any) -> Any:
        phase = plant.get("phase", "forward")
        return send(x.bfloat16().to(x.dtype) if rest[-1].phase == phase else x, axis, *rest)

    engine.send = rounded
    yield batches, lr
    engine.send = send


def main(argv: list[str]) -> int:
    """Plant, then train."""
    at = argv.index("--plant")
    plant = json.loads(argv[at + 1])
    PLANTS[plant["what"]](plant)
    rest = [*argv[:at], *argv[at + 2 :]]
    return pretrain_llama.main(rest)


if __name__ == "__main__":
    pretrain_llama.as_process(lambda: main(sys.argv[1:]), None)
