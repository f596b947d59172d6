# SPDX-License-Identifier: Apache-2.0
"""Report the cost of a layer's activations: kept, recomputed or offloaded to host memory."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from forecast.device_file import Device
from forecast.recording import Recorder
from forecast.rehearsal.clock import HOST_LINK, Timing
from forecast.rehearsal.events import Action, Event, Launch, Wait
from forecast.rehearsal.roofline import launch_seconds
from mpu.meta_tensors import META
from mpu.module_tracker import ModuleTracker
from mpu.pipeline.stage_layout import Stage
from training.run.context_parallel import rank_batch
from training.run.model_profile import ModelProvider, rank_model
from training.run.text import in_units
from training.settings.config import Config

OFFLOAD, PLACE = "offload", "mpu/activation_offload.py"


class Row(NamedTuple):
    """A module of a layer. choice: keep, recompute or offload, in this run.

    bytes: activations of a micro-batch that it saves. recompute_seconds: of its forward.
    offload_seconds: on the link, in each direction.
    """

    module: str
    bytes: int
    recompute_seconds: float
    offload_seconds: float
    choice: str


class Carried(NamedTuple):
    """The copies of activations between the device and host memory in a step.

    down, up: bytes to and from host memory. seconds: on the link. can_hide: seconds on the link
    that can overlap kernels: in each action the lesser of its copies, and of its kernels between
    the first copy and the last wait for one. exposed: seconds that kernels wait for copies. hidden:
    the share of can_hide that is not exposed.
    """

    down: int
    up: int
    seconds: float
    can_hide: float
    exposed: float

    @property
    def hidden(self) -> float:
        if not self.can_hide:
            return 1.0
        # at most 1, since waits for other ranks hide copies, too
        return min(1.0, (self.seconds - self.exposed) / self.can_hide)


def rows(
    config: Config, provider: ModelProvider, events: Sequence[Event], device: Device
) -> list[Row]:
    """Return a row for each module of a layer. events: of one step of a rank."""
    seconds: dict[str, float] = defaultdict(float)
    ran: set[tuple[str, str]] = set()
    words = ""
    for event in events:
        if isinstance(event, Action):
            words = event.words
        if isinstance(event, Launch) and event.where.phase == "forward":
            layer, module = in_layer(event.where.layer)
            if layer and event.where.part != OFFLOAD:
                seconds[module] += launch_seconds(device, event)
                ran.add((layer, words))
    saved = kept = saved_by_module(config, provider, recomputes=False)
    if config.parallel.recompute_granularity is not None:
        kept = saved_by_module(config, provider, recomputes=True)
    found = []
    for module in [*saved, *(name for name in seconds if name not in saved)]:
        nbytes = saved.get(module, 0)
        again = seconds[module] / max(len(ran), 1)
        decided = choice(config, module, nbytes, kept.get(module, 0))
        found.append(Row(module, nbytes, again, nbytes / device["host_bandwidth"], decided))
    return found


def in_layer(name: str) -> tuple[str, str]:
    """Return ("layers.3", "mlp.down") for "layers.3.mlp.down"; ("", "") outside of layers."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: at + 1]), ".".join(parts[at + 1 :])


def choice(config: Config, module: str, nbytes: int, kept: int) -> str:
    """Return what the flags do with a module's activations, in a layer to which they apply.

    nbytes: saved without recomputation. kept: saved with the run's recomputation.
    """
    g = config.gpu
    if not nbytes:
        return ""
    if kept < nbytes:
        return "recompute"
    if g.cpu_offload_activations and (not g.offload_modules or module in g.offload_modules):
        return "offload"
    return "keep"


def saved_by_module(config: Config, provider: ModelProvider, recomputes: bool) -> dict[str, int]:
    """Return {module: bytes} that the model's first layer saves for a micro-batch on a rank.

    Modules are named as in the layer, "" for the layer itself, in the order of forward. A storage
    counts for the module that saves it first. recomputes: whether to recompute as the run does, or
    not at all.
    """
    p = config.parallel
    if not recomputes:
        p = replace(p, recompute_granularity=None, recompute_method=None, recompute_num_layers=None)
    stays = replace(config.gpu, cpu_offload_activations=False)
    config = replace(config, parallel=p, gpu=stays)
    model = rank_model(config, provider, [Stage(0, 2, embedding=True)], 0)
    assert isinstance(model, nn.Module)
    tracker = ModuleTracker(model, model.ctx.queue, model.ctx.sink)
    found, known = Counter[str](), {id(p.untyped_storage()) for p in model.parameters()}
    storages = []  # keeps the storages alive, so that their ids stay unique

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        layer, module = in_layer(tracker.running())
        if layer.endswith(".0") and id(storage) not in known:
            known.add(id(storage))
            storages.append(storage)
            found[module] += storage.nbytes()
        return tensor

    size, positions, packed = rank_batch(config)
    tokens = torch.empty(size, dtype=torch.long, device=META)
    gpu = config.parallel.device != "cpu"
    with Recorder(gpu), saved_tensors_hooks(note, lambda x: x):
        model(tokens, None, positions, packed, chunk=0)
    tracker.close()
    return dict(found)


def carried(events: Sequence[Event], device: Device, timing: Timing) -> Carried:
    """Return the copies of activations in a step, which has this timing."""
    down = up = 0
    seconds = can_hide = 0.0
    copies = computing = waiting = 0.0  # of the action; `waiting`: of kernels since its last wait
    for event in [*events, Action("")]:
        if isinstance(event, Action):
            can_hide += min(copies, computing)
            copies = computing = waiting = 0.0
        elif isinstance(event, Wait) and event.place.startswith(PLACE):
            computing, waiting = computing + waiting, 0.0
        elif isinstance(event, Launch):
            took = launch_seconds(device, event)
            if event.where.part == OFFLOAD and event.op.startswith("memcpy "):
                down += event.bytes * event.op.endswith("DtoH")
                up += event.bytes * event.op.endswith("HtoD")
                seconds, copies = seconds + took, copies + took
            elif event.stream == 0 and copies:
                waiting += took
    return Carried(down, up, seconds, can_hide, timing.exposed_seconds.get(HOST_LINK, 0.0))


def as_json(table: Sequence[Row], moved: Carried) -> dict[str, Any]:
    """Return the table and the copies as JSON's types."""
    return {
        "modules": [row._asdict() for row in table],
        "carried": {**moved._asdict(), "hidden": moved.hidden},
    }


def lines(table: Sequence[Row], moved: Carried) -> list[str]:
    """Return the table and the copies as lines of text."""
    out = [f"{'module':<16} {'keeps':>9} {'to recompute':>13} {'to offload':>11}  here"]
    for row in table:
        out.append(
            f"{row.module or '(the layer)':<16} {in_units(row.bytes):>9} "
            f"{1e3 * row.recompute_seconds:>10.3f} ms {1e3 * row.offload_seconds:>8.3f} ms  "
            f"{row.choice}".rstrip()
        )
    total = sum(row.bytes for row in table)
    again = sum(row.recompute_seconds for row in table)
    offload = sum(row.offload_seconds for row in table)
    out.append(f"{'all':<16} {in_units(total):>9} {1e3 * again:>10.3f} ms {1e3 * offload:>8.3f} ms")
    if moved.down:
        out.append(
            f"a step copies {in_units(moved.down)} to host memory and {in_units(moved.up)} back in "
            f"{1e3 * moved.seconds:.1f} ms; kernels can hide {1e3 * moved.can_hide:.1f} ms of it, "
            f"and hide {100 * moved.hidden:.0f} % of that"
        )
    return out
