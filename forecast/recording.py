# SPDX-License-Identifier: Apache-2.0
"""Run the program's own `build` and `train_step` as one rank of any world, and record the step.

Tensors are meta tensors: they have shapes and no memory. Collectives and messages go through the
verbs of a transport that sends nothing (mpu/comm/meta.py). Only the bytes that the ranks of a
pipeline gather at start-up are really exchanged: every rank is built, each in its own thread.

    build              buckets, optimizer, norm: of all ranks of a pipeline
    warm-up            on GPUs in a pipeline, each chunk once (training/run/warm_up.py)
    a step             before the recorded one, if the first step differs from later ones: ZeRO 3's
                       gathers, and optimizer state that moves to host memory
    the recorded step  allocated and freed storages, collectives, messages, the schedule's actions

Only a few micro-batches are recorded (`few_micro_batches`): enough for the schedule to repeat.
"""

import contextlib
import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from forecast.like_ranks import followed, like_ranks
from forecast.moments import Moment, Moments, Place, of_layers, reordered
from mpu.comm.meta import MetaTransport
from mpu.comm.transport import Axis, Label
from mpu.grid import Grid
from mpu.host_memory import HostMemory
from mpu.launch import Launch
from mpu.layers.linear import use_overlap
from mpu.meta_tensors import META, UNKNOWN, answer
from mpu.module_tracker import tensors_of
from mpu.optim.state_offload import StateOffload
from mpu.overlap.choices import OverlapMap
from mpu.pipeline.engine import Payload
from mpu.pipeline.schedules import Action, Schedule, build
from mpu.pipeline.simulate import peak_activations
from mpu.torch_private import DispatchMode
from training.faults.monitor import FailureMonitor
from training.run.pipeline_stages import rank_stages
from training.run.stop import Agreement
from training.run.warm_up import batches_of_zeros, run_chunks
from training.settings.batch_size import micro_batches
from training.settings.config import Config
from training.settings.pipeline_schedule import micro_batch_counts, schedule_of

# Kinds of memory. The first five persist from step to step.
STATE = ("parameters", "gradients", "masters", "moments")
OTHER_STATE = "other state"  # the norm's index, tables of RoPE, the batch
UNSHARDED, GATHERED = "unsharded gradients", "gathered weights"
WEIGHT_ROWS = "weights in float8"  # shared by micro-batches
ACTIVATIONS, LOGITS, MESSAGES = "activations", "logits", "messages"
WORKING = "working memory"  # allocated and freed within one action
HOST = "host memory"
KINDS = (
    *STATE, OTHER_STATE, UNSHARDED, GATHERED, WEIGHT_ROWS, ACTIVATIONS, LOGITS, MESSAGES, WORKING,
)  # fmt: skip
SUMS, UPDATE = "sums of gradients", "update"  # actions after the schedule's last one
ACTION = re.compile(r"(F|BW?|W) chunk (\d+) micro-batch (\d+)")
MADE = {"F": "activation", "B": "gradient"}  # contents of a message, by the action that sends it
PHASES = {"F": "forward", "B": "backward", "W": "wgrad"}


class Storage:
    """The memory of one or several tensors. kind: one of KINDS, or HOST; "" until it is known."""

    __slots__ = ("kind", "nbytes")

    def __init__(self, nbytes: int, kind: str = "") -> None:
        self.nbytes, self.kind = nbytes, kind


class Transfer(NamedTuple):
    """A collective or message."""

    axis: str
    verb: str
    who: str  # the layer (with "*" for its number), bucket or message that it belongs to
    purpose: str  # as in the label of its call
    bytes: int  # of the whole tensor
    sent: int  # bytes that leave this rank
    size: int  # number of ranks of the axis
    peer: int  # of a message: the other rank's place on pp; else -1
    dtype: torch.dtype
    shape: tuple[int, ...]
    action: Action | str  # the schedule's action in which it starts


