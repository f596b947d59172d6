# SPDX-License-Identifier: Apache-2.0
"""Record a layout: its memory as computed by --dry-run, its time as computed by --rehearse."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from forecast.planner.cluster import Cluster
from forecast.planner.model import Model, read_flags, with_rest
from forecast.planner.played import Play, Worker, composed, prepared
from forecast.planner.rank_bytes import Exact, Kinds, exactly
from forecast.rehearsal.clock import Timing
from training.run.waiting import Progress
from training.settings.config import Config


@dataclass
class Recorded:
    """A run of a model on a cluster.

    flags: of its layout. mechanisms: their number, as counted by layout.py. timing: set by `play`.
    """

    model: Model
    cluster: Cluster
    flags: str
    mechanisms: int = 0
    timing: Timing | None = field(default=None, repr=False)

    @property
    def argv(self) -> list[str]:
        """Return the flags of the model and of the layout, and others that parsing requires."""
        return with_rest([*self.model.flags, *shlex.split(self.flags)])

    @property
    def command(self) -> str:
        """Return the flags of model and layout; data, learning rate and length are the user's."""
        return f"{shlex.join(self.model.flags)} --bf16 {self.flags}"

    @cached_property
    def config(self) -> Config:
        """Return the run's config. Raises UsageError."""
        return read_flags(self.argv, self.cluster.gpus)

    @cached_property
    def ranks(self) -> list[Exact]:
        """Return the bytes of each pipeline rank, as --dry-run has them."""
        return exactly(self.config)

    @property
    def fullest(self) -> Kinds:
        """Return the bytes of the fullest rank by kind."""
        return max((rank.kinds for rank in self.ranks), key=lambda kinds: sum(kinds.values()))

    @property
    def bytes(self) -> float:
        """Return the bytes of the fullest rank."""
        return sum(self.fullest.values())

    @property
    def free(self) -> float:
        """Return the share of a GPU's memory that is left of the bytes available to a plan."""
        return (self.cluster.limit - self.bytes) / self.cluster.memory

    @property
    def in_host(self) -> float:
        """Return the bytes of activations and state in a node's host memory."""
        return self.cluster.node * max(rank.in_host for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """Return whether the fullest rank fits a GPU, and offloaded data fits a host."""
        return self.bytes <= self.cluster.limit and self.in_host <= self.cluster.host

    @property
    def played(self) -> Timing:
        """Return the timing of a step. The run must be played."""
        assert self.timing is not None, "not played"
        return self.timing

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a step."""
        return self.config.batch.global_batch_size * self.config.model.seq_length

    @property
    def rate(self) -> float:
        """Return the tokens per second and GPU. The run must be played."""
        return self.tokens / self.played.step_seconds / self.cluster.gpus


def play(
    runs: Iterable[Recorded], worker: Worker, progress: Progress | None = None
) -> list[Recorded]:
    """Rehearse runs; return them by the time of a step, the fastest first. Raises Unplayable.

    The first runs are rehearsed while `runs` yields later ones. progress: counts the records.
    """
    found, plans = list[Recorded](), list[tuple[Recorded, Play]]()
    for run in runs:
        found.append(run)
        if run.timing is None:
            plans.append((run, prepared(run.model, run.cluster, run.argv)))
            worker.ask(plans[-1][1].jobs)
    progress = progress or Progress()
    jobs = sum(len(plan.jobs) for _, plan in plans)
    if jobs:
        progress.begin("rehearsing the fastest layouts:", jobs, "records")
    answers = []
    for _ in range(jobs):
        answers.append(worker.answer())
        progress.add()
    of_plans = iter(answers)
    for run, plan in plans:
        run.timing = composed(plan, [next(of_plans) for _ in plan.jobs])
    return sorted(found, key=lambda run: run.played.step_seconds)
