# SPDX-License-Identifier: Apache-2.0
"""Choose, before the first step, the overlap method of each linear layer, and print it.

--tp-comm-overlap names one method for all layers (none, ring, symmetric), or is auto. With auto the
methods come from the checkpoint if they fit, else from a measurement (measure.py). All ranks reach
the same choice. See docs/overlap.md.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping

from torch import nn

from mpu.comm.collectives import gather_bytes
from mpu.context import LayerContext
from mpu.layers.linear import ColumnParallelLinear, Recipe, RowParallelLinear, use_overlap
from mpu.overlap.choices import METHODS, Auto, OverlapMap
from training.run.autotune.measure import MARGIN, Projection, choose, tune
from training.run.log import Log
from training.run.step import CONTINUE, Decision, Step
from training.settings.config import Config

Note = Callable[[str], None]


def projections(model: nn.Module, tokens: int) -> dict[str, Projection]:
    """Return the linear layers by name, with their sizes for a micro-batch of `tokens` tokens."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)) and not _chunked(layer):
            (width, k), t = layer.weight.shape, layer.ctx.tp.size if layer.ctx.sp else 1
            column = isinstance(layer, ColumnParallelLinear)
            own = None if type(layer.recipe) is Recipe else layer.recipe.of_any_layer()
            found[name] = Projection(column, tokens // t, k, width, layer.ctx.dtype, own)
    return found


def _chunked(layer: ColumnParallelLinear | RowParallelLinear) -> bool:
    """Return whether the layer is multiplied in chunks, by mpu/layers/linear_cross_entropy.py."""
    output = isinstance(layer, ColumnParallelLinear) and layer.output_layer
    return output and layer.ctx.loss_in_chunks is not None


class Overlap:
    """The overlap methods of a run. chosen: the map that all ranks resolved at the start. auto: the
    layers' Auto method, None with other methods.
    """

    def __init__(self, chosen: OverlapMap, model: nn.Module) -> None:
        self.chosen = chosen
        method = use_overlap(model, chosen)
        self.auto = method if isinstance(method, Auto) else None


class OverlapNotes:
    """Logs, once each, the matmuls that ran with a shape that was not measured."""

    def __init__(self, auto: Auto, log: Log) -> None:
        self.auto, self.log, self._noted = auto, log, 0

    def after_step(self, step: Step) -> Decision:
        """Log those of this step."""
        new = list(self.auto.unmeasured)[self._noted :]
        self._noted += len(new)
        for matmul in new:
            self.log.note(
                f"overlap: {matmul} was not measured at the start, so it runs without overlap"
            )
        return CONTINUE


def choose_methods(
    model: nn.Module,
    ctx: LayerContext,
    config: Config,
    note: Note,
    recorded: Mapping[str, str] | None = None,
) -> Overlap:
    """Choose the method of every linear layer and print one line a matmul. All ranks call it.
    recorded: the choices of the checkpoint that the run resumes.
    """
    mode, world = config.parallel.tp_comm_overlap, ctx.grid.world
    if not ctx.sp:
        return Overlap(OverlapMap(mode, recorded or {}), model)
    if mode == "none":
        note("communication overlap: off (--tp-comm-overlap turns it on)")
        return Overlap(OverlapMap(mode), model)
    tokens = config.batch.micro_batch_size * config.model.seq_length
    layers = projections(model, tokens // ctx.grid.cp.size)
    here = {
        "names": list(_names(layers)),
        "why_not": _why_not(ctx, config),
    }
    ranks = [json.loads(d) for d in gather_bytes(json.dumps(here).encode(), world, ctx.device)]
    names = {(name, key): None for rank in ranks for name, key in rank["names"]}
    why_not = next((rank["why_not"] for rank in ranks if rank["why_not"]), "")
    chosen = OverlapMap(mode)
    if mode == "auto":
        methods = [method for method in METHODS if method != "symmetric" or not why_not]
        needed = {key for _, key in names}
        chosen = _auto(ctx, layers, needed, methods, note, recorded or {})
        if why_not:
            note(f"overlap: symmetric is not available: {why_not}")
    elif mode == "symmetric" and why_not:
        chosen = OverlapMap("ring")  # everywhere, though some tp groups might share memory
    for line in _lines(mode, chosen, names, why_not):
        note(line)
    if ctx.loss_in_chunks is not None:
        note("overlap: output layer: none, as --fused-linear-cross-entropy multiplies in chunks")
    return Overlap(chosen, model)


def _names(layers: Mapping[str, Projection]) -> dict[tuple[str, str], None]:
    """Return the keys (name, matmul) of both directions; numbered layers share one name."""
    out: dict[tuple[str, str], None] = {}
    for name, p in layers.items():
        stars = starred(name)
        out |= {(f"{stars} forward", p.forward): None, (f"{stars} backward", p.backward): None}
    return out


def starred(name: str) -> str:
    """Return a module's name with a star for each number, which layers of a stack then share."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _why_not(ctx: LayerContext, config: Config) -> str:
    """Return why the ranks of tp share no memory, or "" if they do."""
    if ctx.tp.symmetric:
        return ""
    if config.parallel.no_shared_memory:
        return "--no-shared-memory"
    return ctx.tp.required_transport.why_not


def _fits(choices: Mapping[str, str], needed: set[str], methods: list[str]) -> str:
    """Return why these choices do not fit this run, or "" if they do."""
    for key in sorted(needed):
        if key not in choices:
            return f"it has none for {key}"
        if choices[key] not in methods:
            return f"it has {choices[key]} for {key}, which is not available"
    return ""


def _auto(
    ctx: LayerContext,
    layers: Mapping[str, Projection],
    needed: set[str],
    methods: list[str],
    note: Note,
    recorded: Mapping[str, str],
) -> OverlapMap:
    """Return the checkpoint's choices if they fit, or measure; print which."""
    if recorded:
        why = _fits(recorded, needed, methods)
        if not why:
            note("overlap: as in the checkpoint")
            return OverlapMap("auto", recorded)
        note(f"overlap: the choices of the checkpoint cannot be used: {why}")
    note("overlap: measuring")
    times = tune(layers.values(), methods, ctx)
    return OverlapMap("auto", choose(times), times)


def _lines(
    mode: str, chosen: OverlapMap, names: Mapping[tuple[str, str], None], why: str
) -> Iterator[str]:
    """Yield each matmul's method, the reason, and the expected gain."""
    for name, key in names:
        begin = f"overlap: {name} ({key}): "
        if mode == "auto":
            yield begin + _reason(chosen.choices[key], chosen.seconds.get(key, {}))
        elif chosen.mode != mode:
            yield f"{begin}{chosen.mode}, as symmetric is not available: {why}"
        else:
            yield f"{begin}{mode}, as asked for; the gain is not measured"


def _reason(method: str, seconds: Mapping[str, float]) -> str:
    """Return a matmul's method with its measured times and the expected gain."""
    if not seconds:
        return f"{method}, as recorded"
    measured = ", ".join(f"{m} {s * 1e3:.3g} ms" for m, s in seconds.items())
    if method == "none":
        return f"none, as nothing else is {MARGIN:.0%} faster: {measured}"
    return f"{method}, {1 - seconds[method] / seconds['none']:.0%} less time expected: {measured}"
