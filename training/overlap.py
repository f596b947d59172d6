# SPDX-License-Identifier: Apache-2.0
"""Settle, before the first step, which path each linear layer's parts take, and say it.

With --tp-comm-overlap none, ring or symmetric that is a matter of words; with auto it is what the
checkpoint says, or what --tp-comm-overlap-cache holds for this machine, or what is measured now
(mpu/comm/tune.py). All ranks come to the same. docs/overlap.md tells the whole story.
"""

import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpu.comm.collectives import gather_bytes
from mpu.comm.paths import PATHS
from mpu.comm.tune import MARGIN, Projection, choose, tune
from mpu.context import LayerContext, OverlapPlan
from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear
from training.config import Config, UsageError

FORMAT = "weft tp-comm-overlap 1"
Note = Callable[[str], None]


def projections(model: nn.Module, tokens: int) -> dict[str, Projection]:
    """List the linear layers by name, as a micro-batch of so many tokens passes through them."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
            (width, k), t = layer.weight.shape, layer.ctx.tp.size
            column = isinstance(layer, ColumnParallelLinear)
            found[name] = Projection(column, tokens // t, k, width, layer.ctx.dtype)
    return found


def settle(model: nn.Module, ctx: LayerContext, config: Config, note: Note) -> None:
    """Fill ctx.overlap and tell, one line a projection. Every rank of the world calls it.

    Raises UsageError, on every rank, where the cache file holds something else.
    """
    plan, world = ctx.overlap, ctx.grid.world
    if not ctx.sp:
        return
    if plan.mode == "none":
        note("overlap: none, as --tp-comm-overlap says: linear layers wait for what they gather")
        return
    layers = projections(model, config.batch.micro_batch_size * config.model.seq_length)
    here = {
        "names": list(_names(layers)),
        "why_not": _why_not(ctx, config),
        "machine": _machine(ctx),
    }
    every = [json.loads(d) for d in gather_bytes(json.dumps(here).encode(), world, ctx.device)]
    names = {(name, key): None for told in every for name, key in told["names"]}
    why_not = next((told["why_not"] for told in every if told["why_not"]), "")
    paths = [path for path in PATHS if path != "symmetric" or not why_not]
    if plan.mode == "auto":
        machine = " + ".join(sorted({told["machine"] for told in every}))
        _auto(ctx, config, layers, {key for _, key in names}, paths, machine, note)
        if why_not:
            note(f"overlap: symmetric is not to be had: {why_not}")
    for line in _lines(plan, names, why_not):
        note(line)
    plan.told = len(plan.choices)


def unchosen(plan: OverlapPlan) -> list[str]:
    """Say, once, which matmuls came with a shape that nothing had been chosen for."""
    new = list(plan.choices)[plan.told :]
    plan.told = len(plan.choices)
    return [f"overlap: lost: {key} was not measured at the start, so it takes none" for key in new]


def _names(layers: Mapping[str, Projection]) -> dict[tuple[str, str], None]:
    """List (name, matmul) of both directions; layers of a number are told together."""
    out: dict[tuple[str, str], None] = {}
    for name, p in layers.items():
        stars = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        out |= {(f"{stars} forward", p.forward): None, (f"{stars} backward", p.backward): None}
    return out


def _why_not(ctx: LayerContext, config: Config) -> str:
    """Say why the ranks of tp share no memory; nothing where they do."""
    if ctx.tp.symmetric:
        return ""
    if config.parallel.no_shared_memory:
        return "--no-shared-memory"
    return ctx.tp.no_memory


def _machine(ctx: LayerContext) -> str:
    """Name all that times depend on."""
    if ctx.device.type == "cuda":
        name = torch.cuda.get_device_name(ctx.device)
    else:
        told = Path("/proc/cpuinfo")  # of Linux alone
        model = re.search(r"model name\s*: (.*)", told.read_text() if told.exists() else "")
        name = f"{os.cpu_count()} x {model[1] if model else platform.machine()}"
    parts = [
        *(f"tp {ctx.tp.size}", f"{ctx.grid.launch.local_world} ranks on {name}"),
        *(f"{torch.get_num_threads()} threads", f"torch {torch.__version__}"),
        f"{ctx.grid.backend} {'and' if ctx.tp.symmetric else 'without'} shared memory",
    ]
    return ", ".join(parts)


def _fits(choices: Mapping[str, str], needed: set[str], paths: list[str]) -> str:
    """Say why these choices are not for this run; nothing where they are."""
    for key in sorted(needed):
        if key not in choices:
            return f"it says nothing of {key}"
        if choices[key] not in paths:
            return f"it says {choices[key]} of {key}, which is not to be had"
    return ""


def _auto(
    ctx: LayerContext,
    config: Config,
    layers: Mapping[str, Projection],
    needed: set[str],
    paths: list[str],
    machine: str,
    note: Note,
) -> None:
    """Replay the checkpoint's choices, or take the cache's, or measure; say which."""
    plan, file = ctx.overlap, config.parallel.tp_comm_overlap_cache
    if plan.choices:
        why = _fits(plan.choices, needed, paths)
        if not why:
            note("overlap: as in the checkpoint, which the run goes on from")
            return
        note(f"overlap: the checkpoint does not fit, {why}")
        plan.choices.clear()
    held = _cached(ctx, file, machine) if file else {}
    if held:
        why = _fits(held["choices"], needed, paths)
        if not why:
            note(f"overlap: as in {file}")
            plan.choices |= {key: held["choices"][key] for key in sorted(needed)}
            plan.seconds |= held["seconds"]
            return
        note(f"overlap: {file} does not fit, {why}")
    elif file:
        note(f"overlap: {file} has nothing of this machine: {machine}")
    note("overlap: measuring")
    times = tune(layers.values(), paths, ctx.tp, ctx.grid.world, ctx.device)
    plan.choices |= choose(times)
    plan.seconds |= times
    if file and ctx.grid.rank == 0:
        _write(file, machine, {"choices": plan.choices, "seconds": times}, note)


def _cached(ctx: LayerContext, file: str, machine: str) -> dict[str, Any]:
    """Return what the cache file holds for this machine, as rank 0 reads it."""
    told: dict[str, Any] = {}
    if ctx.grid.rank == 0:
        try:
            told["held"] = read(file).get(machine, {})
        except UsageError as error:
            told["error"] = str(error)
    text = gather_bytes(json.dumps(told).encode(), ctx.grid.world, ctx.device)[0]
    told = json.loads(text)
    if "error" in told:
        raise UsageError(told["error"])
    return told["held"]


def read(file: str) -> dict[str, dict[str, Any]]:
    """Return {machine: {"choices": ..., "seconds": ...}}; nothing where there is no file.

    Raises UsageError, naming file and reason, where it is not one of ours.
    """
    said = f"--tp-comm-overlap-cache {file}: "
    try:
        with open(file, encoding="utf-8") as opened:
            found = json.load(opened)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{said}{error}; delete it, or name another file") from None
    try:
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']!r}")
        for held in found["machines"].values():
            if not set(held["choices"].values()) <= set(PATHS):
                raise ValueError("a path that does not exist")
            for times in held["seconds"].values():
                if not all(path in PATHS and spent > 0 for path, spent in times.items()):
                    raise ValueError("a time that is none")
        return found["machines"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        why = f"it is not what {FORMAT} looks like ({type(error).__name__}: {error})"
        raise UsageError(f"{said}{why}; delete it, or name another file") from None


def _write(file: str, machine: str, held: dict[str, Any], note: Note) -> None:
    """Put this machine's entry beside the others', written aside and renamed."""
    aside = f"{file}.{os.getpid()}"
    try:
        whole = {"format": FORMAT, "machines": read(file) | {machine: held}}
        os.makedirs(os.path.dirname(os.path.abspath(file)), exist_ok=True)
        with open(aside, "w", encoding="utf-8") as out:
            json.dump(whole, out, indent=1)
        os.replace(aside, file)
        note(f"overlap: kept in {file}")
    except (OSError, UsageError) as error:
        note(f"overlap: --tp-comm-overlap-cache {file} was not written: {error}")


def _lines(plan: OverlapPlan, names: Mapping[tuple[str, str], None], why: str) -> Iterator[str]:
    """Tell each projection's path, why, and what it gains."""
    asked = plan.mode
    if asked == "symmetric" and why:
        plan.mode = "ring"  # everywhere, though some tp groups might share memory
    for name, key in names:
        begin = f"overlap: {name} ({key}): "
        if asked == "auto":
            yield begin + _reason(plan.choices[key], plan.seconds.get(key, {}))
        elif plan.mode != asked:
            yield f"{begin}{plan.mode}, as symmetric is not to be had: {why}"
        else:
            yield f"{begin}{asked}, as asked for; the gain is not measured"


def _reason(path: str, seconds: Mapping[str, float]) -> str:
    """Say what was measured, and what is expected of it."""
    if not seconds:
        return f"{path}, as recorded"
    told = ", ".join(f"{p} {s * 1e3:.3g} ms" for p, s in seconds.items())
    if path == "none":
        return f"none, as nothing else is {MARGIN:.0%} faster: {told}"
    return f"{path}, {1 - seconds[path] / seconds['none']:.0%} less time expected: {told}"
