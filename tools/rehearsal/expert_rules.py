# SPDX-License-Identifier: Apache-2.0
"""Compare a rehearsed mixture of experts with what its counts say.

The counts are those of Dispatcher.assumed: even, or skewed by --rehearse-expert-skew.

bytes       what each layer sends over ep in forward and in backward, of the counts alone: neither
            the estimate nor the layer's own record of it is used
waits       the host waits once for the counts, in forward alone: what recomputes takes the same
router      its products are in the accumulation dtype; those of experts are not
"""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from mpu.layers.dispatch import AllGather, AllToAll, Dispatcher
from mpu.layers.experts import GroupedLinear, RouterLinear
from tools.rehearsal.events import HostWait, Launch, Transfer
from tools.rehearsal.order import Finding
from tools.rehearsal.places import beginning

if TYPE_CHECKING:
    from tools.rehearsal.run import Rehearsed

COUNTED = "mpu/layers/dispatch.py"  # where the counts are read
WIDE = 4  # bytes of a choice, of a count, and of a weight in fp32


class Sent(NamedTuple):
    """Bytes that a layer sends over ep in a micro-batch.

    plan: which experts were chosen, or the counts. forward: the rest of forward, which is sent
    again where the layer is recomputed.
    """

    plan: int
    forward: int
    backward: int


def sent_of(found: Dispatcher, tokens: int, topk: int, hidden: int, size: int) -> Sent:
    """Return what a rank's layer sends: tokens and hidden size, each number of `size` bytes.

        allgather    plan T k, forward (T h + T k) and T h back, all to ep - 1 ranks; backward: the
                     gather's sum, the sum's gather
        alltoall     plan E counts, forward the rows for other ranks and those that came from them;
                     backward the same, the other way round
    """
    others, pairs = found.ep.size - 1, tokens * topk
    wide = max(size, WIDE)
    if isinstance(found, AllGather):
        rows, weights = tokens * hidden * size * others, pairs * wide * others
        return Sent(pairs * WIDE * others, 2 * rows + weights, 2 * rows + weights)
    if isinstance(found, AllToAll):
        counts, first = found.assumed(pairs), found.ep.rank * found.local
        local = sum(counts[first : first + found.local])
        rows = (pairs - local + others * local) * hidden * size
        return Sent(found.experts * WIDE * others, rows, rows)
    return Sent(0, 0, 0)


