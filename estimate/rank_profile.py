# SPDX-License-Identifier: Apache-2.0
"""Measure what one pipeline rank's model keeps and sends in a micro-batch, by running it.

The model runs on meta tensors (estimate/meta.py): forward through each of its chunks, then
backward, in which the weight gradients follow each chunk's B where the schedule separates them.
Where only the output layer's are deferred, these follow the last chunk's B.
Nothing is sent: a trace records each collective instead.

    F of chunk 0, 1, ...  ->  B, then W, of the last chunk, ..., of chunk 0
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from estimate.context_parallel import rank_batch
from estimate.meta import (
    META,
    MetaAttention,
    MetaHostCopies,
    MetaOffload,
    MetaOperations,
    MetaRecompute,
    flash_attention,
)
from estimate.model_profile import (
    ModelProvider,
    StagedModel,
    plannable,
    rank_model,
)
from estimate.storages import LiveStorages, Saved
from mpu.activation_offload import Offload
from mpu.comm.transport import Axis
from mpu.gradients import GradientSink, WeightGradientQueue, run_deferred
from mpu.interleave import Interleaver
from mpu.layers.linear import use_overlap
from mpu.overlap.choices import OverlapMap
from mpu.pipeline.stage_layout import Stage
from training.config import Config
from training.layer_options import accumulate_dtype, recompute_of

PHASES = {"F": "forward", "B": "backward", "W": "wgrad"}


class Collective(NamedTuple):
    """One collective of a micro-batch: what a trace receives of it (mpu/comm/transport.py, Trace).

    phase: F, B or W. bytes: of the full tensor. sent: what leaves the rank. who, purpose: of its
    label; a layer by its name, with "*" for its number.
    """

    axis: str
    verb: str
    phase: str
    bytes: int
    sent: int
    who: str
    purpose: str


@dataclass(frozen=True)
class StageProfile:
    """What a stage keeps of one micro-batch, in bytes, and what it sends for it.

    for_b, for_w: stored from F to B and from B to W, without the logits: the numbers, float8 too,
    that autograd saves or a deferred weight gradient keeps, each storage once, but neither weights
    nor tables that micro-batches share. logits: stored from F to B; their gradient, of the
    same size, waits for W. again: the most that recomputation keeps in B, its inputs included.
    offloaded: bytes in host memory. under_way: of two units, the most that is copied at once.
    in_f, in_b, in_w: peak bytes while an action runs, in F and B with what the micro-batch stores,
    in W without what was deferred. message: what its F or B sends.
    f_turns, b_turns: of F and B, in parts between which another micro-batch may run
    (mpu/interleave.py), the most that lives in each part and what lives at its end; few_layers.py
    has none.
    """

    for_b: int
    for_w: int
    logits: int
    again: int
    offloaded: int
    under_way: int
    in_f: int
    in_b: int
    in_w: int
    message: int
    collectives: tuple[Collective, ...]
    f_turns: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    b_turns: tuple[tuple[int, int], ...] = field(default=(), compare=False)

    @property
    def working(self) -> int:
        """Return the peak of an action besides what is stored and what is recomputed."""
        stored = self.for_b + self.logits
        return max(self.in_f - stored, self.in_b - stored - self.again, self.in_w)


class Live(NamedTuple):
    """Bytes that live as a gradient is made, main gradients and weights not counted.

    most: the most from the gradient before until it is ready. ready: when it is.
    """

    most: int
    ready: int

    def plus(self, times: int, more: "Live", less: "Live") -> "Live":
        """Return what lives with so many times the difference of two others more."""
        return Live(*(a + times * (b - c) for a, b, c in zip(self, more, less, strict=True)))


@dataclass(frozen=True)
class RankProfile:
    """What a rank's model does in one micro-batch.

    stages: in the order of its chunks. uses: names of parameters in the order of their uses
    (GradientSink.acquire); gradients: in the order in which their gradients are ready. looked_up:
    parameters whose gradient comes by rows. live_bytes: what lives at each of `gradients`. In a
    pipeline uses and live_bytes may be left out. amaxes: bytes of the message that ends a step, for
    delayed scales in float8; else 0. loads: of that with the tokens of experts; else 0. auxiliary:
    the axes over which auxiliary losses are summed at the end of a step, one sum each.
    """

    stages: tuple[StageProfile, ...]
    uses: tuple[str, ...]
    gradients: tuple[str, ...]
    looked_up: frozenset[str]
    live_bytes: tuple[Live, ...]
    amaxes: int
    loads: int = 0
    auxiliary: tuple[str, ...] = ()


def rank_profile(
    config: Config, provider: ModelProvider, stages: Sequence[Stage], pp_rank: int, split: bool
) -> RankProfile:
    """Run a micro-batch of the run's size through a pipeline rank's stages; return its profile.

    split: whether the schedule separates W from B.
    """
    return _rank_profile(plannable(config), provider, tuple(stages), pp_rank, split)


@lru_cache(maxsize=256)
def _rank_profile(
    config: Config, provider: ModelProvider, stages: tuple[Stage, ...], pp_rank: int, split: bool
) -> RankProfile:
    live, queue, trace, interleaver = LiveStorages(), _Queue(), _Trace(), _Interleaver()
    sink = _Sink(accumulate_dtype(config), live)
    sink.in_float8 = bool(config.parallel.zero) and config.parallel.shard_size > 1
    again = recompute_of(config, META, MetaHostCopies, MetaOffload, MetaRecompute)
    model = rank_model(
        config, provider, stages, pp_rank,
        sink=sink, queue=queue, trace=trace, recompute=again, interleaver=interleaver,
    )  # fmt: skip
    assert isinstance(model, nn.Module)
    model.requires_grad_(True)  # what is frozen counts as trained here
    use_overlap(model, overlap_of(config))
    sink.names = {param: name for name, param in model.named_parameters()}
    trace.names = {module: name for name, module in model.named_modules()}
    with MetaAttention(flash_attention), MetaOperations():
        run = _Run(config, model, sink, queue, trace, offload=again.offload, live=live)
        interleaver.note = run.at_switch
        for param in sink.names:
            sink.main_grad(param)  # persistent from step to step
        with run.live:
            run.all(split)
    return RankProfile(
        run.profiles(),
        tuple(sink.uses),
        tuple(sink.gradients),
        frozenset(sink.looked_up),
        tuple(sink.live_bytes),
        amaxes=sink.amaxes.noted.nbytes if sink.amaxes is not None else 0,
        loads=sink.loads.nbytes if sink.loads is not None else 0,
        auxiliary=tuple(
            axis.name for axes in model.ctx.auxiliary_losses.sums for axis in axes
        ),
    )


def overlap_of(config: Config) -> OverlapMap:
    """Return how tp's transfers travel in a profile: by messages where the flags ask for a ring,
    which is also how rows of float8 travel on GPUs under `symmetric`; else by collectives. What
    `auto` chooses is not known before the run.
    """
    p = config.parallel
    low = config.float8.fp8_format is not None and p.device != "cpu"
    ring = p.tp_comm_overlap == "ring" or (p.tp_comm_overlap == "symmetric" and low)
    return OverlapMap("ring" if ring else "none")


class _Interleaver(Interleaver):
    """Notes when another micro-batch could run. There is none: each micro-batch runs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.note: Callable[[], None] = lambda: None

    def switch(self) -> None:
        self.note()


