# SPDX-License-Identifier: Apache-2.0
"""Work out what a rank keeps for backward while a schedule runs.

estimate/rank_profile.py measures what one micro-batch of a stage keeps; the schedule gives how
many micro-batches are stored at once. Not counted are the buffers of collectives, of the allocator
and of the kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

from estimate import few_layers
from estimate.model_profile import ModelProvider
from estimate.pipeline_stages import rank_stages
from estimate.rank_profile import RankProfile, StageProfile
from estimate.simulate import peak_activations
from mpu.pipeline.schedules import SPLIT, Action, Schedule, build
from mpu.pipeline.steps import plan
from training.config import Config
from training.pipeline_schedule import micro_batch_counts, own_stages, schedule_of

Chunks = tuple[int, ...]
STEADY = 3  # micro-batches for each pipeline rank after which a schedule's fullest moment repeats


class ActionPeak(NamedTuple):
    """What a pipeline rank keeps for backward at the fullest moment of an action, in bytes.

    activations, logits, working, under_way: as in ActivationPeak. begun: the chunks that have made
    their first gradients before. apart: the action makes a chunk's first or last ones.
    """

    action: Action
    begun: Chunks = ()
    apart: bool = False
    activations: int = 0
    logits: int = 0
    working: int = 0
    under_way: int = 0

    @property
    def total(self) -> int:
        """Return the bytes of all four."""
        return self.activations + self.logits + self.working + self.under_way


@dataclass(frozen=True)
class ActivationPeak:
    """What one pipeline rank keeps for backward at the fullest moment of a step, in bytes.

    for_b: stored from F to B; for_w: from B to W; each at its own peak. The others are bytes at
    the peak of their sum. activations: both, plus what a recomputed layer needs. logits: not in
    these. working: what the running action has besides all that, and the messages that come and go
    under it. under_way: offloaded bytes that are being copied. in_host: the most in host memory.
    actions: what the rank does, in order, without F's that a B overlaps: those are in the B. ends:
    for each chunk, as the rank makes its last gradients of a step: (that action, what other
    micro-batches store then, the fullest of the actions that follow, up to the next end, and its
    bytes). begins: for each chunk, as the rank makes its first gradients: (that action, what other
    micro-batches store then, the chunks that have made theirs).
    """

    for_b: int
    for_w: int
    activations: int
    logits: int
    working: int
    under_way: int
    in_host: int
    actions: tuple[ActionPeak, ...] = ()
    ends: tuple[tuple[Action, int, Action, int], ...] = ()
    begins: tuple[tuple[Action, int, Chunks], ...] = ()


def profile(config: Config, provider: ModelProvider, pp_rank: int = 0) -> RankProfile:
    """Return what a micro-batch keeps and sends on a pipeline rank, under the run's schedule."""
    stages = rank_stages(config, provider, pp_rank)
    return few_layers.profile_of(
        config, provider, stages, pp_rank, config.parallel.schedule in SPLIT
    )


def whole_profile(config: Config, provider: ModelProvider, pp_rank: int) -> RankProfile:
    """Return the same of all layers, measured one by one: with what lives at each gradient."""
    stages = rank_stages(config, provider, pp_rank)
    return few_layers.whole_profile(
        config, provider, stages, pp_rank, config.parallel.schedule in SPLIT
    )


@lru_cache(maxsize=1024)
def steady(name: str, p: int, count: int, v: int, group: int | None = None) -> int:
    """Return as few micro-batches as have the fullest moment of `count` of them in a schedule.

    They are STEADY for each pipeline rank, or all where a rank keeps all at once, as in GPipe.
    """
    few = STEADY * max(p, group or p)
    if count <= few:
        return count
    schedule = build(name, p, few, v, group)
    peaks = peak_activations(schedule, [1.0] * schedule.stages, [0.0] * schedule.stages)
    return count if any(most == few * v for most, _, _ in peaks) else few


def peaks(config: Config, provider: ModelProvider) -> list[ActivationPeak]:
    """Return what each pipeline rank keeps in a step of the run's largest batch."""
    p, count = config.parallel, max(micro_batch_counts(config))
    ranks = range(p.pipeline_model_parallel_size)
    if not p.defer_embedding_wgrad_compute:
        group = p.microbatch_group_size_per_virtual_pipeline_stage
        count = steady(p.schedule, len(ranks), count, p.virtual_stages, group)
    own = [profile(config, provider, rank).stages for rank in ranks]
    stages: dict[int, StageProfile] = {}
    for rank in ranks:
        stages |= zip(own_stages(config, rank), own[rank], strict=True)
    cut = [stages[number] for number in sorted(stages)]
    schedule = schedule_of(config, count)
    stored = peak_activations(schedule, [s.for_b for s in cut], [s.for_w for s in cut])
    in_host = [0.0] * len(ranks)
    if any(stage.offloaded for stage in cut):
        found = peak_activations(schedule, [s.offloaded for s in cut], [0] * len(cut))
        in_host = [most for _, _, most in found]
    walks = [_Walk(schedule, rank, cut) for rank in ranks]
    return [
        ActivationPeak(
            int(stored[rank][0]),
            int(stored[rank][1]),
            *walks[rank].fullest()[3:],
            in_host=int(in_host[rank]),
            actions=tuple(walks[rank].actions),
            ends=tuple(walks[rank].ends),
            begins=tuple(walks[rank].begins),
        )
        for rank in ranks
    ]


