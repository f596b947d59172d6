# SPDX-License-Identifier: Apache-2.0
"""Measure, before a run's buckets are made, how large they should be: --ddp-bucket-size auto.

Each rank runs a micro-batch of its model on zeros, with all weights in one piece of memory, and
notes when each parameter is used and when its gradient is done; then the collectives of buckets of
several sizes. estimate/bucket_size.py simulates every size, and the ranks take the one whose
slowest rank is fastest. On a CPU the size changes no bit (docs/numerics.md), so a resumed run
measures anew; on a GPU NCCL's sums depend on it, so that one takes its checkpoint's.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from estimate import rank_memory
from estimate.bucket_size import Cost, Costs, Timeline, candidates, choose, seconds_of
from estimate.model_profile import ModelProvider
from mpu.comm.collectives import all_gather, barrier, gather_bytes
from mpu.comm.transport import DONE, Axis, Handle, Label
from mpu.grid import Grid
from mpu.zero.bucket_layout import BLOCK, automatic_size
from mpu.zero.reduce import Reduction, sum_over_data
from training.checkpoint import Checkpoint, CheckpointError, Roots
from training.checkpoint.save import layout
from training.config import Config
from training.layer_options import accumulate_dtype, main_grads_dtype
from training.run.warm_up import Scratch, batches_of_zeros, scratch_model
from training.zero_config import zero_config

RUNS = 4  # of the micro-batch; the fastest counts
REPEATS = 5  # of a bucket's sum; 1 where it is expected to take longer than LONG
LONG, TOO_LONG = 0.5, 5.0  # seconds; a sum that is expected to take longer than this is not tried
LARGEST = 1 << 24  # elements
IN_A_ROW, MOST_IN_A_ROW = 1 << 19, 32  # elements, and buckets, of a row
MOST_PAIR = 4.0  # above 2: a link that lets a short burst pass faster than a row of them
LABEL = Label("bucket size", "measuring")
Note = Callable[[str], None]


class Noting(Scratch):
    """Notes when weights are first used, and when their gradients are done."""

    def __init__(self, dtype: torch.dtype, now: Callable[[], Any]) -> None:
        super().__init__(dtype)
        self._now = now
        self.used: dict[nn.Parameter, Any] = {}
        self.ready: dict[nn.Parameter, Any] = {}

    def acquire(self, param: nn.Parameter) -> Tensor:
        self.used.setdefault(param, self._now())
        return super().acquire(param)

    def register_grad_ready(self, param: nn.Parameter) -> None:
        self.ready[param] = self._now()


def choose_size(
    config: Config, grid: Grid, device: torch.device, provider: ModelProvider, note: Note
) -> Config:
    """Return the config with the size that was chosen, where the flags ask for that.

    All ranks call it, once they are connected, and choose the same size.
    """
    p = config.parallel
    if p.ddp_bucket_size != 0:
        return config
    layouts = [
        [each.entry for each in rank_memory.parameters(config, provider, rank).values()]
        for rank in range(grid.pp.size)
    ]
    largest = max(sum(entry.numel for entry in entries) for entries in layouts)
    usual = automatic_size(largest)
    if p.gradient_ranks == 1 or p.zero == 3 or grid.dp_cp_shard.symmetric:
        note(f"gradient buckets: about {usual:,} elements: {_why_not(config)}")
        return replace(config, parallel=replace(p, ddp_bucket_size=usual))
    if device.type == "cuda" and (before := recorded(config, grid, device)):
        note(
            f"gradient buckets: about {before:,} elements, as in the checkpoint, for the same bits"
        )
        return replace(config, parallel=replace(p, ddp_bucket_size=before))
    timeline = measured_timeline(config, grid, device, provider)
    costs = measure(config, grid, device, largest)
    sizes = candidates(largest, grid.dp_cp.size)
    own = seconds_of(
        layouts[grid.pp.rank], sizes, rank_memory.sharing(config), timeline, costs,
        sums=p.overlap_grad_reduce, gathers=p.overlap_param_gather,
    )  # fmt: skip
    mine = torch.tensor([own], dtype=torch.float64, device=device)
    seconds = all_gather(mine, grid.world)[0].max(0).values.tolist()  # of the slowest rank
    steps = torch.tensor([timeline.forward + timeline.backward], dtype=torch.float64, device=device)
    chosen = choose(sizes, seconds, all_gather(steps, grid.world)[0].min().item())
    predicted = dict(zip(sizes, seconds, strict=True))
    first, *_ = costs.sums
    note(
        f"gradient buckets: about {chosen:,} elements, as measured: backward "
        f"{timeline.backward * 1e3:.3g} ms, a collective {first.start * 1e3:.3g} ms and "
        f"{1e-6 / max(first.each, 1e-15):.3g} M elements/s; {predicted[chosen] * 1e3:.3g} ms a "
        f"step are exposed, and {predicted[usual] * 1e3:.3g} ms with {usual:,} elements"
    )
    return replace(config, parallel=replace(p, ddp_bucket_size=chosen))


def recorded(config: Config, grid: Grid, device: torch.device) -> int:
    """Return the size of the newest checkpoint from which the run continues, as rank 0 finds it.

    0 where there is none, or where it is of another layout, whose bits are others anyway.
    """
    c, found = config.checkpoint, 0
    if grid.rank == 0:
        paths = [path for path in dict.fromkeys((c.load, c.save)) if path is not None]
        for name in Roots(paths).candidates(c.ckpt_step, "--load")[0][:1]:
            with suppress(CheckpointError, OSError):  # a Hugging Face directory, or a damaged one
                state = Checkpoint(Path(name)).state
                found = state["ddp_bucket_size"] if state["layout"] == layout(grid) else 0
    return int(json.loads(gather_bytes(json.dumps(found).encode(), grid.world, device)[0]))


def _why_not(config: Config) -> str:
    """Return why no size is measured."""
    p = config.parallel
    if p.gradient_ranks == 1:
        return "there is one data-parallel rank"
    if p.zero == 3:
        return "at --zero-stage 3 a bucket is a transformer block"
    return "the data-parallel ranks share memory, so sums cannot overlap"


def _clock(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """Return what notes a moment, and what tells the seconds between two."""
    if device.type != "cuda":
        return time.perf_counter, lambda begin, end: end - begin

    def now() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(begin: Any, end: Any) -> float:
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(end)) / 1e3

    return now, between


def measured_timeline(
    config: Config, grid: Grid, device: torch.device, provider: ModelProvider
) -> Timeline:
    """Run a micro-batch of every chunk of this rank, several times; return the fastest's times."""
    now, between = _clock(device)
    sink = Noting(main_grads_dtype(config), now)
    model = scratch_model(config, grid, device, sink, provider)
    for _, param in model.named_parameters():
        param.requires_grad_(True)  # what is frozen counts as trained here
    batch = batches_of_zeros(config, grid, device)[0]
    shape = model.hidden_shape(*batch.tokens.shape)
    names = {param: name for name, param in model.named_parameters()}
    found: list[Timeline] = []
    for _ in range(RUNS):
        sink.begin_step()
        used, ready, forward = dict[str, float](), dict[str, float](), 0.0
        spans: list[tuple[float, dict[str, float]]] = []  # of backwards, in the order of chunks
        for chunk, stage in enumerate(model.stages):
            sink.used, sink.ready = {}, {}
            hidden = None
            if not stage.embedding:
                hidden = torch.zeros(shape, dtype=config.run.dtype, device=device)
                hidden.requires_grad_()
            begin = now()
            out = model(
                batch.tokens, batch.labels, batch.position_ids, batch.packed_seq_params,
                hidden=hidden, chunk=chunk,
            )  # fmt: skip
            out = out.sum() if stage.loss else out
            since = now()
            first = dict(sink.used)
            torch.autograd.backward(out, None if stage.loss else torch.zeros_like(out))
            end = now()
            used |= {names[each]: forward + between(begin, at) for each, at in first.items()}
            forward += between(begin, since)
            spans.append((between(since, end), {names[each]: between(since, at)
                                               for each, at in sink.ready.items()}))  # fmt: skip
        backward = 0.0
        for seconds, at in reversed(spans):
            ready |= {name: max(backward + each, ready.get(name, 0.0)) for name, each in at.items()}
            backward += seconds
        in_total = (
            dict.fromkeys(names.values(), 0.0) | used,
            dict.fromkeys(names.values(), backward),
        )
        found.append(Timeline(in_total[0], in_total[1] | ready, forward, backward))
    return min(found, key=lambda each: each.forward + each.backward)


