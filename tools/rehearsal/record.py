# SPDX-License-Identifier: Apache-2.0
"""Record what a rank asks of its device: operations, storages, streams, transfers, host reads.

`Recorder` keeps the events; `Watch` is the dispatch mode through which torch's operations come. The
same two record a run on fake tensors (a rehearsal) and one on real tensors, which tests compare.
What the fake device and the fake communicators do comes through `Recorder`'s methods.
"""

import re
import sys
import threading
import weakref
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from mpu.comm.failure_monitor import FailureMonitor
from tools.explain_ops import Layers
from tools.rehearsal.events import (
    Action,
    Alloc,
    Event,
    Free,
    HostUse,
    HostWait,
    Launch,
    Polled,
    Record,
    RecordStream,
    Transfer,
    Wait,
    Where,
)

ROOT = Path(__file__).resolve().parents[2]
OURS = ("mpu", "model", "training", "pretrain_llama.py")
CARRIERS = "mpu/comm/"
SERVANTS = (CARRIERS, "mpu/zero/", "mpu/gradients.py")  # what they do, they do for a layer
PARTS = {  # of a file, or of a function in it
    "mpu/layers/rope.py": "rope",
    "mpu/layers/cross_entropy.py": "loss",
    "mpu/layers/attention.py": "attention",
    "mpu/layers/attention_blocks.py": "attention",
    "mpu/layers/block_attention.py": "attention",
    "mpu/layers/packed_seq_params.py": "attention",
    "mpu/layers/embedding.py": "embedding",
    "mpu/layers/linear.py": "linear",
}
FUNCTIONS = {"norm": "norm", "rope": "rope", "rotate": "rope", "swiglu": "swiglu"}
NO_KERNEL = {  # they make or change tensors, and launch nothing
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_",
    "detach", "detach_", "alias", "lift_fresh", "requires_grad_", "record_stream", "is_pinned",
    "_reshape_alias", "_unsafe_view", "is_same_size",
    "_has_compatible_shallow_copy_type",
}  # fmt: skip
COPIES = ("_to_copy", "copy_", "clone")
HOST = -1  # a stream's number
UNKNOWN_SIZE = (torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default)