class _Run:
    """One micro-batch on its way through a rank's chunks."""

    def __init__(
        self,
        config: Config,
        model: StagedModel,
        sink: "_Sink",
        queue: "_Queue",
        trace: "_Trace",
        offload: Offload | None,
        live: LiveStorages,
    ) -> None:
        self.model, self.sink, self.queue, self.trace, self.live = model, sink, queue, trace, live
        assert offload is None or isinstance(offload, MetaOffload)
        self.offload = offload
        self.offloaded_bytes: dict[int, tuple[int, int]] = {}  # of a chunk: MetaOffload.bytes
        self.size, self.positions, self.documents = rank_batch(config)
        self.dtype = config.run.dtype
        self.defers_output = config.parallel.defer_embedding_wgrad_compute
        self.recomputes = config.parallel.recompute_granularity == "full"
        # a first micro-batch finds the storages that micro-batches share: these are not counted
        self.shared, self.logits = Saved(), torch.Size()
        self.before = [self._run(chunk, self.shared, labels=False) for chunk in self.chunks]
        for chunk, stage in enumerate(model.stages):
            if stage.loss:
                self.logits = self.before[chunk].shape
        sink.uses.clear()
        self.saved = [Saved(self.shared.storages) for _ in self.chunks]
        self.rerun = [Saved(self.shared.storages) for _ in self.chunks]
        self.out: dict[int, GradientEdge] = {}
        self.waiting: dict[int, list[Tensor]] = {}
        self.stored = [(0, 0)] * len(self.saved)
        self.most = {(chunk, kind): 0 for chunk in self.chunks for kind in "FBW"}
        self.counted: dict[int, int] = {}  # chunk -> bytes that live since its F
        self.begun = 0  # bytes that lived when the action began, its micro-batch's not among them
        self.parts: list[tuple[int, int]] = []  # of the action, as StageProfile.f_turns
        self.turns: dict[tuple[int, str], tuple[tuple[int, int], ...]] = {}  # of chunk and action

    @property
    def chunks(self) -> range:
        return range(len(self.model.stages))

    def _run(self, chunk: int, saved: "Saved", labels: bool = True) -> Tensor:
        stage, hidden = self.model.stages[chunk], None
        if self.offload:
            self.offload.begin(saved)
        tokens = torch.empty(self.size, dtype=torch.long, device=META)
        if not stage.embedding:
            shape = self.model.hidden_shape(*self.size)
            hidden = torch.empty(shape, dtype=self.dtype, device=META).requires_grad_()
        with saved_tensors_hooks(saved.pack, saved.unpack):
            target = tokens.clone() if labels and stage.loss else None
            documents = (self.positions, self.documents)
            return self.model(tokens, target, *documents, hidden=hidden, chunk=chunk)

    def all(self, split: bool) -> None:
        """Run every chunk forward, then every chunk backward."""
        for chunk in self.chunks:
            self.forward(chunk)
        for chunk in reversed(self.chunks):
            self.backward(chunk, split)

    def forward(self, chunk: int) -> None:
        self.trace.at = (chunk, "F")
        before = self._begin(0)
        out = self._run(chunk, self.saved[chunk])
        loss = self.model.stages[chunk].loss
        self.out[chunk] = get_gradient_edge(out.sum() if loss else out)
        self.most[chunk, "F"] = self.live.peak - before
        del out
        self.stored[chunk] = self.saved[chunk].bytes(self.logits)
        self.offloaded_bytes[chunk] = self.offload.bytes() if self.offload else (0, 0)
        self.counted[chunk] = self.live.now - before
        self._end(chunk, "F")

    def backward(self, chunk: int, split: bool) -> None:
        out, again = self.out.pop(chunk), self.rerun[chunk]
        self.trace.at = (chunk, "B")
        defers = split or self.defers_output
        before = self._begin(self.counted.pop(chunk))
        if defers:
            self.queue.defer(output_layer_only=not split)
        loss, shape = self.model.stages[chunk].loss, self.model.hidden_shape(*self.size)
        with saved_tensors_hooks(again.pack, again.unpack):
            dy = None if loss else torch.empty(shape, dtype=self.dtype, device=META)
            torch.autograd.backward((out,), (dy,))
        del out, dy
        self.most[chunk, "B"] = self.live.peak - before
        self._end(chunk, "B")
        if defers:
            self.waiting[chunk] = self.queue.waiting
            self.queue.waiting = []
            self.trace.at = (chunk, "W")
            before = self.live.begin()
            run_deferred(self.queue.take())
            self.most[chunk, "W"] = self.live.peak - before

    def _begin(self, stored: int) -> int:
        """Begin an action whose micro-batch stores so much; return what lives besides that."""
        self.parts.clear()
        self.begun = self.live.begin() - stored
        return self.begun

    def at_switch(self) -> None:
        """Note what the action has, and had at most since it last gave way."""
        self.parts.append((self.live.most_of_part() - self.begun, self.live.now - self.begun))

    def _end(self, chunk: int, action: str) -> None:
        self.at_switch()
        self.turns[chunk, action] = tuple(self.parts)

    def profiles(self) -> tuple[StageProfile, ...]:
        """Return what each chunk keeps and sends."""
        return tuple(self.profile(chunk) for chunk in self.chunks)

    def profile(self, chunk: int) -> StageProfile:
        stored, logits = self.stored[chunk]
        offloaded, two = self.offloaded_bytes[chunk]
        waits = Saved(self.shared.storages)
        packed = [waits.pack(tensor) for tensor in self.waiting.get(chunk, [])]
        for_w, gradient = waits.bytes(self.logits)
        del packed
        return StageProfile(
            stored - logits,
            for_w - gradient,
            logits,
            again=self.rerun[chunk].peak if self.recomputes else 0,
            offloaded=offloaded,
            under_way=two,
            in_f=self.most[chunk, "F"],
            in_b=self.most[chunk, "B"],
            in_w=self.most[chunk, "W"],
            message=prod(self.model.hidden_shape(*self.size)) * self.dtype.itemsize,
            collectives=tuple(each for at, each in self.trace.collectives if at == chunk),
            f_turns=self.turns[chunk, "F"],
            b_turns=self.turns[chunk, "B"],
        )