class Actions(FailureMonitor):
    """A FailureMonitor without a connection that passes each action on to `begins`."""

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
    """Computes operations on meta tensors from their shapes, and records the events of a step.

    events: in order, (storage, 1 when allocated or -1 when freed), or an action that begins.
    transfers: in order. copies: (action, bytes to host memory, bytes from it). run: None until it
    is built. gpu: whether the tensors represent GPU tensors; then host memory is separate.
    """

    def __init__(self, gpu: bool = False) -> None:
        super().__init__()
        self.gpu = gpu
        self.events: list[tuple[Storage, int] | Action | str] = []
        self.transfers: list[Transfer] = []
        self.copies: list[tuple[Action | str, int, int]] = []
        self.run: Any = None
        self.action: Action | str = ""
        self.storages: dict[int, Storage] = {}  # live storages, by id
        self._logits = (0, 0)  # elements of a micro-batch's logits, and columns
        self._references: dict[int, Any] = {}
        self._new: list[Storage] = []  # since the action began
        self._names: dict[int, str] = {}
        self._has_host = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = answer(func, args, kwargs or {})
        if out is UNKNOWN:
            out = func(*args, **kwargs) if kwargs else func(*args)
        made = (out,) if isinstance(out, Tensor) else () if out is None else tensors_of((out,))
        for tensor in made:
            if self.counts(tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self.storages:
                    self._made(storage, tensor, args)
        if self._has_host and func is torch.ops.aten.copy_.default:
            self._copied(*args[:2])
        return out

    def counts(self, tensor: Tensor) -> bool:
        """Return whether a tensor belongs to the run, not to the program's own tables."""
        return tensor.is_meta

    def _made(self, storage: torch.UntypedStorage, tensor: Tensor, args: Any) -> None:
        """Record a new storage. A result of operands that are all in host memory is there too."""
        key, kind = id(storage), ""
        if self._has_host:
            given = [self.kind_of(x) for x in tensors_of(args) if x.is_meta]
            kind = HOST if given and all(each == HOST for each in given) else ""
        made = self.storages[key] = Storage(storage.nbytes(), kind)
        if tensor.is_floating_point() and (tensor.numel(), *tensor.shape[-1:]) == self._logits:
            made.kind = LOGITS
        self._new.append(made)
        self.events.append((made, 1))
        self._references[key] = weakref.ref(storage, partial(self._freed, key))

    def _freed(self, key: int, _: Any) -> None:
        del self._references[key]
        made = self.storages.pop(key)
        made.kind = made.kind or WORKING  # freed before its action ended
        self.events.append((made, -1))

    def _copied(self, to: Tensor, source: Tensor) -> None:
        if to.is_meta and source.is_meta:
            kinds = self.kind_of(to) == HOST, self.kind_of(source) == HOST
            down, up = kinds == (True, False), kinds == (False, True)
            if down or up:
                self.copies.append((self.action, source.nbytes * down, to.nbytes * up))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was resized: to 0 bytes, or back to its size."""
        if (old := self.storages.get(id(storage))) is not None:
            made = self.storages[id(storage)] = Storage(storage.nbytes(), old.kind)
            self.events += [(old, -1), (made, 1)]

    def in_host(self, tensor: Tensor) -> None:
        """Record that a tensor is in host memory, unless the run's device is a CPU."""
        found = self.storages.get(id(tensor.untyped_storage()))
        if self.gpu and found is not None:  # None: a tensor of another rank
            self._has_host, found.kind = True, HOST

    def kind_of(self, tensor: Tensor) -> str:
        """Return the kind of a tensor's storage, or "" if it is not known."""
        found = self.storages.get(id(tensor.untyped_storage()))
        return found.kind if found else ""

    def mark(self, tensor: Tensor | None, kind: str) -> None:
        """Set the kind of a tensor's storage, if it has none yet."""
        if tensor is not None and self.counts(tensor):
            found = self.storages.get(id(tensor.untyped_storage()))
            if found is not None:
                found.kind = found.kind or kind

    def know(self, run: Any) -> None:
        """Register a run: the names of its modules and buckets, and the kinds of its state."""
        self.run = run
        self._names = {
            id(module): ".".join("*" if part.isdigit() else part for part in name.split("."))
            for name, module in run.model.named_modules()
        }
        self._names |= {id(b): f"bucket {n}" for n, b in enumerate(run.sink.weight_buckets)}
        for kind, tensors in run.optimizer.tensors_by_kind().items():
            for tensor in tensors:
                self.mark(tensor, kind)
        config = run.config
        tp, cp = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
        tokens = config.batch.micro_batch_size * config.model.seq_length // cp
        columns = config.model.padded_vocab_size(tp) // tp
        self._logits = tokens * columns, columns

    def settle(self, kind: str) -> None:
        """Set the kind of every live storage that has none yet."""
        for storage in self.storages.values():
            storage.kind = storage.kind or kind
        self._new.clear()

    def begins(self, words: str) -> None:
        """Record that an action begins. Storages left over from the previous one are activations,
        unless they have another kind.
        """
        if words.startswith("waiting"):
            return
        if self.run is not None:  # None: the run is being built
            for bucket in self.run.sink.buckets:
                self.mark(bucket.grad, UNSHARDED)
            for bucket in self.run.sink.weight_buckets:
                self.mark(bucket.weights, GATHERED)
            for rows in self.run.sink.weight_rows.values():
                self.mark(rows, WEIGHT_ROWS)
            for storage in self._new:
                storage.kind = storage.kind or ACTIVATIONS
            self._new.clear()
        found = ACTION.findall(words)  # for an F that overlaps a B, use the B
        if found:
            kind, chunk, i = found[-1]
            self.action = Action(kind[0], int(chunk), int(i))
        else:
            update = words.startswith("the update")
            self.action = UPDATE if update else SUMS if "gradient sums" in words else words
        self.events.append(self.action)

    def issued(
        self, verb: str, axis: Axis, tensor: Tensor, sent: int, is_async: bool, label: Label | None
    ) -> None:
        """Record a collective or message that is about to start (a hook of the grid's axes)."""
        who, purpose = label or Label("", "")
        name, peer = who, -1
        if isinstance(who, Payload):
            name, purpose, peer = MADE[who.kind], "message", who.peer
            self.mark(tensor, MESSAGES)
        elif not isinstance(who, str):
            name = self._names.get(id(who), type(who).__name__)
            if purpose == "grad sum" and axis.name != "tp":  # tp sums parts of several buckets
                self.mark(tensor, UNSHARDED)
            elif purpose == "gather":
                self.mark(getattr(who, "weights", None), GATHERED)
        if not label and isinstance(self.action, Action):
            purpose = PHASES[self.action.kind]
        whole = tensor.nbytes * (axis.size if verb == "all_gather" else 1)
        self.transfers.append(
            Transfer(
                axis.name, verb, str(name), purpose, bytes=whole, sent=sent, size=axis.size,
                peer=peer, dtype=tensor.dtype, shape=tuple(tensor.shape), action=self.action,
            )
        )  # fmt: skip


@dataclass
class Recording:
    """A recorded step of one rank."""

    run: Any  # as the program built it
    recorder: Recorder
    few: int  # number of recorded micro-batches
    micro_batches: int  # micro-batches of the step
    start: dict[str, int] = field(default_factory=dict)  # bytes by kind as the step begins
    warm_up: int = 0  # peak bytes of the warm-up, in which each chunk runs once; 0: there is none
    # bytes that the ranks of the pipeline exchanged, in order; one item per rank in each entry
    heard: list[list[bytes]] = field(default_factory=list)
    # if it represents another rank: the actions of that rank, in order
    order: list[Place] | None = None
    more: "MoreLayers | None" = None  # if it represents a rank with more layers
    # the moments of the recorded actions, once computed
    walked: dict[str, Moments] = field(default_factory=dict, repr=False)

    def moments(self) -> list[Moment]:
        """Return the moment of each action with the most memory on the device, in order."""
        found = self.arrays()
        return [found.moment(n) for n in range(self._first(found), len(found.actions))]

    def fullest(self) -> Moment:
        """Return the moment of the step with the most memory on the device."""
        found = self.arrays()
        first = self._first(found)
        return found.moment(first + int(found.most[first:].sum(1).argmax()))

    def most(self, kind: str) -> int:
        """Return the most bytes of one kind at a moment of the step."""
        found = self.arrays(kind)
        return int(found.most[self._first(found) :].max())

    @staticmethod
    def _first(found: Moments) -> int:
        """Return the index of the first action; 0, the moment before it, if there is none."""
        return min(1, len(found.actions) - 1)

    def arrays(self, only: str = "") -> Moments:
        """Return the fullest moment of each action, after the one before the first action.

        only: the one kind of memory to count; "": all kinds on the device.
        """
        if only not in self.walked:
            self.walked[only] = Moments.of(self._walk(only), (only,) if only else KINDS)
        found = self.walked[only]
        if self.order is not None:
            sent = (t.bytes for t in self.recorder.transfers if t.purpose == "message")
            found = reordered(found, self.order, MESSAGES, next(sent, 0))
        if self.more is not None:
            longer = self.more.longer
            found = of_layers(found, longer.arrays(only), self.more.chunks, self.more.few)
        return found

    def _walk(self, only: str) -> list[Moment]:
        """Return the moment before the recorded actions, and the fullest moment of each."""

        def counts(kind: str) -> bool:
            return kind == only if only else kind != HOST

        found: list[Moment] = []
        now = {kind: n for kind, n in self.start.items() if counts(kind)}
        total = most = sum(now.values())
        action: Action | str = ""
        kinds = dict(now)
        for event in self.recorder.events:
            if not isinstance(event, tuple) or isinstance(event, Action):
                found.append(Moment(action, kinds, dict(now)))
                action, most, kinds = event, total, dict(now)
                continue
            storage, sign = event
            if not counts(kind := storage.kind or WORKING):
                continue
            now[kind] = now.get(kind, 0) + sign * storage.nbytes
            total += sign * storage.nbytes
            if total > most:
                most, kinds = total, dict(now)
        return [*found, Moment(action, kinds, now)]

    def times(self, action: Action | str) -> int:
        """Return how many actions of the whole step a recorded action represents: more than one for
        the micro-batch in the middle, which represents those that are not recorded.
        """
        middle = isinstance(action, Action) and action.micro_batch == self.few // 2
        return 1 + middle * (self.micro_batches - self.few)

    def copied(self) -> tuple[int, int]:
        """Return the bytes that a step copies to host memory, and from it."""
        copies = [(self.times(action), *nbytes) for action, *nbytes in self.recorder.copies]
        return sum(n * down for n, down, _ in copies), sum(n * up for n, _, up in copies)


class MoreLayers(NamedTuple):
    """How to extrapolate a recording of a few layers to a rank with more of them.

    longer: a recording of the same rank with more layers. few: layers of each chunk in the two
    recordings. chunks: layers of each chunk of the represented rank.
    """

    longer: Recording
    few: tuple[int, int]
    chunks: list[int]


class _Meeting:
    """Exchanges bytes between the ranks of a pipeline. Each is a thread; one runs at a time."""

    def __init__(self, size: int) -> None:
        self._said: list[bytes] = [b""] * size
        self.heard: list[list[bytes]] = []
        self._barrier = threading.Barrier(size)
        self.turn = threading.Lock()

    def answers(self, rank: int, data: bytes, axis: Axis) -> list[bytes]:
        """Return the bytes of each rank of an axis; on axes other than pp all equal `data`."""
        if axis.name != "pp":
            return [data] * axis.size
        self._said[rank] = data
        self.turn.release()
        try:
            self._barrier.wait()  # all have written
            said = list(self._said)
            if rank == 0:
                self.heard.append(said)
            self._barrier.wait()  # all have read
        finally:
            self.turn.acquire()
        return said

    def abort(self) -> None:
        """Release all ranks that wait, after one has failed."""
        self._barrier.abort()


def record(
    config: Config,
    script: ModuleType,
    ranks: Sequence[int] | None = None,
    few: int = 0,
    member: int = 0,
    warms_up: bool = True,
) -> dict[int, Recording]:
    """Return the recordings of a pipeline's ranks, by their places on pp.

    Every rank is built and has a recording; a step is recorded only for those in `ranks`.

    script: pretrain_llama.py, or a fork of it. ranks: places on pp; None: all. few: number of
    micro-batches to record; 0: `few_micro_batches`. member: a world rank of the pipeline. warms_up:
    whether a rank on a GPU in a pipeline first runs each chunk once, as in a real run. Raises any
    error of the program, also one raised before its first step.
    """
    config, size = of_own_kernels(config), config.parallel.pipeline_model_parallel_size
    wanted = range(size) if ranks is None else ranks
    places = script.make_grid(config, Launch(member, config.parallel.world_size)).pp.ranks
    meeting, found, errors = _Meeting(size), dict[int, Recording](), list[BaseException]()
    recorders = {rank: Recorder(config.parallel.device != "cpu") for rank in range(size)}

    def work(rank: int) -> None:
        with meeting.turn:
            try:
                found[rank] = _record(
                    config, script, places[rank], meeting, few if rank in wanted else -1,
                    recorder=recorders[rank],
                    warms_up=warms_up and recorders[rank].gpu and size > 1,
                )  # fmt: skip
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                meeting.abort()

    with (
        _without_collections(),
        _storages_noted(list(recorders.values())),
    ):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(1, size)]
        for thread in threads:
            thread.start()
        work(0)
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    for recording in found.values():
        recording.heard = meeting.heard
    return found


