# SPDX-License-Identifier: Apache-2.0
"""Compare what a rehearsed rank sends in a step with what its layers need.

Bytes are compared whatever the verbs: by the ideal algorithm a reduce-scatter and an all-gather
send what an all-reduce does, and a ring of messages what a gather does. A layer without the
transfer that its class makes is named by the line of its matmul.

A torch.autograd.Function is compared with itself, too, in any model: what its forward gathers its
backward must sum, what its forward scatters its backward must gather, and what its forward
exchanges comes back (the pairs of mpu/comm/mappings.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mpu.layers.embedding import VocabParallelEmbedding
from mpu.layers.float8.recipe import Float8
from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpu.param import placement_of
from tools.rehearsal.events import Launch, Transfer
from tools.rehearsal.order import Finding
from tools.rehearsal.places import beginning, defined, end_of, on_lines
from training.pipeline_schedule import schedule_of

if TYPE_CHECKING:
    from tools.rehearsal.run import Rehearsed

Purpose = tuple[str, str]  # the axis, and what for
ROUNDING = 4  # bytes of a transfer: what whole divisions leave out
PURPOSES = {  # a transfer's purpose, by its label
    "grad sum": "gradients",
    "gather": "weights",
    "update": "weights",
    "norm": "norm",
    "loss sum": "loss",
    "float8 scales": "scales",
    "amaxes": "scales",
}
BACKWARD = ".backward"  # of an autograd function's name in a record
ATTENTION = ("cp", "cp_a2a", "cp_p2p")
CONJUGATE = {
    "all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_to_all": "all_to_all",
}  # fmt: skip
# hidden states that a layer's class sends over tp, in forward and in backward: of s rows times
# (t - 1) / t. The key is whether they are cut along s, so gathered and scattered; an all-reduce is
# both. Where W is on its own, a row-parallel layer gathers twice in backward.
SENDS: dict[type, dict[bool, tuple[int, int]]] = {
    ColumnParallelLinear: {True: (1, 2), False: (0, 2)},
    RowParallelLinear: {True: (1, 1), False: (2, 0)},
    VocabParallelEmbedding: {True: (1, 1), False: (2, 0)},
}
WATCHERS = "training/run/"  # a median of the last steps' losses needs their order
# where values are put in another order on purpose: of scores, and of rows by their experts
SORTS = {
    "model/moe.py": ("torch.sort(scores, dim=1, descending=True, stable=True)",),
    "mpu/layers/dispatch.py": ("torch.argsort(keys, stable=True)",),
}
REORDERS = ("flip", "roll", "sort", "argsort", "rot90", "randperm")


def unlike_layers(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the layers that send another number of bytes over tp than SENDS has for their class."""
    tp, model, config = seen.grid.tp, seen.run.model, seen.config
    if not is_own_llama(seen) or tp.size == 1:
        return
    events = seen.recorder.events
    names = {id(module): name for name, module in model.named_modules()}
    sent, at, first = Counter[Purpose](), dict[Purpose, list[int]](), dict[Purpose, int]()
    for index in range(seen.first, len(events)):
        event = events[index]
        if not isinstance(event, (Launch, Transfer)) or event.where.phase == "recompute":
            continue
        phase = "forward" if event.where.phase == "forward" else "backward"
        if isinstance(event, Launch):
            if event.flops or "embedding" in event.op:
                first.setdefault((event.where.layer, phase), index)
        elif event.axis == "tp" and (purpose := purpose_of(event)) is not None:
            key = names.get(id(seen.recorder.callers.get(event.id)), event.where.layer), purpose[1]
            sent[key] += event.sent
            at.setdefault(key, []).append(index)
    tokens = seen.micro_batches * config.batch.micro_batch_size * config.model.seq_length
    tokens //= config.parallel.context_parallel_size
    split = schedule_of(config, seen.micro_batches).split
    for name, module in model.named_modules():
        kind: Any = next((one for one in type(module).__mro__ if one in SENDS), None)
        fused = config.parallel.fused_linear_cross_entropy
        if kind is None or (fused and getattr(module, "output_layer", False)):
            continue  # what is fused calls no layer
        width = placement_of(module.weight).shape[kind is not RowParallelLinear]
        part = tokens * width * config.run.dtype.itemsize * (tp.size - 1) // tp.size
        for phase, times in zip(("forward", "backward"), SENDS[kind][model.ctx.sp], strict=True):
            found, least = sent[name, phase], times * part
            most = least + part * (split and phase == "backward" and kind is RowParallelLinear)
            if isinstance(getattr(module, "recipe", None), Float8):  # what is gathered is narrower
                least, most = min(found, least) or least, max(found, most)
            indices = at.get((name, phase), [])
            slack = ROUNDING * max(len(indices), 1)
            if least - slack <= found <= most + slack:
                continue
            words = f"{name} sends {found:,} bytes over tp in {phase} of a step; a "
            words += f"{kind.__name__} of its size sends {least:,}"
            if found < most and (name, phase) in first:
                indices = [first[name, phase], *indices]
            one: Any = events[indices[0]] if indices else None
            place = one.where.place if one else beginning(kind.forward)
            yield Finding("traffic", place, words, "", lines_of_all(seen, indices))