def measure(config: Config, grid: Grid, device: torch.device, largest: int) -> Costs:
    """Return what the collectives of a bucket take, by its elements. All ranks call it.

    largest: the elements of the largest bucket that is possible.
    """
    dtype, main = accumulate_dtype(config), main_grads_dtype(config)
    wire = zero_config(config).grad_reduce_dtype
    shard, replicate, stage = grid.dp_cp_shard, grid.dp_cp_replicate, rank_memory.level(config)
    how = Reduction(stage, shard, replicate, dtype, main, wire)

    def sum_of(elements: int) -> Iterator[Handle]:
        grad = torch.zeros(elements, dtype=main, device=device)
        part = elements // shard.size
        own = grad[:part] if stage and main == dtype else grad.new_zeros(
            part if stage else elements, dtype=dtype
        )  # fmt: skip
        if not stage and main == dtype:
            own = grad
        return sum_over_data(grad, own, how, LABEL, earlier=False, last=True)

    def gather(elements: int) -> Iterator[Handle]:
        weights = torch.zeros(elements, dtype=config.run.dtype, device=device)
        part = elements // shard.size
        own = weights[shard.rank * part : (shard.rank + 1) * part]
        yield all_gather(own, shard, async_op=True, into=weights, label=LABEL)[1]

    found = _measured(sum_of, grid.dp_cp, device, largest)
    gathers = _measured(gather, grid.dp_cp, device, largest)[0] if stage else None
    return Costs(tuple(found), gathers, shared=device.type != "cuda")


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _alone(handles: Iterator[Handle], device: torch.device) -> list[float]:
    """Return the seconds of each collective of a bucket."""
    at, found = time.perf_counter(), list[float]()
    for handle in handles:
        handle.wait()
        _finish(device)
        found.append(time.perf_counter() - at)
        at = time.perf_counter()
    return found