def of_own_kernels(config: Config) -> Config:
    """Return the config with Weft's kernels in place of other libraries'.

    Those take no meta tensors and may not be installed here. They save the same activations.
    """
    p = config.parallel
    own = replace(p, norm_backend="weft", attention_backend="auto", optimizer_backend="torch")
    return replace(config, parallel=own)


def overlap_of(config: Config) -> OverlapMap:
    """Return how a recording sends over tp: in a ring of messages, or by collectives.

    A ring where the flags ask for it, and for float8 rows on GPUs under `symmetric`. `auto` is
    recorded with collectives, as its choice is not known before the run.
    """
    p = config.parallel
    low = config.float8.fp8_format is not None and p.device != "cpu"
    ring = p.tp_comm_overlap == "ring" or (p.tp_comm_overlap == "symmetric" and low)
    return OverlapMap("ring" if ring else "none")


def recordings_of(
    config: Config, script: ModuleType, layers: tuple[int, int] | None = None
) -> list[Recording]:
    """Return the recordings of all ranks of a pipeline, in order.

    One rank of each group of similar ranks is recorded (forecast/like_ranks.py). layers: two
    numbers of layers to record each stage with, from which the moments of each rank with all its
    layers are extrapolated (forecast/moments.py); None: record all layers.
    """
    if layers is not None:
        provider, size = script.model_provider, config.parallel.pipeline_model_parallel_size
        chunks = [[len(s.layers) for s in rank_stages(config, provider, r)] for r in range(size)]
        low, high = (_recordings(config, script, n) for n in layers)
        return [
            replace(few, more=MoreLayers(longer, layers, own))
            for few, longer, own in zip(low, high, chunks, strict=True)
        ]
    return _recordings(config, script)


