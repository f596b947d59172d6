# SPDX-License-Identifier: Apache-2.0
"""Record one training step of a rank: every tensor that is compared between two runs.

    batch        tokens, labels, masks of each micro-batch
    weight       masters or weights, and the optimizer's state, before the step and after it
    activation   inputs and outputs of each module, and their gradients
    collective   inputs and outputs of each collective inside the model
    gradient     of each parameter: this rank's own sum over micro-batches, then the sum over ranks
    number       loss, gradient norm, learning rates

A Recorder passes each tensor to `keep` when it occurs. FileRecorder writes them for tools/compare,
which assembles the ranks' parts; first_nonfinite.py looks for non-finite values. The step does not
change: tensors are only read, no random number is drawn, and nothing is sent.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from mpu.comm.transport import Axis, Handle
from mpu.module_tracker import (
    BACKWARD,
    INPUT,
    MAIN_GRAD,
    OUTPUT,
    OUTPUT_GRAD,
    Event,
    ModuleTracker,
    path_of,
    site,
)
from mpu.param import Piece, Region, placement_of, unique_parameters
from mpu.torch_private import version_of
from mpu.zero.bucket import ParamAndGradBucket
from training.data.batch import Batch
from training.run.state import Run

INPUT_GRAD = "input gradient"
WHERE = re.compile(r"chunk (\d+) micro-batch (\d+) in stage (\d+)")
DEFERRED = re.compile(r"deferred W of (micro-batch) (\d+) in stage (\d+)")
FRAME = re.compile(r'File "([^"]+)", line (\d+)')  # of a stack that torch keeps
NEAR = 16  # most recent activations to remember: an input that is one of them is not written again
VERBS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
INSIDE = ("tp", "tp_kv", "cp", "ep")  # axes whose collectives are in the model
Names = dict[str, tuple[str, ...]]
TrainStep = Callable[..., tuple[Tensor, Tensor, Tensor]]
PLACES = {
    INPUT: "the input of {}",
    OUTPUT: "the output of {}",
    INPUT_GRAD: "the gradient of the input of {}",
    OUTPUT_GRAD: "the gradient of the output of {}",
}
PARAMETERS = {
    "weight": "the weight {}",
    "master": "the weight {}",
    "own gradient": "the gradient of the weight {}",
    "gradient": "the summed gradient of {}",
}


def in_words(entry: Mapping[str, Any]) -> str:
    """Return the description of a record's tensor."""
    name, kind = entry.get("name") or "the model", entry.get("kind", "")
    if entry["group"] == "activation":
        return PLACES[kind].format(f"{name} ({entry['of']})")
    if entry["group"] == "collective":
        verb = "takes" if kind == "taken" else "returns"
        return f"what {entry['verb']} over {entry['axis']} of {name} {verb}"
    return PARAMETERS.get(kind, f"the optimizer's {kind} of {{}}").format(entry["module"])


class _Known(NamedTuple):
    """A recorded tensor, its version at that time, the fields that `keep` returned, and the region
    and sections of its entry.
    """

    tensor: Tensor
    version: int
    kept: dict[str, Any]
    region: dict[str, Any]


class _Of(NamedTuple):
    """Identifies a tensor of a module."""

    kind: str
    name: str
    module: nn.Module | nn.Parameter
    item: int


