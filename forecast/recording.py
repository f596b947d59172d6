# SPDX-License-Identifier: Apache-2.0
"""Run the program's own `build` and `train_step` as one rank of any world, and record the step.

Tensors are meta tensors: they have shapes and no memory. Collectives and messages go through the
verbs of a process group and are sent nowhere (mpu/comm/meta.py); what ranks of a pipeline say to
each other while they start they really say, as each is built in a thread of its own.

    build (all ranks of a pipeline)     bucket sizes, frozen stages, names of the norm's parameters
    a first step                        what comes once: state, and the order of ZeRO 3's gathers
    the recorded step                   storages, collectives, and the actions of the schedule

A storage has a kind (KINDS), which may be known only later: what autograd saves is an activation, a
bucket's gradient is known when its sum starts. So events hold the storage, and sums by kind are
made when they are asked for (`Recording.moments`).
"""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from estimate.meta import META, MetaAttention, answer, flash_attention, meta_kernels
from mpu.comm.meta import MetaTransport
from mpu.comm.transport import Axis, Label
from mpu.device_type import meta_stands_for, on_gpu
from mpu.grid import Grid
from mpu.host_memory import HostMemory
from mpu.launch import Launch
from mpu.module_tracker import tensors_of
from mpu.pipeline.engine import Payload
from mpu.torch_private import DispatchMode
from training.config import Config
from training.faults.monitor import FailureMonitor
from training.pipeline_schedule import micro_batch_counts
from training.run.warm_up import batches_of_zeros

# kinds of a rank's memory
STATE = ("parameters", "gradients", "masters", "moments")  # these persist from step to step
OTHER_STATE = "other state"  # persists too: the norm's index, tables of RoPE
UNSHARDED, GATHERED = "unsharded gradients", "gathered weights"
ACTIVATIONS, LOGITS, MESSAGES, WORKING = "activations", "logits", "messages", "working memory"
HOST = "host memory"
UPDATE = "update"  # the action after the schedule's, with the sums that are still to come


class Storage:
    """Memory of one or several tensors. kind: "" until it is known."""

    __slots__ = ("kind", "nbytes")

    def __init__(self, nbytes: int, kind: str = "") -> None:
        self.nbytes, self.kind = nbytes, kind


class Transfer(NamedTuple):
    """A collective or message. bytes: of the whole tensor. sent: bytes that leave this rank.

    who: the layer (its number as "*"), the bucket or the message that it belongs to. purpose: as in
    its label. peer: of a message, the other rank's place on pp. action: as of the schedule.
    """

    axis: str
    verb: str
    who: str
    purpose: str
    bytes: int
    sent: int
    size: int
    peer: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    action: str


class Monitor(FailureMonitor):
    """A FailureMonitor without a connection: passes each action on."""

    def __init__(self, begins: Callable[[str], None]) -> None:
        self._begins = begins
        super().__init__()
        self.action = "start-up"

    @property
    def action(self) -> str:
        """The action of the rank, in words."""
        return self._action

    @action.setter
    def action(self, words: str) -> None:
        self._action = words
        self._begins(words)


