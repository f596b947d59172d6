# SPDX-License-Identifier: Apache-2.0
"""Time a step by a rehearsal: its record of a rank, its clock, its model of a pipeline.

Rank 0 is recorded with few layers per stage and few micro-batches (forecast/rehearsal/worker.py),
at two counts of each, and extrapolated to all. The result is the time that `--rehearse` with the
same flags prints. All layers are recorded if they differ, or with Muon.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import pretrain_llama
from forecast.device_file import Device
from forecast.like_ranks import alike
from forecast.planner.cluster import Cluster
from forecast.planner.model import Model, last_of_each, read_flags
from forecast.planner.rank_bytes import bucket_size
from forecast.rehearsal.clock import Timing
from forecast.rehearsal.few_layers import (
    BOUND,
    BUSY,
    EXPOSED,
    HOST,
    LAYERS,
    REST,
    SEND,
    SEPARATOR,
    STAGE,
    STEP,
)
from forecast.rehearsal.pipeline_clock import Own, stage_seconds, through
from forecast.rehearsal.run import few_of
from training.run.model_profile import model_profile
from training.run.pipeline_stages import costs, rank_stages, stages_of
from training.settings.config import Config
from training.settings.pipeline_schedule import micro_batch_counts, own_stages, schedule_of
from training.settings.update_rules import needs_full_matrices

ROOT = Path(__file__).resolve().parents[2]
SHORT = 2  # most pipeline ranks, and chunks of a rank, that are recorded
PAIRS = (4, 6)  # micro-batches per pipeline rank to record if forwards overlap backwards
PARTS = ("F", "B", "W")
Numbers = Mapping[str, float]


class Point(NamedTuple):
    """Layers of each stage in a record, and how many of these are recomputed."""

    layers: int
    again: int


class Unplayable(ValueError):
    """A layout cannot be rehearsed. The message has the reason."""


class Worker:
    """The process that runs rehearsals. It starts at once and ends with the context."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "forecast.rehearsal.worker"], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        # answers are read as they come: a full pipe would stop the process, and then `ask`
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Take the process's lines until it ends; then an empty one."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, jobs: Sequence[dict[str, Any]]) -> None:
        """Send jobs to the process, which answers in order."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended; `answer` raises
            print(json.dumps(jobs), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Return the answer to the next job. Raises Unplayable if the process has ended."""
        if line := self._lines.get():
            found: dict[str, Any] = json.loads(line)
            return found
        self._lines.put("")  # for the next call
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:]
        raise Unplayable(*last or ["the rehearsal process has ended"])

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._reader.join()
        self._process.communicate()
        self._errors.close()


class Play(NamedTuple):
    """How to record and time a layout."""

    config: Config  # of the layout
    cut: list[int]  # layers of each chunk of rank 0
    chunks: int  # number of recorded chunks; the last one represents further ones
    again: int  # layers of a stage that are recomputed
    device: Device  # with the links of the cluster
    points: list[Point]  # the recordings, by their number of layers
    jobs: list[dict[str, Any]]  # for the worker; the same number for each point


def prepared(model: Model, cluster: Cluster, argv: Sequence[str]) -> Play:
    """Return how to record and time a run of a model. argv: its flags."""
    config, device = read_flags(list(argv), cluster.gpus), cluster.links()
    provider, p = pretrain_llama.model_provider, config.parallel
    stages = stages_of(config, provider)
    cut = [len(stages[n].layers) for n in own_stages(config, 0)]
    full = p.recompute_granularity == "full"
    block = full and p.recompute_method == "block"
    again = (p.recompute_num_layers or 0) if block else 0
    grouped = full and not block and (p.recompute_num_layers or 1) > 1
    alone = p.pipeline_model_parallel_size == 1
    # record two layers at least if a layer's weights are gathered, or its activations offloaded,
    # during another one. Gradient sums that take longer than backwards are exposed only after the
    # first of them, and not equally in the second layer: then record two and four
    sums = alone and p.overlap_grad_reduce and p.data_parallel_size * p.context_parallel_size > 1
    few = 1 + (sums or (alone and p.zero >= 3) or config.gpu.cpu_offload_activations)
    more = few + 1 + sums
    small = alone and cut[0] <= more
    # time is not linear in the layers if whole matrices are distributed over their owners, or if
    # several layers are recomputed together
    if small or grouped or not alike(config, provider) or needs_full_matrices(config):
        points = [Point(0, 0)]  # all layers
    elif block:
        points = [Point(few, 1), Point(more, 1), Point(more, 2)]
    else:
        points = [Point(n, 0) for n in (few, more)]
    count, ranks = max(micro_batch_counts(config)), p.pipeline_model_parallel_size
    # rank 0 does the same in a pipeline of two, if its neighbours on other axes stay the same
    if points[0].layers and p.rank_order.endswith("-pp") and not p.defer_embedding_wgrad_compute:
        ranks = min(ranks, SHORT)
    chunks = min(len(cut), SHORT) if points[0].layers else len(cut)
    # a first step records the order of gathers, and copies no state back from the host
    learns = p.zero >= 3 or p.optimizer_state_offload
    if p.overlap_moe_expert_parallel_comm:
        counts = sorted({min(count, each * ranks) for each in PAIRS})
    elif ranks > SHORT or ranks == 1 or p.defer_embedding_wgrad_compute:
        unit = p.microbatch_group_size_per_virtual_pipeline_stage or ranks
        counts = [min(count, few_of(config) + (2 * max(ranks, unit) if ranks > 1 else 1))]
    else:
        counts = [min(count, 4 * ranks)]
    every = [rank_stages(config, provider, rank) for rank in range(p.pipeline_model_parallel_size)]
    bucket = bucket_size(config, every)  # of the whole model
    words = ["--rehearse-device", cluster.device, "--rehearse-steps", str(1 + learns)]
    jobs = []
    for point, m in product(points, counts):
        jobs.append({
            "argv": last_of_each([*argv, *words]), "node": cluster.node, "world": cluster.gpus,
            "few": {
                "micro_batches": m, "layers": point.layers, "ranks": ranks, "chunks": chunks,
                "again": point.again, "bucket": bucket,
            },
            "levels": [list(level.__dict__.values()) for level in device.levels],
        })  # fmt: skip
    return Play(
        config=config, cut=cut, chunks=chunks, again=again, device=device, points=points, jobs=jobs
    )


