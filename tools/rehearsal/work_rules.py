# SPDX-License-Identifier: Apache-2.0
"""How often a layer's products run, and by what the loss is divided.

forward    once for each micro-batch; again in backward where it is recomputed, and only there
backward   two products of the same size: the input's gradient and the weight's
loss       divided once, by the tokens of the global batch
kernels    Weft's own, and no operation of torch in their place
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpu.layers.fused_gpu import DTYPES
from tools.rehearsal.events import Launch
from tools.rehearsal.order import Finding
from tools.rehearsal.traffic_rules import is_own_llama
from training.pipeline_schedule import recomputed_layers

if TYPE_CHECKING:
    from tools.rehearsal.run import Rehearsed

STAND_INS = ("mpu/layers/fused_gpu.py", "mpu/layers/softmax_rows.py")
COPIES = ("clone", "copy_", "_to_copy", "fill_", "zero_")
CORE = ".attention"  # what --recompute-granularity selective runs again


def work_of_layers(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the layers whose products run more or less often in the last step than they should."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    first: dict[tuple[str, str], list[int]] = defaultdict(list)
    events, model = seen.recorder.events, seen.run.model
    for index in range(seen.first, len(events)):
        event = events[index]
        if type(event) is Launch and event.flops and event.where.layer:
            phase = "backward" if event.where.phase == "wgrad" else event.where.phase
            if event.where.layer.endswith(CORE):
                if "attention" not in event.op:
                    continue  # its products are one operation where a kernel does them
                again_or_back = "backward" if "backward" in event.op else "recompute"
                phase = phase if phase == "forward" else again_or_back
            found[event.where.layer][phase] += event.flops
            first[event.where.layer, phase].append(index)
    if seen.config.parallel.fused_linear_cross_entropy:
        found.pop("head", None)  # its logits are made again in backward
    full = {i for stage in model.stages for i in recomputed(seen, stage)}
    for layer, flops in found.items():
        forward, linear = flops.get("forward", 0.0), not layer.endswith(CORE)
        number = layer.split(".")[1] if layer.startswith("layers.") else ""
        selective = seen.config.parallel.recompute_granularity == "selective" and not linear
        runs_again = (number.isdigit() and int(number) in full) or selective
        if linear:
            expected = {"backward": 2 * forward, "recompute": forward * runs_again}
        else:
            expected = {"recompute": forward * runs_again}
        for phase, count in expected.items():
            if abs(flops.get(phase, 0.0) - count) > 1e-6 * max(forward, count):
                what = f"{layer}: {flops.get(phase, 0.0):,.0f} FLOPs of products in {phase}, and "
                what += f"{forward:,.0f} in forward, of which {count:,.0f} follow"
                yield at(seen, first[layer, phase] + first[layer, "forward"], what)
    yield from once(seen, found, first)


def once(
    seen: "Rehearsed",
    found: dict[str, dict[str, float]],
    first: dict[tuple[str, str], list[int]],
) -> Iterator[Finding]:
    """Yield the layers whose weight is multiplied more than once in a micro-batch's forward."""
    tokens = seen.micro_batches * seen.config.batch.micro_batch_size * seen.config.model.seq_length
    tokens //= seen.config.parallel.context_parallel_size
    sizes = {
        name.removesuffix(".weight"): param.numel()
        for name, param in seen.run.model.named_parameters()
        if param.dim() == 2 and ".experts." not in name  # as their rows say: expert_rules
    }
    for layer, flops in found.items():
        size = sizes.get(layer)
        if size and flops.get("forward", 0.0) > 2.0 * size * tokens * (1 + 1e-6):
            what = f"{layer}: {flops['forward']:,.0f} FLOPs of products in forward; its weight and "
            what += f"{tokens:,} tokens make {2 * size * tokens:,}"
            yield at(seen, first[layer, "forward"], what)


def recomputed(seen: "Rehearsed", stage: object) -> tuple[int, ...]:
    """Return the layers of a stage that backward runs again."""
    layers: tuple[int, ...] = tuple(stage.layers)  # type: ignore[attr-defined]
    return layers[: recomputed_layers(seen.config, stage)]  # type: ignore[arg-type]


def at(seen: "Rehearsed", indices: list[int], what: str) -> Finding:
    """Return the finding at the launches of these indices: the first, and the lines of all."""
    chains = (seen.recorder.chains.get(i, ()) for i in indices)
    through = tuple(dict.fromkeys(line for chain in chains for line in chain))
    event = seen.recorder.events[indices[0]]
    assert type(event) is Launch
    return Finding("work", event.where.place or next(iter(through), ""), what, "", through)


def loss_scale(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield whether the loss is divided by another number than the tokens of the global batch."""
    config, grid = seen.config, seen.grid
    tokens = seen.micro_batches * config.batch.micro_batch_size * config.model.seq_length
    tokens *= grid.dp.size
    name = (seen.script.__file__ or "").rpartition("/")[2]
    for index in range(seen.first, len(seen.recorder.events)):
        event = seen.recorder.events[index]
        if type(event) is Launch and event.numbers and event.where.phase in ("forward", "backward"):
            if event.where.place.startswith(name) and event.where.phase == "forward":
                if event.numbers != (tokens,):
                    what = f"the loss is divided by {event.numbers[0]:,.0f}; the global batch has "
                    what += f"{tokens:,} tokens"
                    through = seen.recorder.chains.get(index, ())
                    yield Finding("scale", event.where.place, what, "", through)
                    return


def stand_ins(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the lines where torch's operations take the place of Weft's Triton kernels.

    The kernels take contiguous tensors of one dtype, and tables in the accumulation dtype; a table
    in another one goes through several passes, and is rounded.
    """
    recorder, dtype = seen.recorder, seen.config.run.dtype
    if not is_own_llama(seen) or dtype not in DTYPES or seen.config.parallel.norm_backend != "weft":
        return
    found: dict[str, list[int]] = {}
    for index in range(seen.first, len(recorder.events)):
        event = recorder.events[index]
        if type(event) is Launch and event.where.place.startswith(STAND_INS):
            if not event.op.startswith("triton::") and event.op.rpartition("::")[2] not in COPIES:
                function = event.where.function
                found.setdefault(f"{event.where.place.partition(':')[0]} {function}", []).append(
                    index
                )
    for indices in found.values():
        event, made, ways = recorder.events[indices[0]], dict[str, int](), dict[str, None]()
        assert type(event) is Launch
        for index in indices:
            launch = recorder.events[index]
            assert type(launch) is Launch
            ways.update(dict.fromkeys(recorder.chains.get(index, ())))
            for number in (*launch.read, *launch.written):
                line = recorder.born.get(number, "")
                if line and not line.startswith(STAND_INS):
                    made[line] = recorder.sizes.get(number, 0)
        makers = sorted(made, key=lambda line: made[line])  # a table is smaller than what meets it
        for line in makers:
            ways.update(dict.fromkeys((line, *recorder.led.get(line, ()))))
        what = (
            f"{event.op} and other operations of torch stand in for a Triton kernel, which takes "
        )
        what += "contiguous tensors of one dtype and tables of the accumulation dtype; what they "
        what += f"take was made at {', '.join(makers)}"
        yield Finding("stand-in", event.where.place, what, (*makers, "")[0], tuple(ways))