class Recorder(DispatchMode):
    """Answers operations on meta tensors, and notes each storage from its first tensor to its last.

    events: (storage, +1 or -1) and the words of actions, in order. now: bytes on the device.
    transfers: collectives and messages since `begin`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.transfers: list[Transfer] = []
        self.storages: dict[int, Storage] = {}
        self.action = ""
        self.names: dict[int, str] = {}
        self.pp_rank_of: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._kinds: list[str] = [""]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = answer(func, args, kwargs or {})
        if out is None:
            out = func(*args, **kwargs) if kwargs else func(*args)
        made = (out,) if isinstance(out, Tensor) else () if out is None else tensors_of((out,))
        for tensor in made:
            if tensor.is_meta:
                storage = tensor.untyped_storage()
                if id(storage) not in self.storages:
                    self._made(storage, args)
        return out

    def _made(self, storage: torch.UntypedStorage, args: Any) -> None:
        """Note a new storage; what is computed of host memory is host memory."""
        key, given = id(storage), [self.kind_of(x) for x in tensors_of(args) if x.is_meta]
        kind = HOST if given and all(each == HOST for each in given) else ""
        made = self.storages[key] = Storage(storage.nbytes(), kind)
        self.events.append((made, 1))
        self._references[key] = weakref.ref(storage, partial(self._freed, key))

    def kind_of(self, tensor: Tensor) -> str:
        """Return the kind of a tensor's storage, as far as it is known."""
        found = self.storages.get(id(tensor.untyped_storage()))
        return found.kind if found else ""

    def _freed(self, key: int, _: Any) -> None:
        del self._references[key]
        self.events.append((self.storages.pop(key), -1))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage has lost its memory, or got it back."""
        key = id(storage)
        if key in self.storages:
            old = self.storages[key]
            self.events.append((old, -1))
            made = self.storages[key] = Storage(storage.nbytes(), old.kind)
            self.events.append((made, 1))

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of host memory: apart from the device's, unless that is a CPU."""
        out = torch.empty(shape, dtype=dtype, device=META)
        if on_gpu(META):
            self.mark(out, HOST)
        return out

    def mark(self, tensor: Tensor | None, kind: str) -> None:
        """Say of which kind a tensor's storage is, unless that is known."""
        if tensor is not None and tensor.is_meta:
            found = self.storages.get(id(tensor.untyped_storage()))
            if found is not None and not found.kind:
                found.kind = kind

    def begins(self, words: str) -> None:
        """Note that an action begins."""
        self.action = words
        self.events.append(words)

    def issued(
        self, verb: str, axis: Axis, tensor: Tensor, sent: int, is_async: bool, label: Label | None
    ) -> None:
        """Note a collective or message that is about to start, as a trace of the grid's axes."""
        who, purpose = label or Label("", "")
        peer = -1
        if isinstance(who, Payload):
            peer, purpose = who.peer, "message"
            name = "activation" if who.kind == "F" else "gradient"
            self.mark(tensor, MESSAGES)
        elif isinstance(who, str):
            name = who
        else:
            name = self.names.get(id(who), type(who).__name__)
            if purpose == "grad sum":
                self.mark(tensor, UNSHARDED)
            elif purpose == "gather":
                self.mark(who.weights, GATHERED)  # type: ignore[attr-defined]
        self.transfers.append(
            Transfer(
                axis.name, verb, name, purpose, tensor.nbytes, sent, axis.size, peer,
                tensor.dtype, tuple(tensor.shape), self.action,
            )
        )  # fmt: skip

    def pack(self, tensor: Tensor) -> Tensor:
        """Note what autograd saves."""
        if tensor.is_floating_point() or tensor.dtype == torch.uint8:
            self.mark(tensor, ACTIVATIONS)
        return tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor


class Moment(NamedTuple):
    """The fullest moment of an action: bytes by kind."""

    action: str
    kinds: dict[str, int]

    @property
    def total(self) -> int:
        """Return the bytes of all kinds on the device."""
        return sum(self.kinds.values())


@dataclass
class Recording:
    """One step of one rank. run: what the program has built."""

    run: Any
    recorder: Recorder
    state: dict[str, int] = field(default_factory=dict)
    persistent: dict[str, int] = field(default_factory=dict)
    start: dict[str, int] = field(default_factory=dict)  # bytes by kind as the step begins

    @property
    def transfers(self) -> list[Transfer]:
        """Return the collectives and messages of the step."""
        return self.recorder.transfers

    def moments(self) -> list[Moment]:
        """Return the fullest moment of each action of the step, in order."""
        found: list[Moment] = []
        now, action, most, kinds = dict(self.start), "", -1, dict[str, int]()
        total = sum(n for kind, n in now.items() if kind != HOST)
        for event in self.recorder.events:
            if isinstance(event, str):
                if most >= 0 and not action.startswith("waiting"):
                    found.append(Moment(action, kinds))
                action, most, kinds = event, total, dict(now)
                continue
            storage, sign = event
            kind, n = storage.kind or WORKING, sign * storage.nbytes
            now[kind] = now.get(kind, 0) + n
            if kind != HOST:
                total += n
            if total > most:
                most, kinds = total, dict(now)
        found.append(Moment(action, kinds))
        for each in found:
            each.kinds.pop(HOST, None)
        return found

    @property
    def peak(self) -> Moment:
        """Return the moment of the step that needs most."""
        return max(self.moments(), key=lambda moment: moment.total)


