# SPDX-License-Identifier: Apache-2.0
"""Tell the story of each collective and message of a step, for tools/explain.py: who asks, who
waits, why.

Nothing in the trainer knows of this. The trace of the grid hears of each collective and message and
reads the Python stack; a TorchDispatchMode sees every operation, and so knows what a tensor came
from and what ran while bytes were under way; a Watch hears of each action that begins.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode

from mpu.comm.transport import Axis
from mpu.comm.watch import Watch
from pretrain_llama import Run
from tools.explain_zero import Buckets

ROOT = Path(__file__).resolve().parent.parent
# functions that do one kind of matmul, by file and name
MATMULS = {
    ("mpu/comm/paths.py", "product"): "matmul",
    ("mpu/param.py", "accumulate"): "wgrad matmul",
}
# what the step itself asks for, by file: phase, and the name that stands for a layer
ASIDE = {
    "pretrain_llama.py": ("loss sum", "train_step"),
    "training/control.py": ("go on?", "agreement"),
}
ZERO = {
    "mpu/zero/bucket.py": "grad sum",
    "mpu/zero/param_and_grad_buffer.py": "grad sum",
    "mpu/zero/reduce.py": "grad sum",
    "mpu/zero/weights.py": "gather",
    "mpu/zero/optimizer.py": "norm",
}
MESSAGES = ("send", "receive")
COPIES = ("aten::clone", "aten::_to_copy")  # what they copy is still the result of another op


class Place(NamedTuple):
    """Where the program stands: read off the Python stack."""

    layer: str
    site: str  # file:line
    phase: str
    task: str  # the kind of matmul, if it is one
    event: "Seen | None"  # the collective that is being carried out, if one is
    bucket: int | None  # that is being summed or gathered
    during: str  # the layer that runs, and where, if a bucket's turn came in the middle of one


class Parcel(NamedTuple):
    """What a message carries: the output of a stage's F, or the input's gradient of its B."""

    kind: str  # F or B
    micro_batch: int
    stage: int  # that made it
    peer: int  # the pipeline rank at the other end

    def __str__(self) -> str:
        what = "activation" if self.kind == "F" else "gradient"
        return f"stage {self.stage}'s {what} {self.micro_batch}"


@dataclass(eq=False)
class Seen:
    """A collective or message with its story. `shape` is of the tensor put in, `sent` of this rank.

    The numbers of actions are places in `explainer.actions`.
    """

    explainer: "Explainer"
    number: int  # from 1
    verb: str
    axis: str
    size: int
    shape: tuple[int, ...]
    sent: int
    is_async: bool
    action: int  # during which it was issued; a receive: before which
    place: Place
    needs: str  # what made the tensor put in
    first: int  # operations done before it was issued
    parcel: Parcel | None = None
    pending: str = ""  # gradients that the bucket behind this one waits for
    whole: list[int] = field(default_factory=list)  # other buckets with gathered weights
    waited_at: str = ""
    waited_in: int = 0  # action; of a receive the one that its data is for
    meanwhile: list[str] = field(default_factory=list)

    def waited(self) -> None:
        """Note who waited for the result, and what ran since the start."""
        place = self.explainer.look()
        self.waited_at = place.during or place.site
        self.waited_in = len(self.explainer.actions)
        self.meanwhile = self.explainer.done[self.first :]


class Actions(Watch):
    """A watch at world size 1 that tells what the rank does next."""

    def __init__(self, begins: Callable[[str], None]) -> None:
        self._begins = begins
        super().__init__()

    @property
    def action(self) -> str:
        """What the rank is doing, in words."""
        return self._action

    @action.setter
    def action(self, words: str) -> None:
        self._action = words
        self._begins(words)


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
    """The trace of a grid: is told of every collective and message, and keeps them in `events`.

    watch: for the run to say what it does; actions: what it said, in order. before: what was on its
    way when the step began.
    """

    def __init__(self) -> None:
        self.events: list[Seen] = []
        self.before: list[Seen] = []
        self.actions: list[str] = []
        self.buckets: Buckets | None = None  # once there is a run
        self.layers: dict[int, str] = {}
        self.weights: dict[int, str] = {}
        self.watch = Actions(self._begins)
        self.done: list[str] = []  # operations in order
        self.maker: dict[int, str] = {}  # storage -> what wrote it last

    def know(self, run: Run) -> None:
        """Learn the names of the layers and of the buckets, and hear of each gradient."""
        named = run.model.named_parameters(remove_duplicate=False)
        self.weights = {id(weight): name.removesuffix(".weight") for name, weight in named}
        self.layers = {id(layer): name for name, layer in run.model.named_modules()}
        self.buckets = Buckets(run)

    def begin(self, micro_batches: int) -> None:
        """Forget what was, but for what is still on its way: the step that is told begins."""
        assert self.buckets is not None, "know() comes first"
        self.buckets.begin(micro_batches)
        on_their_way = [event for event in self.events if event.is_async and not event.waited_at]
        self.before = [event for event in on_their_way if event.parcel is None]  # the rest is sent
        for event in self.before:
            event.first = 0
        for kept in (self.events, self.actions, self.done, self.maker):
            kept.clear()

    def _begins(self, words: str) -> None:
        if not words.startswith("waiting for"):  # that is told of the message
            self.actions.append(words)

    def issued(
        self, verb: str, axis: Axis, tensor: Tensor, sent: int, is_async: bool, label: Any = None
    ) -> Seen:
        """Record a collective or message that is about to start, and where it stands."""
        place, memory = self.look(), tensor.untyped_storage().data_ptr()
        event = Seen(
            self,
            len(self.events) + 1,
            verb,
            axis.name,
            axis.size,
            tuple(tensor.shape),
            sent,
            is_async,
            len(self.actions) - (verb != "receive"),
            place,
            self.maker.get(memory, ""),
            len(self.done),
        )
        if place.bucket is not None and self.buckets is not None:
            event.whole, event.pending = self.buckets.whole(), self.buckets.after(place.bucket)
        if verb in MESSAGES:
            event.parcel = parcel = _parcel()
            phase = "forward" if parcel.kind == "F" else "backward"
            event.place = place._replace(layer=str(parcel), phase=phase)
        if verb == "receive":
            self.maker[memory] = f"{event.parcel}, message {event.number}"
        self.events.append(event)
        return event

    def look(self) -> Place:
        """Walk up the Python stack, innermost frame first, as far as autograd's engine."""
        layer = weighed = site = phase = task = ""
        event, bucket = None, None
        during: tuple[str, str] | tuple[()] = ()
        nodes: list[Any] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name, path = frame.f_code.co_name, _path(frame.f_code.co_filename)
            if name == "backward" and frame.f_code.co_filename.endswith("autograd/__init__.py"):
                phase = phase or "backward"
                break
            if path:
                here = frame.f_locals
                if not path.startswith("mpu/comm/") or path == "mpu/comm/overlap.py":
                    site = site or f"{path}:{frame.f_lineno}"
                node, seen = here.get("f"), here.get("event")
                if isinstance(node, FunctionCtx):
                    # where a Function's backward does not know its layer, its forward left word
                    if name == "backward" and hasattr(node, "explained"):
                        layer = layer or node.explained[0]
                        site = site or f"{node.explained[1]} (backward)"
                    nodes += [node] if name == "forward" else []
                task = MATMULS.get((path, name), task)  # the outer name says more
                event = event or (seen if isinstance(seen, Seen) else None)
                phase = phase or _phase(path, name)
                if bucket is None and not layer and self.buckets is not None:
                    bucket = self.buckets.number(here.get("bucket", here.get("self")))
                    layer = "" if bucket is None else f"bucket {bucket}"
                for key in ("layer", "self"):
                    known = self.layers.get(id(here.get(key)), "")
                    during = during or ((known, f"{path}:{frame.f_lineno}") if known else ())
                    layer = layer or known
                weighed = weighed or self.weights.get(id(here.get("weight")), "")
            frame = frame.f_back
        file = site.partition(":")[0]
        aside_phase, aside = ASIDE.get(file, ("forward", Path(file).stem))
        phase, layer = phase or aside_phase, layer or weighed or aside
        task = f"dgrad {task}" if (task, phase) == ("matmul", "backward") else task
        for node in nodes:
            if not hasattr(node, "explained"):
                node.explained = (layer, site) if bucket is None else during
        words = "{} ({})".format(*during) if during and bucket is not None else ""
        return Place(layer, site, phase, task, event, bucket, words)

    def ran(self, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note an operation, and which memory it wrote."""
        place, name = self.look(), schema.name.removeprefix("aten::").strip("_")
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        changed = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        written = [*(out if isinstance(out, tuple) else [out]), *(given.get(n) for n in changed)]
        if place.event is not None:
            what = "message" if place.event.verb in MESSAGES else "collective"
            story = f"{what} {place.event.number}"
        elif schema.name in COPIES:
            story = self.maker.get(args[0].untyped_storage().data_ptr(), name)
        else:
            story = f"{place.task or name} of {place.layer}"
            if not place.site:
                story = f"autograd's {name} of the gradients of two branches"
            if not name.startswith(("empty", "new_empty", "new_full")):
                self.done.append(story)
            story += f" ({place.site})" if place.site else ""
        for tensor in [x for each in written for x in (each if isinstance(each, list) else [each])]:
            if isinstance(tensor, Tensor):
                self.maker[tensor.untyped_storage().data_ptr()] = story


def _parcel() -> Parcel:
    """Read off the Python stack what the engine hands to p2p.send or p2p.receive."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name, here = frame.f_code.co_name, frame.f_locals
        if _path(frame.f_code.co_filename) == "mpu/pipeline/engine.py":
            if name == "_give":
                return Parcel(here["kind"], here["i"], here["stage"], here["to"])
            if name == "_post":
                schedule, message = here["self"].schedule, here["message"]
                stage = schedule.stage(message.to, message.chunk)
                maker = stage + (-1 if message.kind == "F" else 1)
                return Parcel(message.kind, message.micro_batch, maker, message.sender)
        frame = frame.f_back
    raise RuntimeError("a message that is not the pipeline engine's")


def _phase(path: str, name: str) -> str:
    """Say which part of the step a frame belongs to, where it decides that."""
    if path == "mpu/recompute.py":
        return "recompute" if name == "backward" else ""
    if name == "backward" and path.startswith("mpu/"):
        return "backward"
    if name == "run_deferred":
        return "wgrad"
    if name in ("weights_from_masters", "_gather_weights"):
        return "update"
    return ZERO.get(path, "")


class Operations(TorchDispatchMode):
    """Show the explainer every operation that computes something."""

    def __init__(self, explainer: Explainer) -> None:
        super().__init__()
        self.explainer = explainer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run it, and note it unless it is a view."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not func.is_view:
            self.explainer.ran(func._schema, args, kwargs, out)
        return out