def left_out(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield whether the loss is not summed over tp, or scales of float8 are not agreed on."""
    model, needed = seen.run.model, list[Purpose]()
    if not is_own_llama(seen):
        return
    if seen.grid.tp.size > 1 and any(stage.loss for stage in model.stages):
        needed.append(("tp", "softmax"))
    for module in model.modules():
        recipe = getattr(module, "recipe", None)
        if isinstance(recipe, Float8) and recipe.slot is None:
            cut: Any = getattr(module, "cuts", None)
            needed += [(axis.name, "scales") for axis in recipe.shared("x", cut["x"])]
    events = seen.recorder.events[seen.first :]
    done = {purpose_of(event) for event in events if type(event) is Transfer}
    for purpose in dict.fromkeys(needed):
        if purpose not in done:
            words = f"nothing is sent over {purpose[0]} in a step, purpose {purpose[1]}"
            yield Finding("traffic", beginning_of(seen, *purpose), words, "", ())


def one_way(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the autograd functions whose backward leaves out the conjugate of a transfer."""
    events, recorder = seen.recorder.events, seen.recorder
    made: dict[tuple[str, str], Counter[str]] = {}  # a function, the axis: its verbs
    first: dict[tuple[str, str], int] = {}
    ran: dict[str, list[int]] = {}
    for index in range(seen.first, len(events)):
        event = events[index]
        if not isinstance(event, (Launch, Transfer)) or not (name := event.where.function):
            continue
        if name.endswith(BACKWARD):
            ran.setdefault(name, []).append(index)
        if type(event) is not Transfer or (purpose := purpose_of(event)) is None:
            continue
        if purpose[1] in ("forward", "backward", "attention"):
            # in backward of any dtype: a gradient in float8 travels as bytes
            floats = event.where.phase == "forward" and "float" in event.dtype
            if name.endswith(BACKWARD) or floats:
                made.setdefault((name, event.axis), Counter())[event.verb] += 1
                first.setdefault((name, event.axis), index)
    for (name, axis), verbs in made.items():
        back = name + BACKWARD
        if name.endswith(BACKWARD) or back not in ran:
            continue
        for verb, count in verbs.items():
            expected = CONJUGATE.get(verb, "")
            done = made.get((back, axis), Counter())
            if not expected or done[expected] >= count or (done["send"] and not done[expected]):
                continue
            index = first[name, axis]
            what = f"{name}: forward does {verb} over {axis} {count} times in a step, backward "
            what += f"does {expected} {done[expected]} times: a gradient is not "
            what += "summed" if expected == "reduce_scatter" else "brought together"
            also = events[index].where.place  # type: ignore[union-attr]
            through = lines_of_all(seen, [*ran[back], index])
            function: Any = recorder.functions[name]
            yield Finding("traffic", end_of(function.backward), what, also, through)


def out_of_order(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield what puts values in another order, and the functions in which tokens of other ranks
    are not put in the order of their positions.

    Each gather, sum or exchange of tokens over cp has one `index_select`, before it or after it.
    """
    if not is_own_llama(seen):
        return  # a fork may have another way
    events, chains = seen.recorder.events, seen.recorder.chains
    moved, put = Counter[str](), Counter[str]()
    first: dict[str, int] = {}
    for index in range(seen.first, len(events)):
        event = events[index]
        if type(event) is Launch and event.op.rpartition("::")[2] in REORDERS:
            place = event.where.place
            if not place.startswith(WATCHERS) and not on_lines(place, SORTS):
                what = f"{event.op} puts values in another order, which nothing in a step needs"
                yield Finding("order of values", place, what, "", chains.get(index, ()))
        if not isinstance(event, (Launch, Transfer)) or not (name := event.where.function):
            continue
        if type(event) is Transfer:
            tokens = event.axis in ATTENTION and "float" in event.dtype
            if tokens and event.verb in CONJUGATE:
                moved[name] += 1
                first.setdefault(name, index)
        elif type(event) is Launch and event.op == "aten::index_select":
            put[name] += 1
    for name, index in first.items():
        if put[name] < moved[name]:
            what = f"{name}: {moved[name]} times tokens travel over cp, which holds them cut in "
            what += f"pieces, and {put[name]} times they are put in the order of their positions"
            place = events[index].where.place  # type: ignore[union-attr]
            made: Any = seen.recorder.functions[name.removesuffix(BACKWARD)]
            also = end_of(made.backward if name.endswith(BACKWARD) else made.forward)
            yield Finding("order of values", place, what, also, chains.get(index, ()))


def lines_of_all(seen: "Rehearsed", indices: Iterable[int]) -> tuple[str, ...]:
    """Return the lines that led to some events, each once."""
    chains = (seen.recorder.chains.get(i, ()) for i in indices)
    return tuple(dict.fromkeys(line for chain in chains for line in chain))


def is_own_llama(seen: "Rehearsed") -> bool:
    """Return whether the model is this repository's."""
    return type(seen.run.model).__module__ in ("model.llama", "model.moe")


def purpose_of(event: Transfer) -> Purpose | None:
    """Return a transfer's axis and what it is for; None for what is not compared."""
    if event.axis == "background":
        return None
    who, _, what = event.label.rpartition(": ")
    if event.verb == "receive" or event.axis == "world" or what == "log":  # a step's line
        return None
    axis = {"pp_back": "pp"}.get(event.axis, event.axis)
    if what in PURPOSES:
        return axis, PURPOSES[what]
    if who == "cross_entropy":
        return axis, "softmax"
    if axis == "pp":
        return axis, "messages"
    if axis in ATTENTION:
        return axis, "attention"
    return axis, "forward" if event.where.phase in ("forward", "recompute") else "backward"


def caller(seen: "Rehearsed", index: int) -> str:
    """Return the line that called what an event's line is in, of those that led to it."""
    chain = seen.recorder.chains.get(index, ())
    place = seen.recorder.events[index].where.place  # type: ignore[union-attr]
    at = chain.index(place) + 1 if place in chain else len(chain)
    return (*chain[at : at + 1], "")[0]


def beginning_of(seen: "Rehearsed", axis: str, what: str) -> str:
    """Return the line where what is missing would begin."""
    from mpu.comm import mappings
    from mpu.layers.context_attention import ContextAttention
    from mpu.layers.cross_entropy import loss_of
    from mpu.layers.float8.recipe import Float8
    from mpu.layers.qkv import SharedHeadsLinear
    from mpu.zero.float8_gather import Float8Gather
    from mpu.zero.norm import GlobalNorm, _Part
    from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer
    from mpu.zero.reduce import sum_over_data

    known: dict[str, Callable[..., Any]] = {
        "gradients": sum_over_data,
        "weights": ParamAndGradBuffer.gather_weights,
        "norm": GlobalNorm.__call__ if axis == "pp" else _Part.squares,
        "softmax": loss_of,
        "scales": Float8Gather.requantise if axis not in ("tp", "cp") else Float8.agree,
    }
    by_axis: dict[str, Callable[..., Any]] = dict.fromkeys(ATTENTION, ContextAttention.compute)
    by_axis["tp_kv"] = SharedHeadsLinear.whole_heads
    if what == "loss":
        return defined(seen.script.__file__ or "", "train_step")
    return beginning(known.get(what) or by_axis.get(axis, mappings._pair))