class _Meeting:
    """Ranks of a pipeline, one in each thread, that tell each other bytes; one runs at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._said: list[bytes] = [b""] * size
        self._barrier = threading.Barrier(size)
        self.turn = threading.Lock()

    def answers(self, rank: int, data: bytes, axis: Axis) -> list[bytes]:
        """Return what each rank of an axis says; other axes have ranks that say the same."""
        if axis.name != "pp" or self.size == 1:
            return [data] * axis.size
        self._said[rank] = data
        self.turn.release()
        try:
            self._barrier.wait()
            said = list(self._said)
            self._barrier.wait()
        finally:
            self.turn.acquire()
        return said

    def abort(self) -> None:
        """Let nobody wait for a rank that has failed."""
        self._barrier.abort()


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Collect garbage now, and not meanwhile: when it happens is chance."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def stood_in(config: Config) -> Iterator[None]:
    """Let meta tensors stand for those of the run's device."""
    kind = "cpu" if config.parallel.device == "cpu" else "cuda"
    with meta_kernels(kind == "cuda"), meta_stands_for(kind):
        yield


def place_of(config: Config, script: ModuleType, pp_rank: int) -> Grid:
    """Return the grid of the first of the ranks at a place of the pipeline."""
    world = config.parallel.world_size
    first = script.make_grid(config, Launch(0, world))
    return script.make_grid(config, Launch(first.pp.ranks[pp_rank], world))


def record(config: Config, script: ModuleType, ranks: Sequence[int] | None = None) -> dict[int, Recording]:
    """Return the recordings of these ranks of a pipeline, None for all, by place on pp.

    script: pretrain_llama.py or a fork of it.
    """
    size = config.parallel.pipeline_model_parallel_size
    meeting, found = _Meeting(size), dict[int, Recording]()
    errors: list[BaseException] = []
    wanted = range(size) if ranks is None else ranks

    def work(rank: int) -> None:
        with meeting.turn:
            try:
                found[rank] = _record(config, script, rank, meeting, rank in wanted)
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                meeting.abort()

    with stood_in(config), patch.object(script.Llama, "initialize", lambda self, *a: self):
        if size == 1:
            work(0)
        else:
            threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    if errors:
        raise errors[0]
    return {rank: found[rank] for rank in wanted}


def _record(
    config: Config, script: ModuleType, rank: int, meeting: _Meeting, steps: bool
) -> Recording:
    recorder = Recorder()
    transport = MetaTransport(partial(meeting.answers, rank))
    grid = place_of(config, script, rank).carried_by(transport).traced(recorder)
    monitor = Monitor(recorder.begins)
    host = recorder.host
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        out = resize(storage, nbytes)
        recorder.resized(storage)
        return out

    with (
        patch.object(HostMemory, "empty", lambda self, shape, dtype: host(shape, dtype)),
        patch.object(HostMemory, "zeros", lambda self, shape, dtype: host(shape, dtype)),
        patch.object(torch.UntypedStorage, "resize_", resized),
        MetaAttention(flash_attention),
        recorder,
    ):
        run = script.build(config, grid, META, monitor)
        recording = Recording(run, recorder)
        for name, module in run.model.named_modules():
            recorder.names[id(module)] = name
        for number, bucket in enumerate(run.sink.weight_buckets):
            recorder.names[id(bucket)] = f"bucket {number}"
        for kind, tensors in run.optimizer.tensors_by_kind().items():
            for tensor in tensors:
                recorder.mark(tensor, kind)
        if not steps:
            return recording
        batches = batches_of_zeros(config, grid, META)[:1] * max(micro_batch_counts(config))
        with saved_tensors_hooks(recorder.pack, _same), without_collections():
            for step in range(2):
                recorder.events.clear()
                recorder.transfers.clear()
                recording.start = dict[str, int]()
                for storage in recorder.storages.values():
                    kind = storage.kind or OTHER_STATE
                    recording.start[kind] = recording.start.get(kind, 0) + storage.nbytes
                script.train_step(run, batches, 1e-3)
                run.iteration += 1
                if not step:
                    for kind, tensors in run.optimizer.tensors_by_kind().items():
                        for tensor in tensors:
                            recorder.mark(tensor, kind)
                    for storage in recorder.storages.values():
                        storage.kind = storage.kind or OTHER_STATE
    return recording