def unlike_counts(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the layers that send other bytes over ep in the last step than their counts say."""
    sent, at = Counter[tuple[str, str]](), dict[tuple[str, str], list[int]]()
    for index in range(seen.first, len(seen.recorder.events)):
        event = seen.recorder.events[index]
        if type(event) is Transfer and event.axis == "ep":
            layer, what = name_of(seen, event), event.where.phase
            phase = what if what in ("forward", "recompute") else "backward"
            sent[layer, phase] += event.sent
            at.setdefault((layer, phase), []).append(index)
    batch, p, model = seen.config.batch, seen.config.parallel, seen.config.model
    tokens = batch.micro_batch_size * model.seq_length // p.context_parallel_size
    tokens //= p.tensor_model_parallel_size if p.sequence_parallel else 1
    size = seen.config.run.dtype.itemsize
    for name, module in sparse_layers(seen):
        topk = module.config.moe_router_topk
        one = sent_of(module.dispatcher, tokens, topk, model.hidden_size, size)
        again = bool(at.get((name, "recompute")))
        expected = {"forward": one.plan + one.forward, "backward": one.backward}
        expected |= {"recompute": one.forward} if again else {}
        for phase, bytes_of_one in expected.items():
            found, should = sent[name, phase], bytes_of_one * seen.micro_batches
            if found != should:
                what = f"{name} sends {found:,} bytes over ep in {phase} of a step; its counts say "
                what += f"{should:,}"
                yield finding(seen, module, at.get((name, phase), []), what)


def waits(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the layers whose counts the host reads more or less often than once a micro-batch."""
    layers = dict(sparse_layers(seen))
    read, at = Counter[str](), dict[str, list[int]]()
    for index in range(seen.first, len(seen.recorder.events)):
        event = seen.recorder.events[index]
        if type(event) is HostWait and event.where.place.startswith(COUNTED):
            name = layer_of(event.where.layer, layers)
            read[name] += 1
            at.setdefault(name, []).append(index)
    for name, module in layers.items():
        if read[name] != seen.micro_batches:
            what = f"{name}: the host waits {read[name]} times in a step for the counts of "
            what += f"experts, and there are {seen.micro_batches} micro-batches"
            yield finding(seen, module, at.get(name, []), what)


def dtypes(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the products of a router that are narrower than the accumulation dtype."""
    narrow = str(seen.config.run.dtype).removeprefix("torch.")
    routers = {name for name, m in seen.run.model.named_modules() if isinstance(m, RouterLinear)}
    if narrow not in ("bfloat16", "float16"):
        return
    for index in range(seen.first, len(seen.recorder.events)):
        event = seen.recorder.events[index]
        if type(event) is Launch and event.flops and event.where.layer in routers:
            if narrow in event.dtypes:
                what = f"{event.op} of {event.where.layer} multiplies in {narrow}: a router's "
                what += "scores are in the accumulation dtype"
                through = seen.recorder.chains.get(index, ())
                yield Finding("dtype", event.where.place, what, "", through)


def work(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the experts whose products are of other rows than their counts say."""
    flops, at = Counter[tuple[str, str]](), dict[tuple[str, str], list[int]]()
    for index in range(seen.first, len(seen.recorder.events)):
        event = seen.recorder.events[index]
        if type(event) is Launch and event.flops:
            phase = "backward" if event.where.phase == "wgrad" else event.where.phase
            flops[event.where.layer, phase] += int(event.flops)
            at.setdefault((event.where.layer, phase), []).append(index)
    p, model = seen.config.parallel, seen.config.model
    tokens = seen.config.batch.micro_batch_size * model.seq_length // p.context_parallel_size
    tokens //= p.tensor_model_parallel_size if p.sequence_parallel else 1
    for name, module in sparse_layers(seen):
        found = module.dispatcher
        counts = found.assumed(tokens * module.config.moe_router_topk)
        first = found.ep.rank * found.local
        rows = sum(counts[first : first + found.local]) * found.ep.size
        if isinstance(found, AllGather):  # the pairs of all ranks, spread at once
            counts = found.assumed(tokens * module.config.moe_router_topk * found.ep.size)
            rows = sum(counts[first : first + found.local])
        for inner, layer in module.named_modules():
            if not isinstance(layer, GroupedLinear):
                continue
            once = 2 * rows * layer.in_features * layer.out_features * seen.micro_batches
            for phase, times in (("forward", 1), ("backward", 2)):
                key = f"{name}.{inner}", phase
                if flops[key] != times * once:
                    what = f"{name}.{inner}: {flops[key]:,} FLOPs of products in {phase} of a "
                    what += f"step; the counts of its experts make {times * once:,}"
                    yield finding(seen, layer, at.get(key, []), what)


RULES = (unlike_counts, waits, dtypes, work)


def sparse_layers(seen: "Rehearsed") -> Iterator[tuple[str, Any]]:
    """Yield the name and the module of each mixture of experts of this repository's model."""
    if type(seen.run.model).__module__ != "model.moe":
        return  # a fork may send what it likes
    for name, module in seen.run.model.named_modules():
        if isinstance(getattr(module, "dispatcher", None), Dispatcher):
            yield name, module


def layer_of(name: str, layers: dict[str, Any]) -> str:
    """Return the mixture of experts that a module is in, or "" for none."""
    return next((one for one in layers if name == one or name.startswith(one + ".")), "")


def name_of(seen: "Rehearsed", event: Transfer) -> str:
    """Return the mixture of experts that started a transfer."""
    layers = dict(sparse_layers(seen))
    caller = seen.recorder.callers.get(event.id)
    return next((name for name, m in layers.items() if m is caller), "") or layer_of(
        event.where.layer, layers
    )


def finding(seen: "Rehearsed", module: Any, indices: list[int], what: str) -> Finding:
    """Return the finding at the first of these events, or at the layer's forward."""
    chains = (seen.recorder.chains.get(i, ()) for i in indices)
    through = tuple(dict.fromkeys(line for chain in chains for line in chain))
    event: Any = seen.recorder.events[indices[0]] if indices else None
    place = event.where.place if event else beginning(type(module).forward)
    return Finding("experts", place, what, "", through)