def _recordings(config: Config, script: ModuleType, layers: int = 0) -> list[Recording]:
    like = like_ranks(config, script.model_provider, layers)
    found = dict(sorted(record(like.config, script, sorted(set(like.places))).items()))
    if like.places == tuple(found):
        return [found[place] for place in like.places]
    few, count = few_micro_batches(like.config), micro_batches(config, 0)
    whole, recorded = schedule_of(config, few_micro_batches(config)), schedule_of(like.config, few)
    return [
        replace(found[place], micro_batches=count, order=order)
        for place, order in zip(like.places, followed(whole, recorded, like.places), strict=True)
    ]


def _record(
    config: Config, script: ModuleType, rank: int, meeting: _Meeting, few: int, recorder: Recorder,
    warms_up: bool,
) -> Recording:  # fmt: skip
    """Build a rank of the world, and record a step of it unless `few` is negative."""
    grid = script.make_grid(config, Launch(rank, config.parallel.world_size))
    transport = MetaTransport(recorder.gpu, partial(meeting.answers, grid.pp.rank))
    grid = grid.carried_by(transport).traced(recorder)
    with recorder:
        run = script.build(config, grid, META, Actions(recorder.begins))
        use_overlap(run.model, overlap_of(config))
        recording = Recording(
            run, recorder, few or few_micro_batches(config), micro_batches(config, 0)
        )
        if few >= 0:
            gc.collect()
            _record_steps(recording, script, grid, warms_up)
    return recording


