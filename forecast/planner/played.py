# SPDX-License-Identifier: Apache-2.0
"""Time a step by the rehearsal: its record of a rank, its clock, its model of a pipeline.

Rank 0 is recorded with few layers a stage and few micro-batches (forecast/rehearsal/worker.py), at
two counts of each, and what further ones take is added. So these are the seconds that `--rehearse`
of the same flags prints. A model whose layers differ is recorded with all of them, and so is Muon.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
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
from training.settings.pipeline_schedule import GROUP, micro_batch_counts, own_stages, schedule_of
from training.settings.update_rules import needs_full_matrices

ROOT = Path(__file__).resolve().parents[2]
SHORT = 2  # ranks of a pipeline that is recorded for a longer one, and chunks of a rank for more
PAIRS = (4, 6)  # micro-batches for each pipeline rank where a forward runs during a backward
PARTS = ("F", "B", "W")
Numbers = Mapping[str, float]


class Point(NamedTuple):
    """Layers of each stage, and those of them that backward runs again, in a record."""

    layers: int
    again: int


class Unplayable(ValueError):
    """A layout that no rehearsal runs: the text says why."""


class Worker:
    """The process that rehearses. It starts at once, and ends with the context."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "forecast.rehearsal.worker"], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip

    def ask(self, jobs: Sequence[dict[str, Any]]) -> None:
        """Have jobs done; those that are asked for first are done first."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: no answer comes
            print(json.dumps(jobs), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Return the answer to the next job. Raises Unplayable where the process has ended."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            found: dict[str, Any] = json.loads(line)
            return found
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:]
        raise Unplayable(*last or ["the process that rehearses has ended"])

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


class Play(NamedTuple):
    """How a layout is recorded and timed."""

    config: Config  # its own
    cut: list[int]  # layers of each chunk of rank 0
    chunks: int  # chunks that are recorded; further ones are like the last of them
    again: int  # layers of a stage that are recomputed
    device: Device  # with the links of the cluster
    points: list[Point]  # the recordings, by their number of layers
    jobs: list[dict[str, Any]]  # for the worker, equally many for each point


def prepared(model: Model, cluster: Cluster, argv: Sequence[str]) -> Play:
    """Return how a run of a model is to be played. argv: its flags."""
    config, device = read_flags(list(argv), cluster.gpus), cluster.links()
    provider, p = pretrain_llama.model_provider, config.parallel
    stages = stages_of(config, provider)
    cut = [len(stages[n].layers) for n in own_stages(config, 0)]
    block = p.recompute_granularity == "full" and p.recompute_method == "block"
    again = (p.recompute_num_layers or 0) if block else 0
    alone = p.pipeline_model_parallel_size == 1
    # a second layer has its weights gathered under the first, or its activations sent away; sums of
    # gradients show where they take longer than backwards, but not before the first are over, and
    # not alike in every second layer
    sums = alone and p.overlap_grad_reduce and p.data_parallel_size * p.context_parallel_size > 1
    few = 1 + (sums or (alone and p.zero >= 3) or config.gpu.cpu_offload_activations)
    more = few + 1 + sums
    small = alone and cut[0] <= more
    # owners of matrices get matrices, not layers
    if small or not alike(config, provider) or needs_full_matrices(config):
        points = [Point(0, 0)]  # all of them
    elif block:
        points = [Point(few, 1), Point(more, 1), Point(more, 2)]
    else:
        points = [Point(n, 0) for n in (few, more)]
    one = config.batch.micro_batch_size * p.data_parallel_size
    count, ranks = max(micro_batch_counts(config)), p.pipeline_model_parallel_size
    # in a pipeline of two rank 0 does the same, where it has the same neighbours on other axes
    if points[0].layers and p.rank_order.endswith("-pp") and not p.defer_embedding_wgrad_compute:
        ranks = min(ranks, SHORT)
    chunks = min(len(cut), SHORT) if points[0].layers else len(cut)
    # a first step learns the order of gathers, and has no state that comes back from the host
    learns = p.zero >= 3 or p.optimizer_state_offload
    if p.overlap_moe_expert_parallel_comm:
        counts = sorted({min(count, each * ranks) for each in PAIRS})
    elif ranks > SHORT or ranks == 1 or p.defer_embedding_wgrad_compute:
        unit = p.microbatch_group_size_per_virtual_pipeline_stage or ranks
        counts = [min(count, few_of(config) + (2 * max(ranks, unit) if ranks > 1 else 1))]
    else:
        counts = [min(count, 4 * ranks)]
    jobs = []
    for point in points:
        for m in counts:
            words = [*argv, "--train-iters", "8", "--global-batch-size", str(m * one),
                     "--rehearse-device", cluster.device,
                     "--rehearse-steps", str(1 + learns)]  # fmt: skip
            if point.layers:
                words += of_layers(config, point, ranks, chunks)
            jobs.append({
                "argv": last_of_each(words), "node": cluster.node,
                "world": cluster.gpus // p.pipeline_model_parallel_size * ranks,
                "levels": [list(level.__dict__.values()) for level in device.levels],
            })  # fmt: skip
    return Play(
        config=config, cut=cut, chunks=chunks, again=again, device=device, points=points, jobs=jobs
    )


def of_layers(config: Config, point: Point, ranks: int, chunks: int) -> list[str]:
    """Return the flags of a pipeline of so many ranks, and chunks of each, with few layers in each
    stage, and buckets as all have.
    """
    p, n = config.parallel, point.layers
    stages = ranks * chunks
    words = ["--num-layers", str(n * stages)]
    if ranks > 1:
        cut = ["t" * n] * stages
        words += ["--pipeline-model-parallel-size", str(ranks)]
        words += ["--pipeline-model-parallel-layout", "|".join(["E" + cut[0], *cut[1:]]) + "L"]
    if chunks < p.virtual_stages:
        words += ["--num-virtual-stages-per-pipeline-rank", str(chunks)]
    if p.microbatch_group_size_per_virtual_pipeline_stage:
        words += [GROUP, str(ranks)]
    if point.again:
        words += ["--recompute-num-layers", str(point.again)]
    every = [rank_stages(config, pretrain_llama.model_provider, rank)
             for rank in range(p.pipeline_model_parallel_size)]  # fmt: skip
    words += ["--ddp-bucket-size", str(bucket_size(config, every))]
    return words


def composed(play: Play, answers: Sequence[dict[str, Any]]) -> Timing:
    """Return the time of a step, from its records. Raises Unplayable with what a record raised."""
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

    def at(name: str, layers: float) -> float:
        return at_layers(play, [record.get(name, 0.0) for record in records], layers)

    def of_chunk(kind: str, part: str, chunk: int) -> float:
        recorded = min(chunk, play.chunks - 1)
        return at(SEPARATOR.join((kind, part, str(recorded))), play.cut[chunk]) / count

    mean = sum(play.cut) / play.chunks
    of_stages = tuple(kind + SEPARATOR for kind in (STAGE, LAYERS))
    found = {name: at(name, mean) for name in names if not name.startswith(of_stages)}
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
    # few layers may run in the lead that a slow host has by the head's long kernels, and many not
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
    """Return the numbers of a kind by their own names."""
    return {name.partition(SEPARATOR)[2]: value for name, value in found.items()
            if name.startswith(kind + SEPARATOR)}  # fmt: skip


def without_negatives(seconds: Numbers) -> dict[str, float]:
    """Return parts of the same sum, none of them below 0: where few layers wait for one thing and
    more layers wait for another instead, the first one's line falls, and the second one's is steep.
    """
    found = {name: max(0.0, value) for name, value in seconds.items()}
    if over := sum(found.values()) - sum(seconds.values()):
        most = max(found, key=lambda name: found[name])
        found[most] -= over
    return found


def at_count(points: Sequence[Any], count: int) -> Numbers:
    """Return numbers at so many micro-batches, from those of one count or two."""
    points = sorted(points, key=lambda point: point[0])
    (few, low), (many, high) = points[0], points[-1]
    if few == many:
        assert count == many, f"{many} micro-batches are recorded of {count}"
        return dict(low)
    share = (count - few) / (many - few)
    found = {name: low.get(name, 0.0) + share * (value - low.get(name, 0.0))
             for name, value in high.items()}  # fmt: skip
    return found | ({SEND: high[SEND]} if SEND in high else {})


def at_layers(play: Play, values: Sequence[float], layers: float) -> float:
    """Return a number of so many layers a stage, from the records'."""
    if len(values) == 1:
        return values[0]
    first, second = play.points[:2]
    one = (values[1] - values[0]) / (second.layers - first.layers)
    found = values[0] + one * (layers - first.layers)
    if len(values) == 3:
        again = min(play.again, layers)
        found += (values[2] - values[1]) * (again - first.again)
    return found