class _Sink(GradientSink):
    """Record the order in which parameters are used and their gradients ready; add nothing."""

    def __init__(self, dtype: torch.dtype, live: LiveStorages) -> None:
        super().__init__(dtype)
        self.live = live
        self.live_bytes: list[Live] = []
        self.names: dict[nn.Parameter, str] = {}
        self.uses: list[str] = []
        self.gradients: list[str] = []
        self.looked_up: set[str] = set()
        self.in_float8 = False  # weights that have rows of float8 arrive as these
        self.rows: dict[nn.Parameter, Tensor] = {}

    def acquire(self, param: nn.Parameter) -> Tensor:
        self.uses.append(self.names[param])
        how = getattr(param, "float8_rows", None)
        if how is None or not self.in_float8:
            return param
        if param not in self.rows:
            shape = (len(param), how.nbytes // len(param))
            self.rows[param] = torch.empty(shape, dtype=torch.uint8, device=META)
        return self.rows[param]

    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        pass

    def add_rows(self, param: nn.Parameter, rows: Tensor, grad: Tensor) -> None:
        self.looked_up.add(self.names[param])

    def register_grad_ready(self, param: nn.Parameter) -> None:
        self.gradients.append(self.names[param])
        self.live_bytes.append(Live(self.live.most_since(), self.live.now))


class _Queue(WeightGradientQueue):
    """Record the tensors that deferred weight gradients keep."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Tensor] = []

    def put(self, work: Any, tensors: Sequence[Tensor] = (), output_layer: bool = False) -> None:
        if self.defers(output_layer):
            self.waiting += tensors
        super().put(work, tensors, output_layer)


class _Trace:
    """Record every collective with its chunk and its phase."""

    def __init__(self) -> None:
        self.at = (-1, "")
        self.names: dict[Any, str] = {}  # of modules
        self.collectives: list[tuple[int, Collective]] = []

    def issued(
        self, verb: str, axis: Axis, tensor: Tensor, sent: int, async_op: bool, label: Any
    ) -> None:
        nbytes = tensor.nbytes * (axis.size if verb == "all_gather" else 1)
        if verb == "all_to_all":  # those of an exchange in equal parts that sends as much
            nbytes = -(-sent * axis.size // (axis.size - 1))
        chunk, phase = self.at
        who, purpose = label or (None, PHASES[phase])
        name = who if isinstance(who, str) else self.names.get(who, "model")
        name = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        found = Collective(
            axis=axis.name, verb=verb, phase=phase, bytes=nbytes, sent=sent, who=name,
            purpose=purpose,
        )  # fmt: skip
        self.collectives.append((chunk, found))