class Recorder:
    """Passes one rank's tensors of a step to `keep`. A context manager around the step.

    names: the model's table of canonical names (hf_names); None: the parameters' own names. fork:
    the model's file, if it is not Weft's own: its lines are recorded, too. inside: record also
    activations and collectives inside the model, besides parameters and their gradients.
    """

    def __init__(
        self,
        run: Run,
        batches: list[Batch],
        names: Names | None = None,
        fork: str = "",
        inside: bool = True,
    ) -> None:
        self.run, self.batches, self.fork, self.inside = run, batches, fork, inside
        self.params = dict(unique_parameters(run.module))
        self.names = names or {name: (name,) for name in self.params}
        self.entries: list[dict[str, Any]] = []
        self.numbers: dict[str, float] = {}
        self._calls: Counter[tuple[Any, ...]] = Counter()
        self._near: list[_Known] = []  # the newest last
        self._replaced: list[tuple[Any, str]] = []
        self._pieces: dict[str, list[Piece]] = {
            name: placement_of(param).pieces(names[name]) if names else []
            for name, param in self.params.items()
        }

    def keep(self, x: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        """Process a tensor; return fields to add to its entry."""
        raise NotImplementedError

    def __enter__(self) -> "Recorder":
        # for a fork, autograd keeps the stack of each operation: its line that made a tensor
        on = bool(self.fork) and self.inside or torch.is_anomaly_enabled()
        self._stacks = torch.autograd.set_detect_anomaly(on, check_nan=False)  # takes effect now
        self._batch()
        self.state("before")
        run = self.run
        readers = {
            INPUT: self._input,
            OUTPUT: self._output,
            OUTPUT_GRAD: self._output_grad,
            MAIN_GRAD: self._main_grad,
        }
        self._follow_gradients()
        self.tracker: ModuleTracker | None = None
        if self.inside:
            self.tracker = ModuleTracker(run.module, run.engine.queue, run.sink, readers)
            self._follow_collectives(self.tracker)
        return self

    def __exit__(self, *error: object) -> None:
        for owner, name in self._replaced:
            delattr(owner, name)
        if self.tracker is not None:
            self.tracker.close()
        self._stacks.__exit__(*error)
        if error[0] is None:
            self.state("after")

    # recording tensors

    def write(self, group: str, name: str, tensor: Tensor, **more: Any) -> None:
        """Record a tensor; one that was recorded before, and is unchanged, only gets an entry.

        A module that declares no region for it has that of the module that declares one.
        """
        entry = {"group": group, "name": name, **more}
        known = next((w for w in self._near if w.tensor is tensor), None)
        if known is not None and known.version == version_of(tensor):
            self._near = [*(w for w in self._near if w is not known), known]
            if group == "activation" and not entry["region"]:
                entry |= known.region
            self.entries.append({**known.kept, **entry})
            return
        kept = self.keep(tensor.detach(), entry)
        self.entries.append({**kept, **entry})
        if group == "activation":
            region = {key: entry[key] for key in ("region", "sections")}
            known = _Known(tensor, version_of(tensor), kept, region)
            self._near = [*self._near[-NEAR + 1 :], known]

    def _batch(self) -> None:
        for i, batch in enumerate(self.batches):
            rows = len(batch.tokens)
            where = {"first": batch.first_sample, "rows": rows, "micro_batch": i}
            places, mask, ids = self._places(batch), batch.loss_mask, batch.position_ids
            self.write("batch", "tokens", batch.tokens, **where)
            self.write("batch", "labels", batch.labels, **where)
            every = torch.ones(batch.tokens.shape) if mask is None else mask.float()
            self.write("batch", "loss_mask", every, **where)
            self.write("batch", "position_ids", places if ids is None else ids, **where)
            self.write("places", "places", places, **where)

    def _places(self, batch: Batch) -> Tensor:
        cp = self.run.grid.cp
        if cp.size == 1:
            return torch.arange(batch.tokens.shape[1]).repeat(len(batch.tokens), 1)
        from training.data.context_part import places_of  # older commits have none

        return places_of(batch, cp.rank, cp.size)

    @torch.no_grad()
    def state(self, when: str) -> None:
        """Record the weights and masters that this rank owns, in the model's order, and its
        optimizer state.
        """
        run = self.run
        run.sink.wait_for_weights()
        number = {name: i for i, name in enumerate(self.params)}
        frozen = getattr(run.sink, "frozen_buckets", [])  # older commits have none
        masters = [*run.optimizer.masters, *(bucket.param_shard for bucket in frozen)]
        owned = [
            (number[part[0]], bucket, master, part)
            for bucket, master in zip([*run.sink.buckets, *frozen], masters, strict=True)
            for part in bucket.owned()
        ]
        for _, bucket, master, (name, low, high, start) in sorted(owned, key=itemgetter(0)):
            for kind, flat in (("weight", bucket.param_shard), ("master", master)):
                if kind == "weight" or master.dtype != bucket.param_shard.dtype:
                    part = flat[low - bucket.low : high - bucket.low]
                    self._part((kind, when), bucket, name, low - start, part)
        buckets = {name: b for b in run.sink.buckets for name, _, _ in b.params}
        for name, kind, first, values in run.optimizer.named_state():
            if kind != "master":
                self._part((kind, when), buckets[name], name, first, values)

    def _part(
        self, of: tuple[str, str], bucket: Any, name: str, first: int, part: Tensor
    ) -> None:
        """Record elements [first, ...) of a flattened local parameter, its gradient or its state.

        of: the kind, and whether before or after the step.
        """
        param, place = self.params[name], placement_of(self.params[name])
        _, every, _, _ = self.run.grid.data(bucket.layout.sharing.cut)
        axis = place.axis.name if place.dim is not None and place.axis.size > 1 else ""
        self.write(
            "parameter", self.names[name][0], part, module=name, kind=of[0], when=of[1],
            first=first, local=list(param.shape), data=list(every.ranks), cut=axis,
            sums=[axis.name for axis in place.reduce_axes if axis.size > 1],
            pieces=[[p.name, list(p.shape), p.dim, p.start, p.size, p.local]
                    for p in self._pieces[name]],
        )  # fmt: skip

    # hooks in the step

    def _where(self) -> dict[str, int]:
        # where an F overlaps a B, the one that is running
        forward, _, backward = self.run.monitor.action.partition(" overlapping ")
        inside = self.tracker is not None and self.tracker.in_backward
        action = backward if backward and inside else forward
        found = WHERE.search(action) or DEFERRED.search(action)
        number, stage = (int(found[2]), int(found[3])) if found else (0, 0)
        batch = self.batches[min(number, len(self.batches) - 1)]
        return {
            "micro_batch": number, "stage": stage,
            "first": batch.first_sample, "rows": len(batch.tokens),
        }  # fmt: skip

    def _activation(
        self, of: _Of, x: Tensor, call: int, line: str = "", phase: str = BACKWARD
    ) -> None:
        into = of.kind in (INPUT, INPUT_GRAD)
        region = getattr(of.module, "takes" if into else "gives", None)
        sections = getattr(of.module, "output_sections", None)
        cut = region == Region.TENSOR_PARALLEL and sections is not None and not into
        self.write(
            "activation", of.name, x, kind=of.kind, phase=phase, index=of.item, call=call,
            of=type(of.module).__name__, region=region.value if region else "", site=line,
            sections=sections() if cut and sections else [], **self._where(),
        )  # fmt: skip

    def _count(self, kind: str, name: str, phase: str) -> int:
        key = (kind, name, phase, self._where()["micro_batch"])
        self._calls[key] += 1
        return self._calls[key]

    def _input(self, event: Event) -> None:
        line, call = self._line(), self._count(INPUT, event.name, event.phase)
        for i, x in enumerate(event.tensors):
            if not x.is_floating_point():
                continue
            given = any(w.tensor is x for w in self._near)  # an output: its gradient is read
            of, line = _Of(INPUT, event.name, event.of, i), self._made(x) or line
            self._activation(of, x, call, line, event.phase)
            if x.requires_grad and not given and not isinstance(x, nn.Parameter):
                of = of._replace(kind=INPUT_GRAD)
                x.register_hook(partial(self._activation, of, call=call, line=line))

    def _output(self, event: Event) -> None:
        line, call = self._line(), self._count(OUTPUT, event.name, event.phase)
        for i, x in enumerate(event.tensors):
            if x.is_complex():  # as RoPE's factors may be; what is made of them is recorded
                continue
            of = _Of(OUTPUT, event.name, event.of, i)
            own = "" if line.startswith(f"{self.fork}:") else self._made(x)
            self._activation(of, x, call, own or line, event.phase)

    def _output_grad(self, event: Event) -> None:
        # hooks of one call's outputs fire in the order of the outputs: `call` tells them apart
        call = self._count(OUTPUT_GRAD, event.name, BACKWARD)
        for x in event.tensors:  # empty where autograd has no gradient
            self._activation(_Of(OUTPUT_GRAD, event.name, event.of, 0), x, call)

    def _main_grad(self, event: Event) -> None:
        where = {k: v for k, v in self._where().items() if k in ("micro_batch", "stage")}
        names = self.names.get(event.name, (event.name,))
        self.entries.append({"group": "order", "name": names[0], **where})

    def _line(self) -> str:
        found = site(self.fork)
        return found.use or found.call

    def _made(self, x: Tensor) -> str:
        """Return the fork's line that made a tensor, or "" if another file made it."""
        kept: dict[str, list[str]] = {} if x.grad_fn is None else cast(Any, x.grad_fn.metadata)
        lines = FRAME.findall("".join(kept.get("traceback_", ())))
        innermost = next((at for at in lines[::-1] if path_of(at[0], self.fork)), None)
        return ":".join(innermost) if innermost and innermost[0] == self.fork else ""

    def _follow_gradients(self) -> None:
        run, replace = self.run, self._instead
        for each in run.sink.buckets:
            replace(
                each, "start_grad_sync", partial(self._before_reduction, each, each.start_grad_sync)
            )
        replace(run.sink, "finish_grad_sync", partial(self._summed, run.sink.finish_grad_sync))
        replace(run.optimizer, "step", partial(self._updated, run.optimizer.step))

    def _before_reduction(self, bucket: ParamAndGradBucket, go_on: Callable[[], None]) -> None:
        assert bucket.grad is not None
        for name, param, start in bucket.params:
            own = bucket.grad[start : start + param.numel()]
            self._part(("own gradient", ""), bucket, name, 0, own)
        go_on()

    def _summed(self, go_on: Callable[[], None]) -> None:
        go_on()
        for bucket in self.run.sink.buckets:
            for name, low, high, start in bucket.owned():
                part = bucket.grad_shard[low - bucket.low : high - bucket.low]
                self._part(("gradient", ""), bucket, name, low - start, part)

    def _updated(self, go_on: Callable[..., Any], lr: float, *rest: Any) -> Any:
        decoupled, scale = (*rest, None, None)[:2]
        norm, found_inf = go_on(lr, *rest)
        self.numbers |= {"learning rate": lr, "gradient norm": norm.item()}
        if decoupled is not None:
            self.numbers["decoupled learning rate"] = decoupled
        if scale is not None:
            self.numbers["factor of the mask"] = float(scale)
        return norm, found_inf

    def _follow_collectives(self, tracker: ModuleTracker) -> None:
        seen: set[int] = set()
        for name in INSIDE:
            axis: Axis | None = getattr(self.run.grid, name, None)
            transport = None if axis is None else axis.transport
            if axis is None or transport is None or axis.size == 1 or id(transport) in seen:
                continue
            seen.add(id(transport))
            for verb in VERBS:
                call = partial(self._collective, tracker, verb, getattr(transport, verb))
                self._instead(transport, verb, call)

    def _instead(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Replace an object's method until the step is over."""
        self._replaced.append((owner, name))
        setattr(owner, name, call)

    def _collective(
        self,
        tracker: ModuleTracker,
        verb: str,
        go_on: Callable[..., Any],
        x: Tensor,
        axis: Axis,
        *rest: Any,
    ) -> tuple[Tensor, Handle]:
        label = rest[-1]
        inside = axis.name in INSIDE and (label is None or label.phase in PHASES)
        if not inside:
            return cast(tuple[Tensor, Handle], go_on(x, axis, *rest))
        name, phase, line = tracker.running(), tracker.phase, self._line()
        call = self._count(f"{verb} {axis.name}", name, phase)
        more = {
            "phase": phase, "verb": verb, "axis": axis.name, "ranks": list(axis.ranks),
            "call": call, "site": line, **self._where(),
        }  # fmt: skip
        self.write("collective", name, x, kind="taken", **more)
        out, handle = go_on(x, axis, *rest)
        given = partial(self.write, "collective", name, out, kind="returned", **more)
        if handle.work is None and handle.finish is None:
            given()
        else:
            done = handle.finish

            def finish() -> None:
                if done is not None:
                    done()
                given()

            handle.finish = finish
        return out, handle


PHASES = {"forward", "backward", "wgrad"}


class FileRecorder(Recorder):
    """Writes one rank's record to a folder: tensors one after another to rank-N.bin, so that a rank
    holds one copy at a time, and their entries to rank-N.json.
    """

    def __init__(self, run: Run, batches: list[Batch], names: Names, folder: Path, **more: Any):
        super().__init__(run, batches, names, **more)
        self.folder, self.rank = folder, run.grid.rank
        folder.mkdir(parents=True, exist_ok=True)
        self.file = open(folder / f"rank-{self.rank}.bin", "wb")

    def keep(self, x: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        """Write a tensor; return its shape, dtype and place in the file."""
        flat = x.to("cpu", copy=False).contiguous().view(-1).view(torch.uint8)
        at = self.file.tell()
        flat.numpy().tofile(self.file)
        self.file.flush()
        dtype = str(x.dtype).removeprefix("torch.")
        return {"shape": list(x.shape), "dtype": dtype, "at": at, "bytes": flat.numel()}

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.file.close()
        grid = self.run.grid
        axes = {n: [a.rank, a.size] for n in ("tp", "cp", "dp", "pp") if (a := getattr(grid, n))}
        record = {
            "rank": self.rank, "axes": axes, "sp": self.run.model.ctx.sp,
            "numbers": self.numbers, "entries": self.entries,
        }  # fmt: skip
        (self.folder / f"rank-{self.rank}.json").write_text(json.dumps(record))


def recorded(
    train_step: TrainStep, names: Names, folder: Path, fork: str = "", inside: bool = True
) -> TrainStep:
    """Return a function with the arguments of train_step that also records the step."""

    def step(
        run: Run, batches: list[Batch], lr: float, decoupled_lr: float | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        with FileRecorder(run, batches, names, folder, fork=fork, inside=inside) as recorder:
            loss, norm, found_inf = train_step(run, batches, lr, decoupled_lr)
            recorder.numbers["loss"] = loss.item()
            if (added := run.model.ctx.auxiliary_losses.mean) is not None and added:
                recorder.numbers["auxiliary loss"] = float(added)
        return loss, norm, found_inf

    return step