def _in_a_row(run: Callable[[int], Iterator[Handle]], elements: int, count: int) -> float:
    """Return the seconds of as many buckets, which leave one after another as in a backward."""
    began, buckets = time.perf_counter(), [run(elements) for _ in range(count)]
    under_way = [next(buckets[0])]
    for before, bucket in enumerate(buckets[1:]):
        under_way.append(next(bucket))
        under_way[before].wait()
        under_way[before] = next(buckets[before], DONE)
    for handle, bucket in zip(under_way, buckets, strict=True):
        for each in chain((handle,), bucket):
            each.wait()
    return time.perf_counter() - began


def _pair(pair: float, alone: Sequence[float], count: int) -> float:
    """Return how long two collectives at once take in units of one alone.

    whole: the seconds of `count` buckets in a row. alone: those of one's collectives.
    """
    if len(alone) == 1:  # two are under way all the time
        ratio = 2 * pair / (count * max(alone[0], 1e-9))
    else:  # a bucket's second one during the first one of the next; the rest is alone
        both = pair - alone[0] - alone[1] - count * sum(alone[2:])
        ratio = 2 * both / ((count - 1) * max(alone[0] + alone[1], 1e-9))
    return min(max(ratio, 1.0), MOST_PAIR)


def _measured(
    run: Callable[[int], Iterator[Handle]], axis: Axis, device: torch.device, largest: int
) -> list[Cost]:
    """Return what the collectives of run(elements) take, from buckets that get larger fourfold.

    The slowest rank of the axis counts. Of repeats the median does.
    """
    grain, rows = BLOCK * axis.size, list[tuple[int, list[float], float]]()
    most = min(LARGEST, -(-largest // grain) * grain)
    size, before = grain, 0.0
    while 4 * before < TOO_LONG:
        times, count = list[list[float]](), min(max(IN_A_ROW // size, 2), MOST_IN_A_ROW)
        for _ in range(REPEATS if 4 * before < LONG else 1):
            barrier(axis, device)
            alone = _alone(run(size), device)
            barrier(axis, device)
            times.append([*alone, 0.0 if device.type == "cuda" else _in_a_row(run, size, count)])
        middle = [[median(each) for each in zip(*times, strict=True)]]
        seconds = torch.tensor(middle, dtype=torch.float64, device=device)
        *alone, both = all_gather(seconds, axis)[0].max(0).values.tolist()
        rows.append((size, alone, _pair(both, alone, count)))
        if size >= most:
            break
        size, before = min(4 * size, most), sum(alone)
    costs = []
    for n in range(len(rows[0][1])):
        points = tuple((float(size), alone[n], pair) for size, alone, pair in rows)
        (low, early, _), (high, late, _) = ((0.0, 0.0, 0.0), *points)[-2:]
        each = max(0.0, late - early) / (high - low)
        costs.append(Cost(max(0.0, points[0][1] - each * points[0][0]), each, points))
    return costs
