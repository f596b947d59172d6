# SPDX-License-Identifier: Apache-2.0
"""Tell the story of each collective of a step, for tools/explain.py: who asks, who waits, why.

Nothing in the trainer knows of this. The trace of the grid hears of each collective and reads the
Python stack; a TorchDispatchMode sees every operation, and so knows what a tensor came from and
what ran while bytes were under way.
"""

import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode

from mpu.comm.watch import Watch
from mpu.grid import Axis, Grid
from mpu.zero.buckets import Bucket
from pretrain_llama import Run

ROOT = Path(__file__).resolve().parent.parent
# functions that do one kind of matmul, by file and name
MATMULS = {
    ("mpu/layers/linear.py", "_product"): "matmul",
    ("mpu/layers/linear.py", "_dgrad"): "dgrad matmul",
    ("mpu/param.py", "accumulate"): "wgrad matmul",
}
# what the step itself asks for, by file: phase, and the name that stands for a layer
ASIDE = {
    "pretrain_llama.py": ("loss sum", "train_step"),
    "training/control.py": ("go on?", "agreement"),
}
COPIES = ("aten::clone", "aten::_to_copy")  # what they copy is still the result of another op


class Place(NamedTuple):
    """Where the program stands: read off the Python stack."""

    layer: str
    site: str  # file:line
    phase: str
    task: str  # the kind of matmul, if it is one
    event: "Seen | None"  # the collective that is being carried out, if one is


@dataclass(eq=False)
class Seen:
    """A collective with its story. `shape` is of the tensor put in, `sent` of this rank."""

    explainer: "Explainer"
    number: int  # from 1
    verb: str
    axis: str
    size: int
    shape: tuple[int, ...]
    sent: int
    is_async: bool
    section: str  # what the step was doing, in its own words
    place: Place
    needs: str  # what made the tensor put in
    first: int  # operations done before it was issued
    waited_at: str = ""
    meanwhile: list[str] = field(default_factory=list)

    def waited(self) -> None:
        """Note who waited for the result, and what ran since the start."""
        self.waited_at = self.explainer.look().site
        self.meanwhile = self.explainer.done[self.first :]


@cache
def _path(file: str) -> str:
    """Return the file's path in this repository, "" for files that are not the trainer's own."""
    try:
        path = Path(file).resolve().relative_to(ROOT)
    except ValueError:
        return ""
    own = path.parts[0] in ("mpu", "model", "training", "pretrain_llama.py")
    return path.as_posix() if own else ""


class Explainer:
    """The trace of a grid: is told of every collective, and keeps what it saw in `events`."""

    def __init__(self, grid: Grid) -> None:
        self.events: list[Seen] = []
        self.axes = {getattr(grid, name).name: name for name in Grid.AXES}
        self.layers: dict[int, str] = {}
        self.buckets: dict[int, str] = {}
        self.watch = Watch()
        self.done: list[str] = []  # operations in order
        self.maker: dict[int, str] = {}  # storage -> what wrote it last

    def know(self, run: Run) -> None:
        """Learn the names of the layers and of the gradient buckets."""
        self.watch = run.watch
        self.layers = {id(layer): name for name, layer in run.model.named_modules()}
        self.buckets = {id(b): f"bucket {i}" for i, b in enumerate(run.sink.buckets)}

    def issued(self, verb: str, axis: Axis, tensor: Tensor, sent: int, is_async: bool) -> Seen:
        """Record a collective that is about to start, and where it stands."""
        event = Seen(
            self,
            len(self.events) + 1,
            verb,
            self.axes[axis.name],
            axis.size,
            tuple(tensor.shape),
            sent,
            is_async,
            self.watch.action,
            self.look(),
            self.maker.get(tensor.untyped_storage().data_ptr(), ""),
            len(self.done),
        )
        self.events.append(event)
        return event

    def look(self) -> Place:
        """Walk up the Python stack, innermost frame first, as far as autograd's engine."""
        layer = site = phase = task = ""
        event, nodes = None, []
        frame = sys._getframe(1)
        while frame is not None:
            name, path = frame.f_code.co_name, _path(frame.f_code.co_filename)
            if name == "backward" and frame.f_code.co_filename.endswith("autograd/__init__.py"):
                phase = phase or "backward"
                break
            if path:
                here = frame.f_locals
                site = site or ("" if path.startswith("mpu/comm/") else f"{path}:{frame.f_lineno}")
                node, seen, bucket = here.get("f"), here.get("event"), here.get("bucket")
                if isinstance(node, FunctionCtx):
                    # where a Function's backward does not know its layer, its forward left word
                    if name == "backward" and hasattr(node, "explained"):
                        layer = layer or node.explained[0]
                        site = site or f"{node.explained[1]} (backward)"
                    nodes += [node] if name == "forward" else []
                task = MATMULS.get((path, name), task)  # the outer name says more
                event = event or (seen if isinstance(seen, Seen) else None)
                phase = phase or _phase(path, name)
                if isinstance(bucket, Bucket):
                    layer = layer or self.buckets[id(bucket)]
                for key in ("layer", "self"):
                    layer = layer or self.layers.get(id(here.get(key)), "")
            frame = frame.f_back
        file = site.partition(":")[0]
        aside_phase, aside = ASIDE.get(file, ("forward", Path(file).stem))
        phase, layer = phase or aside_phase, layer or aside
        for node in nodes:
            if not hasattr(node, "explained"):
                node.explained = (layer, site)
        return Place(layer, site, phase, task, event)

    def ran(self, schema: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Note an operation, and which memory it wrote."""
        place, name = self.look(), schema.name.removeprefix("aten::").strip("_")
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        changed = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        written = [*(out if isinstance(out, tuple) else [out]), *(given.get(n) for n in changed)]
        if place.event is not None:
            story = f"collective {place.event.number}"
        elif schema.name in COPIES:
            story = self.maker.get(args[0].untyped_storage().data_ptr(), name)
        else:
            story = f"{place.task or name} of {place.layer}"
            if not place.site:
                story = f"autograd's {name} of the gradients of two branches"
            if not name.startswith(("empty", "new_empty")):
                self.done.append(story)
            story += f" ({place.site})" if place.site else ""
        for tensor in [x for each in written for x in (each if isinstance(each, list) else [each])]:
            if isinstance(tensor, Tensor):
                self.maker[tensor.untyped_storage().data_ptr()] = story


def _phase(path: str, name: str) -> str:
    """Say which part of the step a frame belongs to, where it decides that."""
    if path == "mpu/recompute.py":
        return "recompute" if name == "backward" else ""
    if name == "backward" and path.startswith("mpu/"):
        return "backward"
    return {"mpu/zero/buckets.py": "grad sum", "mpu/zero/optimizer.py": "norm"}.get(path, "")


class Operations(TorchDispatchMode):
    """Show the explainer every operation that computes something."""

    def __init__(self, explainer: Explainer) -> None:
        super().__init__()
        self.explainer = explainer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run it, and note it unless it is a view."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not func.is_view:
            self.explainer.ran(func._schema, args, kwargs, out)
        return out