@contextlib.contextmanager
def _storages_noted(recorders: Sequence[Recorder]) -> Iterator[None]:
    """Notify all recorders of host memory and of resized storages.

    Their ranks are threads of one process; each recorder ignores the storages of the others.
    """
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        out = resize(storage, nbytes)
        for recorder in recorders:
            recorder.resized(storage)
        return out

    def host(self: HostMemory, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        out = torch.empty(shape, dtype=dtype, device=META)
        for recorder in recorders:
            recorder.in_host(out)
        return out

    with (
        patch.object(HostMemory, "empty", host),
        patch.object(HostMemory, "zeros", host),
        patch.object(torch.UntypedStorage, "resize_", resized),
    ):
        yield


def _record_steps(
    recording: Recording, script: ModuleType, grid: Grid, warms_up: bool
) -> None:
    run, recorder, config = recording.run, recording.recorder, recording.run.config
    batches = batches_of_zeros(config, grid, META)[:1] * recording.few
    recorder.know(run)
    recorder.settle(OTHER_STATE)

    def begin() -> None:
        recorder.events.clear()
        recorder.transfers.clear()
        recorder.copies.clear()
        recording.walked.clear()
        recording.start = dict.fromkeys(STATE, 0)
        for storage in recorder.storages.values():
            kind = storage.kind or OTHER_STATE
            recording.start[kind] = recording.start.get(kind, 0) + storage.nbytes

    begin()
    if warms_up:
        run_chunks(run, script.model_provider, script.run_schedule, overlap_of(config))
        recording.warm_up = recording.fullest().total
    learns = run.sink.zero_stage >= 3 or isinstance(run.optimizer.home, StateOffload)
    for step in range(1 + learns):
        if step:
            gc.collect()
            recorder.know(run)
            recorder.settle(OTHER_STATE)
        begin()
        _, _, found_inf = script.train_step(run, batches, 1e-3)
        run.iteration += 1
    # the training loop's own collectives of each step
    spiked = [found_inf.bool()] * (config.fault.on_spike is not None)
    Agreement(grid.world).ask(False, False, found_inf, *spiked)
    if config.log.log_params_norm:
        run.optimizer.params_norm()


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Disable automatic garbage collection, which would free storages at unpredictable moments.

    Explicit `gc.collect` calls scan only objects made since: a scan of all takes a quarter of a
    second.
    """
    frozen = gc.get_freeze_count() > 0  # by the process itself
    gc.collect() if frozen else gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not frozen:
            gc.unfreeze()


def few_micro_batches(config: Config) -> int:
    """Return the least number of micro-batches whose step has all kinds of moments of a step."""
    p, count = config.parallel, max(micro_batch_counts(config))
    if p.defer_embedding_wgrad_compute:  # each keeps its deferred inputs until the step's end
        return count
    least = 3 + p.zero_reduce_each_microbatch  # the third is the first that adds to earlier sums
    return _few(
        p.schedule, p.pipeline_model_parallel_size, count, p.virtual_stages,
        p.microbatch_group_size_per_virtual_pipeline_stage,
        overlaps=p.overlap_moe_expert_parallel_comm, least=least,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _few(
    name: str, p: int, count: int, v: int, group: int | None, overlaps: bool, least: int
) -> int:
    """Return the least multiple of a group beyond which no rank holds more activations or overlaps
    another pair of F and B.

    least: the least number to return: a first micro-batch, a last one and one between them.
    """
    unit = max(p, group or p)
    sizes = [n for n in (2 * unit, 3 * unit, 4 * unit) if least <= n < count]
    most = [_most(build(name, p, n, v, group, overlaps)) for n in sizes]
    for n, here, more in zip(sizes, most, most[1:], strict=False):
        if here == more:
            return n
    return min(count, least) if p == 1 else count


def _most(schedule: Schedule) -> list[Any]:
    """Return each rank's peak number of activations, and the chunks of its overlapped F and B."""
    ones, beside = [1.0] * schedule.stages, list[set[tuple[int, int]]]()
    for rank, order in enumerate(schedule.ranks):
        pairs = schedule.overlapped_forwards(rank)
        beside.append({(order[n].chunk, order[n + 1].chunk) for n in pairs})
    return [*peak_activations(schedule, ones, ones), *beside]