def composed(play: Play, answers: Sequence[dict[str, Any]]) -> Timing:
    """Return the timing of a step from the worker's answers. Raises Unplayable with their error."""
    for found in answers:
        if "error" in found:
            raise Unplayable(found["error"])
    config, each = play.config, len(answers) // len(play.points)
    count, records = max(micro_batch_counts(config)), []
    for n in range(len(play.points)):
        by_count = [tuple(pair) for a in answers[n * each : (n + 1) * each] for pair in a["points"]]
        records.append(at_count(by_count, count))
    names = dict.fromkeys(name for record in records for name in record)
    ranks = config.parallel.pipeline_model_parallel_size

    def at(name: str, chunks: Sequence[int], recorded: int = 1) -> float:
        """Return a number at the layers of `chunks`; recorded: number of chunks that it covers."""
        layers = sum(chunks) / recorded
        again = sum(min(play.again, n) for n in chunks) / recorded
        return at_layers(play, [record.get(name, 0.0) for record in records], layers, again)

    def of_chunk(kind: str, part: str, chunk: int) -> float:
        recorded = min(chunk, play.chunks - 1)
        return at(SEPARATOR.join((kind, part, str(recorded))), play.cut[chunk : chunk + 1]) / count

    of_stages = tuple(kind + SEPARATOR for kind in (STAGE, LAYERS))
    found = {
        name: at(name, play.cut, play.chunks) for name in names if not name.startswith(of_stages)
    }
    step, exposed = found[STEP], without_negatives(of_kind(found, EXPOSED))
    if ranks > 1:
        schedule = schedule_of(config, count)
        own = Own(*(
            {part: {schedule.stage(0, c): of_chunk(kind, part, c) for c in range(len(play.cut))}
             for part in PARTS}
            for kind in (STAGE, LAYERS)
        ))  # fmt: skip
        provider = pretrain_llama.model_provider
        seconds = stage_seconds(own, costs(config, provider), costs(config, provider, ends=False))
        simulated, exposed = through(schedule, 0, seconds, found[SEND], exposed)
        step = found[REST] + simulated.step
    bounds = of_kind(found, BOUND)
    # during the head's long kernels a slow host gets ahead; the lead lasts for few layers, not many
    behind = max(0.0, bounds["host"] - step)
    step += behind
    profile = model_profile(config, pretrain_llama.model_provider)
    tokens = config.batch.global_batch_size * config.model.seq_length
    flops = profile.flops * tokens / config.parallel.world_size
    dtype = str(config.run.dtype).removeprefix("torch.")
    return Timing(
        step, flops / (step * play.device.peak(dtype)), of_kind(found, BUSY), exposed,
        bounds, found[HOST] + behind,
    )  # fmt: skip


def of_kind(found: Numbers, kind: str) -> dict[str, float]:
    """Return the numbers of a kind, without the kind in their names."""
    return {name.partition(SEPARATOR)[2]: value for name, value in found.items()
            if name.startswith(kind + SEPARATOR)}  # fmt: skip


def without_negatives(seconds: Numbers) -> dict[str, float]:
    """Return parts with the same sum, none of them negative.

    If few layers wait for one axis and more layers wait for another one instead, extrapolation
    makes the former negative and the latter too large.
    """
    found = {name: max(0.0, value) for name, value in seconds.items()}
    if over := sum(found.values()) - sum(seconds.values()):
        most = max(found, key=lambda name: found[name])
        found[most] -= over
    return found


def at_count(points: Sequence[Any], count: int) -> Numbers:
    """Return the numbers at `count` micro-batches, from those at one count or two."""
    points = sorted(points, key=lambda point: point[0])
    (few, low), (many, high) = points[0], points[-1]
    if few == many:
        assert count == many, f"{many} micro-batches are recorded of {count}"
        return dict(low)
    share = (count - few) / (many - few)
    found = {name: low.get(name, 0.0) + share * (value - low.get(name, 0.0))
             for name, value in high.items()}  # fmt: skip
    return found | ({SEND: high[SEND]} if SEND in high else {})


def at_layers(play: Play, values: Sequence[float], layers: float, again: float) -> float:
    """Return a number at `layers` layers per stage, `again` of them recomputed."""
    if len(values) == 1:
        return values[0]
    first, second = play.points[:2]
    one = (values[1] - values[0]) / (second.layers - first.layers)
    found = values[0] + one * (layers - first.layers)
    if len(values) == 3:
        found += (values[2] - values[1]) * (again - first.again)
    return found