def in_turns(f: StageProfile, b: StageProfile) -> int:
    """Return the peak bytes while an F and a B run overlapped, with what both store."""
    most, has = 0, [0, b.for_b + b.logits]
    for parts in zip_longest(f.f_turns, b.b_turns):
        for which, part in enumerate(parts):
            if part is not None:
                most = max(most, part[0] + has[1 - which])
                has[which] = part[1]
    return most


class _Walk:
    """A pipeline rank's way through its schedule, action by action, in bytes.

    stored, logits: what micro-batches store. messages: inputs that have arrived or are about to,
    and the last output sent, which is freed when the next one is. actions, ends, begins: as in
    ActivationPeak. First gradients that are a chunk's last ones too, or are made in W, count as
    there from the beginning.

    An F and the B that it overlaps alternate, part by part, the F first.
    """

    def __init__(self, schedule: Schedule, rank: int, stages: Sequence[StageProfile]) -> None:
        self.stored = self.logits = self.messages = 0
        self.actions: list[ActionPeak] = []
        self.ends: list[tuple[Action, int, Action, int]] = []
        self.begins: list[tuple[Action, int, Chunks]] = []
        every = tuple(range(schedule.stages // len(schedule.ranks)))
        late = not schedule.split and schedule.micro_batches > 1
        self.begun: Chunks = () if late else every  # chunks that have gradients
        last, deferred = schedule.stages - 1, list[Action]()
        ending = "W" if schedule.split else "B", schedule.micro_batches - 1
        trains = any(action.kind == "B" for action in schedule.ranks[rank])
        sent = 0  # bytes of the last output that left
        overlapped: StageProfile | None = None  # of an F, until the B it overlaps is done
        for step in plan(schedule)[rank] if trains else ():
            (kind, chunk, i), stage = step.action, stages[step.stage]
            self.messages += stage.message * len(step.receives)
            if kind == "W":
                if schedule.split:
                    self._weight_gradient(step.action, stage)
                    if (kind, i) == ending:
                        self._end(step.action)
                continue  # else it ran with its B
            forward = kind == "F"
            if step.stage != (0 if forward else last):
                self.messages -= stage.message  # its input counts as the action's now
            if step.overlapped:
                overlapped = stage
            elif forward:
                self._store(stage.for_b, stage.logits)
                self._note(step.action, stage.in_f - stage.for_b - stage.logits)
            else:
                most = stage.in_b if overlapped is None else in_turns(overlapped, stage)
                first = chunk not in self.begun
                if first and overlapped is not None:
                    self.begun, first = (*self.begun, chunk), False
                in_use = most - stage.for_b - stage.logits
                apart = first or (overlapped is None and (kind, i) == ending)
                self._note(step.action, in_use, stage.again, stage.under_way, apart)
                self._store(-stage.for_b, -stage.logits)
                if first:
                    others = self.stored + self.logits + self.messages
                    self.begins.append((step.action, others, self.begun))
                    self.begun = *self.begun, chunk
                if overlapped is not None:
                    self._store(overlapped.for_b, overlapped.logits)
                    overlapped = None
                if (kind, i) == ending:
                    self._end(step.action)
                if schedule.split or (step.stage == last and i < schedule.deferred):
                    self._store(stage.for_w, stage.logits * (stage.for_w > 0))
                    if not schedule.split:
                        deferred.append(Action("W", chunk, i))
            if step.stage != (last if forward else 0):
                same_rank = schedule.place(step.stage + (1 if forward else -1))[0] == rank
                self.messages += stage.message - (0 if same_rank else sent)
                sent = sent if same_rank else stage.message
        for action in deferred:
            self._weight_gradient(action, stages[last])

    def fullest(self) -> ActionPeak:
        """Return the action that needs most, the last of several."""
        nothing = ActionPeak(Action("F", 0, 0))
        return max(reversed(self.actions), key=lambda peak: peak.total, default=nothing)

    def _weight_gradient(self, action: Action, stage: StageProfile) -> None:
        self._note(action, stage.in_w)
        self._store(-stage.for_w, -stage.logits * (stage.for_w > 0))

    def _end(self, action: Action) -> None:
        """Note what is kept beside a chunk's last gradients, which the action has just made."""
        self.ends.append((action, self.stored + self.logits + self.messages, action, 0))

    def _store(self, stored: int, logits: int) -> None:
        self.stored += stored
        self.logits += logits

    def _note(
        self, action: Action, in_use: int, again: int = 0, under_way: int = 0, apart: bool = False
    ) -> None:
        """Note an action's fullest moment; in_use: what it has besides what is stored.

        apart: the action makes a chunk's first or last gradients.
        """
        total = self.stored + self.logits + self.messages + in_use
        if self.ends:
            end, others, _, most = self.ends[-1]
            if total > most:
                self.ends[-1] = end, others, action, total
        working = self.messages + in_use - again
        moving = max(0, min(under_way, working))
        stored = self.stored + again + min(working, 0)
        own = (stored, self.logits, max(working, 0) - moving, moving)
        self.actions.append(ActionPeak(action, self.begun, apart, *own))