class Recorder:
    """The events of one rank, in order; and which storages, streams and transfers there are.

    device: "cuda" or "cpu", whose storages count. fork: the model's file, if it is not Weft's own.
    """

    def __init__(self, device: str, fork: str = "") -> None:
        self.device, self.fork = device, fork
        self.events: list[Event] = []
        self.stream = 0  # the current one
        self.layers: Layers | None = None
        self.monitor: FailureMonitor | None = None
        self.action = ""
        self.kinds: dict[int, str] = {}  # storage -> what it was named later
        self.live: dict[int, tuple[int, Any]] = {}  # address of a StorageImpl -> number, reference
        self.sizes: dict[int, int] = {}  # number -> bytes
        self._storages = self._events = self._transfers = 0
        self.counts: dict[int, int] = {}  # of transfers on each communicator's stream
        self.replay: Any = None  # tools/rehearsal/replay.py, while it replays
        self.streams = 1
        self.homes: dict[int, int] = {}  # storage -> the stream that was current when it began
        self.born: dict[int, str] = {}  # storage -> the line that asked for it
        self.host_made: dict[str, None] = {}  # lines that make tensors in host memory
        self.abroad: set[int] = set()  # storages that another stream has used
        self.chains: dict[int, tuple[str, ...]] = {}  # event's index -> the lines that led to it
        self._spans: dict[Any, Any] = {}
        self.paused = False
        self.lock = threading.RLock()

    # where

    def where(self) -> Where:
        """Return which part of the step runs, from the action, the layers and the Python stack."""
        call, use, function = self._site()
        layers, action = self.layers, self.action
        layer = layers.running() if layers else ""
        back = layers is not None and layers.in_backward
        phase = _phase(action)
        part = "glue"
        if use:
            file = use.partition(":")[0]
            part = PARTS.get(file, "glue")
            if file == "mpu/layers/fused.py":
                part = next((p for f, p in FUNCTIONS.items() if f in function.lower()), "glue")
        if phase in ("forward", "backward") and layers is not None:
            if back:
                phase = "recompute" if layers._modules else "backward"
            if layers._works or "wgrad" in function.lower():
                phase = part = "wgrad"
        if phase in ("grad sum", "update"):
            part = "optimizer"
        elif call.startswith("mpu/zero/") and part == "linear":
            part = "wgrad"
        return Where(phase, layer, part, call or use)

    def _site(self) -> tuple[str, str, str]:
        """Return the innermost line outside of mpu/comm, that of a layer or above, its function."""
        call = use = function = ""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            path = _path(frame.f_code.co_filename, self.fork)
            if path and not path.startswith(CARRIERS):
                here = f"{path}:{frame.f_lineno}"
                call = call or here
                if not path.startswith(SERVANTS):
                    return call, here, frame.f_code.co_qualname
            frame = frame.f_back
        return call, use, function

    def place(self) -> str:
        """Return the innermost line of the product, mpu/comm included."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if path := _path(frame.f_code.co_filename, self.fork):
                return f"{path}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    # storages

    def number(self, tensor: Tensor, where: Where | None = None, kind: str = "") -> int:
        """Return the number of a tensor's storage, which begins here if it is new; -1: not ours."""
        if tensor.device.type == "meta":
            return -1
        storage = tensor.untyped_storage()
        ours = tensor.device.type == self.device or kind
        if not (ours or getattr(storage, "_weft_pinned", False)):
            return -1
        key = storage._cdata
        found = self.live.get(key)
        if found is not None:
            return found[0]
        number = self.new_storage(storage.nbytes() if ours else 0)
        self.live[key] = number, weakref.ref(storage, lambda _: self._freed(key, number))
        if not self.paused:
            self.born[number] = getattr(storage, "_weft_born", "") or self.place()
        if not self.paused and ours:
            where = where or self.where()
            self.homes[number] = self.stream
            device = tensor.device.type
            self.events.append(Alloc(number, storage.nbytes(), kind, self.stream, device, where))
        return number

    def _freed(self, key: int, number: int) -> None:
        if self.live.get(key, (None,))[0] == number:
            del self.live[key]
        if self.replay is not None:
            number = self.replay.freed(number)
        if not self.paused and number >= 0:
            self.events.append(Free(number, self.place() if number in self.abroad else ""))

    def new_storage(self, nbytes: int) -> int:
        """Return the number of a storage that no tensor has."""
        self._storages += 1
        self.sizes[self._storages - 1] = nbytes
        return self._storages - 1

    def new_transfer(self, stream: int) -> tuple[int, int]:
        """Return a transfer's number, and its place among those of its communicator."""
        place = self.counts[stream] = self.counts.get(stream, -1) + 1
        self._transfers += 1
        return self._transfers - 1, place

    def resized(self, tensor: Tensor, where: Where) -> None:
        """Note that a storage has another size now: it ends, and another begins."""
        storage = tensor.untyped_storage()
        found = self.live.get(storage._cdata)
        if found is None or self.sizes[found[0]] == storage.nbytes():
            return
        number = found[0]
        self.events.append(Free(number, where.place))
        new, key = self.new_storage(storage.nbytes()), storage._cdata
        self.live[key] = new, weakref.ref(storage, lambda _: self._freed(key, new))
        self.events.append(Alloc(new, storage.nbytes(), "", self.stream, self.device, where))

    def uses(
        self, read: Iterable[Tensor], written: Iterable[Tensor], where: Where, stream: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Return the storages read and written, and of each the bytes. stream: which uses them."""
        reads = dict.fromkeys((self.number(x, where), *span(x)) for x in read)
        writes = dict.fromkeys((self.number(x, where), *span(x)) for x in written)
        found = [[use for use in uses if use[0] >= 0] for uses in (reads, writes)]
        numbers = [tuple(use[0] for use in uses) for uses in found]
        spans = tuple(use[1:] for uses in found for use in uses)
        away = False
        for number in (*numbers[0], *numbers[1]):
            away = away or number in self.abroad or self.homes.get(number, stream) != stream
            if away:
                self.abroad.add(number)
        if away:
            self.chain()
        return numbers[0], numbers[1], self._spans.setdefault(spans, spans)

    def numbers(self, tensors: Iterable[Tensor], where: Where) -> tuple[int, ...]:
        """Return the numbers of several tensors' storages, without those that do not count."""
        found = (self.number(tensor, where) for tensor in tensors)
        return tuple(number for number in found if number >= 0)

    def chain(self) -> None:
        """Keep the lines of the product that lead to the next event, innermost first."""
        lines, frame = [], sys._getframe(1)
        while frame is not None:
            if path := _path(frame.f_code.co_filename, self.fork):
                lines.append(f"{path}:{frame.f_lineno}")
            frame = frame.f_back  # type: ignore[assignment]
        found = tuple(lines)
        self.chains[len(self.events)] = self._spans.setdefault(found, found)

    def made_on_host(self) -> None:
        """Note that a tensor is made in host memory, out of nothing, and where."""
        if place := self.place():
            self.host_made[place] = None

    def birthplace(self, x: Tensor) -> str:
        """Return the line of the product at which a tensor's storage was made, if it is known."""
        storage = x.untyped_storage()
        number = self.live.get(storage._cdata, (-1,))[0]
        return getattr(storage, "_weft_born", "") or self.born.get(number, "")

    # what the fake device and the fake communicators tell

    def new_stream(self) -> int:
        """Return a new stream's number."""
        self.streams += 1
        return self.streams - 1

    def new_event(self) -> int:
        """Return a new event's number."""
        self._events += 1
        return self._events - 1

    def record(self, event: int, stream: int) -> None:
        """Note that an event marks a stream."""
        self.chain()
        self.events.append(Record(event, stream, self.place()))

    def wait(self, stream: int, event: int = -1, transfer: int = -1) -> None:
        """Note that a stream waits."""
        if self.replay is not None and transfer >= 0:
            transfer = self.replay.latest(transfer)
        self.chain()
        self.events.append(Wait(event, stream, self.place(), transfer))

    def host_wait(self, event: int = -1, stream: int = -1, reads: str = "") -> None:
        """Note that the host waits."""
        self.chain()
        self.events.append(HostWait(event, stream, reads, self.where()))

    def polled(self, event: int = -1, transfer: int = -1) -> None:
        """Note that the host has seen that something is over."""
        if self.replay is not None and transfer >= 0:
            transfer = self.replay.latest(transfer)
        self.events.append(Polled(event, transfer))

    def host_use(self, read: list[Tensor], written: list[Tensor]) -> None:
        """Note that the host reads or writes tensors, of which page-locked ones count."""
        if all(x.device.type != "cpu" for x in (*read, *written)) or self.device == "cpu":
            return
        where = self.where()
        reads, writes, spans = self.uses(read, written, where, HOST)
        if reads or writes:
            self.chain()
            self.events.append(HostUse(reads, writes, where, spans))

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """Note that a stream uses a storage."""
        self.events.append(RecordStream(self.number(tensor), stream, self.place()))

    def transfer(self, **fields: Any) -> int:
        """Note a collective or a message; return its number."""
        number, place = self.new_transfer(fields["stream"])
        self.events.append(Transfer(id=number, number=place, where=self.where(), **fields))
        return number

    def acts(self, words: str) -> None:
        """Note that the rank begins something else."""
        self.action = words
        if self.layers is not None:
            self.layers.new_action()
        if not self.paused:
            self.events.append(Action(words))


class Actions(FailureMonitor):
    """A FailureMonitor without a connection that tells a recorder each action."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        super().__init__()

    @property
    def action(self) -> str:
        """The action of the rank, in words."""
        return self._action

    @action.setter
    def action(self, words: str) -> None:
        self._action = words
        self._recorder.acts(words)


class Watch(TorchDispatchMode):
    """See every operation of torch. `fake`: values are not there, so reads on the host give 0."""

    def __init__(self, recorder: Recorder, fake: bool) -> None:
        super().__init__()
        self.recorder, self.fake = recorder, fake

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and record it."""
        kwargs, recorder = kwargs or {}, self.recorder
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._read(args[0]) if self.fake else func(*args, **kwargs)
        if self.fake:
            if func in UNKNOWN_SIZE and args[0].device.type == recorder.device:
                recorder.host_wait(stream=recorder.stream, reads=name_of(func))
                columns = (args[0].dim(),) if func is UNKNOWN_SIZE[0] else ()
                kind = torch.long if columns else args[0].dtype
                return args[0].new_empty((0, *columns), dtype=kind)
        if recorder.paused:
            return func(*args, **kwargs)
        inputs = tensors_of(args) + tensors_of(kwargs.values())
        before = [t.untyped_storage()._cdata for t in inputs]
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            made = [f"{recorder.birthplace(x)} ({x.dtype}, {x.device.type})" for x in inputs]
            error.add_note(f"its inputs were made at {', '.join(made)}")
            raise
        if self.fake and func is torch.ops.aten.index.Tensor:
            out = as_indexed(out, *args)
        if not inputs and not isinstance(out, Tensor):
            return out
        outputs = tensors_of((out,))
        if func is torch.ops.aten.lift_fresh.default:  # made from numbers; a fake one is another
            recorder.numbers(outputs, recorder.where())
            return out
        if func.is_view and all(t.untyped_storage()._cdata in before for t in outputs):
            return out
        device = recorder.device
        if all(t.device.type != device for t in (*outputs, *inputs)):
            if func._schema.name.rpartition("::")[2] not in NO_KERNEL:
                recorder.host_use(inputs, outputs + self._changed(func, args, kwargs))
            if not inputs:
                recorder.made_on_host()
            for x in outputs:
                storage = x.untyped_storage()
                if x.device.type == "cpu" and not hasattr(storage, "_weft_born"):
                    storage._weft_born = recorder.place()  # type: ignore[attr-defined]
            return out
        where, name = recorder.where(), func._schema.name
        if where.part == "glue" and "attention" in name:  # from autograd's engine: no line calls it
            where = where._replace(part="attention")
        short = name.rpartition("::")[2]
        recorder.numbers((*inputs, *outputs), where)
        if short in ("resize_", "set_") or name == "inductor::resize_storage_bytes_":
            recorder.resized(inputs[0], where)
        if short in NO_KERNEL or name.startswith("c10d"):
            return out
        changed = outputs + self._changed(func, args, kwargs)
        read, written, spans = recorder.uses(inputs, changed, where, recorder.stream)
        if short in COPIES and len({t.device.type for t in (*inputs, *outputs)}) > 1:
            self._between(inputs, outputs, short, kwargs, args, where, read, written, spans)
            return out
        involved = {id(t): t for t in (*inputs, *outputs)}.values()
        seen: dict[tuple[int, int], int] = {}
        for t in involved:
            if t.device.type == device:
                where_it_lies = (t.untyped_storage()._cdata, int(t.storage_offset()))
                seen[where_it_lies] = t.numel() * t.element_size()
        recorder.events.append(
            Launch(
                name,
                recorder.stream,
                tuple(tuple(t.shape) for t in (*inputs, *outputs)),
                str((outputs or inputs)[0].dtype).removeprefix("torch."),
                read,
                written,
                sum(seen.values()),
                flops_of(func, args, kwargs, out),
                where,
                spans,
                tuple(str(t.dtype).removeprefix("torch.") for t in (*inputs, *outputs)),
                tuple(recorder.birthplace(t) for t in inputs if t.device.type != device),
            )
        )
        return out

    def _changed(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the arguments that an operation writes."""
        changed: list[Tensor] = []
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                changed += tensors_of((value,))
        return changed

    def _between(
        self, inputs: Any, outputs: Any, short: str, kwargs: Any, args: Any, where: Where,
        read: tuple[int, ...], written: tuple[int, ...], spans: Any,
    ) -> None:  # fmt: skip
        """Record a copy between host and device, and whether the host waits for it."""
        recorder = self.recorder
        source, target = inputs[-1] if short == "copy_" else inputs[0], (outputs or inputs)[0]
        down = target.device.type == "cpu"
        host = target if down else source
        third = short == "copy_" and len(args) > 2 and args[2]
        nowait = kwargs.get("non_blocking", third)
        name = "memcpy DtoH" if down else "memcpy HtoD"
        nbytes = target.numel() * target.element_size()
        dtype = str(target.dtype).removeprefix("torch.")
        shapes = (tuple(source.shape), tuple(target.shape))
        recorder.events.append(
            Launch(
                name,
                recorder.stream,
                shapes,
                dtype,
                read,
                written,
                nbytes,
                0.0,
                where,
                spans,
                tuple(str(x.dtype).removeprefix("torch.") for x in (source, target)),
            )  # fmt: skip
        )
        if not (nowait and getattr(host.untyped_storage(), "_weft_pinned", False)):
            how = "a copy to the host" if down else "a copy from pageable host memory"
            recorder.events.append(HostWait(-1, recorder.stream, how, where))

    def _read(self, tensor: Tensor) -> Any:
        """Note that the host reads a number, and give it one."""
        self.recorder.host_use([tensor], [])
        if tensor.device.type == self.recorder.device and tensor.device.type != "cpu":
            self.recorder.host_wait(stream=self.recorder.stream, reads="aten::item")
        kind = tensor.dtype
        return False if kind == torch.bool else 0.0 if kind.is_floating_point else 0


def as_indexed(out: Tensor, x: Tensor, places: Any) -> Tensor:
    """Return the result of an indexing with the strides that it has on a device.

    torch's fake tensors have others: they do not follow those of transposed indices.
    """
    if out.dim() < 2 or any(i is not None and i.dtype != torch.long for i in places):
        return out
    with _disable_current_modes():
        table = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        at = [
            None if i is None else torch.empty_strided(i.shape, i.stride(), dtype=i.dtype).zero_()
            for i in places
        ]
        strides = torch.ops.aten.index.Tensor(table, at).stride()
    return out if strides == out.stride() else out.new_empty_strided(out.shape, strides)


def span(x: Tensor) -> tuple[int, int]:
    """Return the bytes [low, high) of its storage that a tensor covers, gaps between included."""
    low, size = int(x.storage_offset()), x.element_size()
    if not x.numel():
        return low * size, low * size
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return low * size, (low + last + 1) * size


def lines_of(error: BaseException, fork: str) -> tuple[str, ...]:
    """Return the product's lines in the tracebacks of an exception and its causes, innermost first.

    Places that its message names come next.
    """
    lines: list[str] = []
    words = ""
    cause: BaseException | None = error
    while cause is not None:
        here, trace = [], cause.__traceback__
        while trace is not None:
            if path := _path(trace.tb_frame.f_code.co_filename, fork):
                here.append(f"{path}:{trace.tb_lineno}")
            trace = trace.tb_next
        lines = [*here[::-1], *lines]
        words += " ".join(["", str(cause), *getattr(cause, "__notes__", ())])
        cause = cause.__cause__ or cause.__context__
    named = re.findall(r"(?:mpu|model|training)/[\w/]+\.py:\d+|pretrain_llama\.py:\d+", words)
    return tuple(dict.fromkeys([*lines, *named]))


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, and in lists and tuples of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_of(value)
    return found


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the FLOPs of an operation's matmuls, by torch's own counter; causal attention half."""
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return 0.0
    flops = float(count(*args, **kwargs, out_val=out))
    if "attention" in func._schema.name and _causal(func, args, kwargs):
        flops /= 2
    return flops


def _causal(func: Any, args: Any, kwargs: Any) -> bool:
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            default = kwargs.get("is_causal", argument.default_value)
            return bool(args[i] if i < len(args) else default)
    return False


def name_of(func: Any) -> str:
    """Return an operation's name."""
    return str(func._schema.name)


@cache
def _phase(action: str) -> str:
    """Return the phase that an action's words begin."""
    for begin, phase in (
        ("F ", "forward"),
        ("B ", "backward"),
        ("BW ", "backward"),
        ("W ", "wgrad"),
        ("the output layer's deferred", "wgrad"),
        ("the gradient sums", "grad sum"),
        ("the update", "update"),
    ):
        if action.startswith(begin):
            return phase
    return "start" if not action else "step"


@cache
def _path(file: str, fork: str) -> str:
    """Return a file's path in the repository, or "" for one that is not the trainer's."""
    if fork and file == fork:
        return fork
    try:
        path = Path(file).resolve().relative_to(ROOT)
    except ValueError:
        return ""
    return path.as_posix() if path.parts[0] in OURS else ""
